-- The one function of dl_jobs' BEFORE triggers, except dl_jobs_built_in: it keeps error groups, waits_for, tokens and
-- the marks of watchers correct for every writer, including services that run the document's SQL.
-- PostgreSQL parses a trigger's WHEN clause again in each statement. So the clauses are short and let more rows through
-- than are changed here, and the exact conditions are in this function. Its three parts come in this order: each one
-- sees the changes of the one before.
-- It runs with its owner's rights, so that a foreign role can write dl_jobs without a right on the objects that are
-- used here. Therefore it refuses every other table, and no other role may use it in a trigger.
CREATE OR REPLACE FUNCTION {schema}.dl_jobs_shape() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_is_wrong boolean;
BEGIN
  IF TG_RELID <> '{schema}.dl_jobs'::regclass THEN
    RAISE EXCEPTION 'dl_jobs_shape is a trigger of dl_jobs alone';
  END IF;

  -- Part 1: a row that is, or becomes, one that failed or waits for a retry. Its group is a column, so that an index
  -- counts the jobs of a group without reading them. A failed run gets its row in dl_errors. A running job's error is
  -- not compared: it may be long.
  IF (NEW.status IN ('failed', 'lost')
      AND ((OLD.status IN ('failed', 'lost')) IS NOT TRUE OR NEW.error IS DISTINCT FROM OLD.error))
     OR (NEW.status = 'queued'
         AND CASE WHEN OLD.status = 'queued' THEN NEW.error IS DISTINCT FROM OLD.error
                  ELSE NEW.error IS NOT NULL OR NEW.error_group IS NOT NULL END) THEN
    NEW.error_group := CASE WHEN NEW.error IS NOT NULL OR NEW.status <> 'queued'
                            THEN hashtextextended(NEW.task || E'\n' || {schema}.dl_error_group(NEW.error), 0) END;
    -- Not a job that snoozed or was released after an earlier error: that attempt does not count. Nor one that another
    -- service releases because its key is held, and that counts its attempt: its error stays unchanged.
    IF TG_OP = 'UPDATE' AND OLD.status = 'running' AND NEW.error_group IS NOT NULL AND NEW.attempt >= OLD.attempt
       AND (NEW.status <> 'queued' OR OLD.claimed_by IS NOT NULL OR NEW.error IS DISTINCT FROM OLD.error) THEN
      INSERT INTO {schema}.dl_errors (at, job_id, task, queue, attempt, worker, status, error_group, error)
      VALUES (statement_timestamp(), NEW.job_id, NEW.task, NEW.queue, NEW.attempt, OLD.claimed_by, NEW.status, NEW.error_group,
              left(coalesce(NEW.error, ''), 4000));
    END IF;
  END IF;

  -- Part 2: values that another writer may have left wrong. OLD is NULL in an INSERT.
  v_is_wrong :=
    -- A claim without a token.
    (NEW.status = 'running' AND OLD.status IS DISTINCT FROM 'running' AND NEW.token = coalesce(OLD.token, 0))
    OR (NEW.status = 'queued' AND NEW.waits_for IS NULL AND NEW.available_at > now())
    -- A job that runs after others is written, or queued again; or a row is restored: its predecessor may not exist.
    OR (NEW.status = 'queued' AND NEW.waits_on IS NOT NULL
        AND (OLD.status IS DISTINCT FROM 'queued' OR NEW.waits_for IS DISTINCT FROM 'after' OR NEW.available_at <> 'infinity'))
    -- A job with a lane waits there, also if a session makes it ready, or for its time.
    OR (NEW.lane IS NOT NULL AND NEW.status = 'queued' AND NEW.waits_for IS NULL)
    OR (NEW.lane <> NEW.task AND NEW.status IN ('queued', 'running'))
    OR ((NEW.status = 'queued' OR TG_OP = 'INSERT')
        AND (NEW.waits_for = 'after' AND NEW.waits_on IS NULL
             OR NEW.waits_for = 'limit' AND (NEW.lane IS NULL OR NEW.available_at > now())))
    OR NEW.waits_for NOT IN ('time', 'lock', 'after', 'limit')
    OR TG_OP = 'UPDATE' AND (
      (NEW.status = 'queued' AND NEW.waits_for = 'time' AND NEW.available_at <= now())
      -- A parked job is postponed; our park sets both columns in one statement.
      OR (NEW.status = 'queued' AND NEW.waits_for = 'lock' AND OLD.waits_for = 'lock'
          AND NEW.available_at <> OLD.available_at AND NEW.available_at > now())
      -- A superseded job ends; one that has ended does not get its unique key again by itself.
      OR (NEW.unique_key IS NOT NULL
          AND (NEW.superseded_by IS NOT NULL AND NEW.status IN ('queued', 'failed', 'lost')
               OR OLD.status NOT IN ('queued', 'running') AND NEW.status IN ('queued', 'running'))));
  IF v_is_wrong THEN
    -- A lane only has jobs of its task: workers take all jobs in it.
    IF NEW.lane <> NEW.task THEN
      NEW.lane := NULL;
    END IF;
    IF TG_OP = 'UPDATE' AND NEW.unique_key IS NOT NULL AND OLD.status NOT IN ('queued', 'running')
       AND NEW.status IN ('queued', 'running') THEN
      -- It has ended, and a newer job may have the key: no UPDATE may fail because of that. Our own sets the key again.
      NEW.unique_key := NULL;
      NEW.superseded_by := NULL;
    ELSIF TG_OP = 'UPDATE' AND NEW.superseded_by IS NOT NULL AND NEW.status IN ('queued', 'failed', 'lost') THEN
      -- A newer job of its unique key waits for this one's end, whatever session writes it: this one does not run
      -- again.
      IF NEW.status = 'queued' AND NEW.available_at > now()
         AND (SELECT t.uniqueness ->> 'after_error' = 'delay' FROM {schema}.dl_tasks t WHERE t.task = NEW.task) THEN
        -- Not if another session has locked it: an update would end that wait, and we may hold what the session waits
        -- for.
        UPDATE {schema}.dl_jobs n SET available_at = NEW.available_at
        WHERE n.job_id = (SELECT j.job_id FROM {schema}.dl_jobs j
                          WHERE j.job_id = NEW.superseded_by AND j.status = 'queued' AND j.available_at < NEW.available_at
                          FOR NO KEY UPDATE SKIP LOCKED);
      END IF;
      NEW.status := 'canceled';
      NEW.waits_for := NULL;
      NEW.finished_at := coalesce(NEW.finished_at, clock_timestamp());
    END IF;
    -- A job that is parked for its key and is postponed waits for its time; otherwise it would run when the key is
    -- free. An unknown waits_for is removed: no index has such a row, and it would wait forever.
    IF NEW.status = 'queued' AND NEW.waits_on IS NOT NULL THEN
      -- It runs after others, whatever else is written (an operator's retry, another time): that time is stored for
      -- later.
      IF OLD.status IS DISTINCT FROM 'queued' OR OLD.waits_for IS DISTINCT FROM 'after' THEN
        NEW.waits_on := '00000000-0000-0000-0000-000000000000';
      END IF;
      IF NEW.available_at <> 'infinity' THEN
        NEW.wanted_at := NEW.available_at;
      END IF;
      NEW.available_at := 'infinity';
      NEW.waits_for := 'after';
    ELSIF NEW.status = 'running' AND OLD.status IS DISTINCT FROM 'running' AND NEW.token = coalesce(OLD.token, 0) THEN
      -- A claim without a new token is from another service: fence the former run of the job. It ignores limits, but
      -- counts for them.
      NEW.lane := coalesce(NEW.lane, (SELECT t.task FROM {schema}.dl_tasks t WHERE t.task = NEW.task AND t.limited));
      NEW.token := greatest(uuid_hash_extended(gen_random_uuid(), 0) & 9007199254740991, 1);
      NEW.claimed_by := NULL;
      NEW.waits_for := NULL;
    ELSIF NEW.status = 'queued' AND NEW.available_at > now() THEN
      NEW.waits_for := 'time';
    ELSIF NEW.status = 'queued' AND NEW.lane IS NOT NULL THEN
      -- The lane may have been dropped since the job was moved there.
      NEW.lane := (SELECT l.lane FROM {schema}.dl_lanes l WHERE l.lane = NEW.lane);
      NEW.waits_for := CASE WHEN NEW.lane IS NOT NULL THEN 'limit' END;
    ELSE
      NEW.waits_for := NULL;
    END IF;
  END IF;

  -- Part 3: a mark is for one change. A caller that continues to wait marks the row again before each read, so that one
  -- that has left causes no further work.
  IF OLD.watched AND (NEW.status <> OLD.status OR NEW.progress IS DISTINCT FROM OLD.progress) THEN
    NEW.watched := false;
  END IF;
  RETURN NEW;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_jobs_shape() FROM PUBLIC;

-- Jobs of built-in tasks (process.*, notify.*, migrate) run commands of the operator, and are signed with its secrets.
-- So a role that may write dl_jobs needs one more right to add them, or to change their work: EXECUTE on this function,
-- which our services have.
CREATE OR REPLACE FUNCTION {schema}.dl_jobs_built_in() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF NOT has_function_privilege('{schema}.dl_jobs_built_in()'::regprocedure, 'EXECUTE') THEN
    RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = format(
      'jobs of the built-in task %s are written by services alone: the role %I has no EXECUTE on the function dl_jobs_built_in()',
      to_json(NEW.task), current_user);
  END IF;
  RETURN NEW;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_jobs_built_in() FROM PUBLIC;
