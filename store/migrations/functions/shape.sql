-- Keeps waits_for and tokens correct for every writer, including services that run the document's SQL.
-- It runs with its owner's rights, so that a foreign role can write dl_jobs without a grant on our sequence.
-- Therefore it refuses every other table, and no other role may use it in a trigger.
CREATE OR REPLACE FUNCTION {schema}.dl_jobs_shape() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF TG_RELID <> '{schema}.dl_jobs'::regclass THEN
    RAISE EXCEPTION 'dl_jobs_shape is a trigger of dl_jobs alone';
  END IF;
  -- A lane has jobs of its task alone: workers take all that is in it.
  IF NEW.lane <> NEW.task THEN
    NEW.lane := NULL;
  END IF;
  IF TG_OP = 'UPDATE' AND NEW.unique_key IS NOT NULL AND OLD.status NOT IN ('queued', 'running')
     AND NEW.status IN ('queued', 'running') THEN
    -- It has ended, and a newer job may have its place: nobody's UPDATE may fail for that. Our own gives it the key again.
    NEW.unique_key := NULL;
    NEW.superseded_by := NULL;
  ELSIF TG_OP = 'UPDATE' AND NEW.superseded_by IS NOT NULL AND NEW.status IN ('queued', 'failed', 'lost') THEN
    -- A newer job of its unique key waits for this one's end, whoever writes it: this one does not run again.
    IF NEW.status = 'queued' AND NEW.available_at > now()
       AND (SELECT t.uniqueness ->> 'after_error' = 'delay' FROM {schema}.dl_tasks t WHERE t.task = NEW.task) THEN
      -- Not if somebody has it locked: an update cuts the wait, and we may hold what he waits for.
      UPDATE {schema}.dl_jobs n SET available_at = NEW.available_at
      WHERE n.job_id = (SELECT j.job_id FROM {schema}.dl_jobs j
                        WHERE j.job_id = NEW.superseded_by AND j.status = 'queued' AND j.available_at < NEW.available_at
                        FOR NO KEY UPDATE SKIP LOCKED);
    END IF;
    NEW.status := 'canceled';
    NEW.waits_for := NULL;
    NEW.finished_at := coalesce(NEW.finished_at, clock_timestamp());
    RETURN NEW;
  END IF;
  -- A job that is parked for its key and that somebody postpones waits for its time, or it would run when the key is free.
  -- This is also called for a waits_for that is none of ours, which no index has: such a job would wait for ever.
  IF NEW.status = 'queued' AND NEW.waits_on IS NOT NULL THEN
    -- It runs after others, whatever else somebody writes (an operator's retry, another time): that time is kept aside.
    IF OLD.status IS DISTINCT FROM 'queued' OR OLD.waits_for IS DISTINCT FROM 'after' THEN
      NEW.waits_on := '00000000-0000-0000-0000-000000000000';
    END IF;
    IF NEW.available_at <> 'infinity' THEN
      NEW.wanted_at := NEW.available_at;
    END IF;
    NEW.available_at := 'infinity';
    NEW.waits_for := 'after';
  ELSIF NEW.status = 'running' AND OLD.status IS DISTINCT FROM 'running' AND NEW.token = coalesce(OLD.token, 0) THEN
    -- A claim that brought no token of its own is a foreign one: fence whoever ran the job before. It knows no limits, but it counts.
    NEW.lane := coalesce(NEW.lane, (SELECT t.task FROM {schema}.dl_tasks t WHERE t.task = NEW.task AND t.limited));
    NEW.token := greatest(uuid_hash_extended(gen_random_uuid(), 0) & 9007199254740991, 1);
    NEW.claimed_by := NULL;
    NEW.waits_for := NULL;
  ELSIF NEW.status = 'queued' AND NEW.available_at > now() THEN
    NEW.waits_for := 'time';
  ELSIF NEW.status = 'queued' AND NEW.lane IS NOT NULL THEN
    -- A lane may have been dropped since the job was put there.
    NEW.lane := (SELECT l.lane FROM {schema}.dl_lanes l WHERE l.lane = NEW.lane);
    NEW.waits_for := CASE WHEN NEW.lane IS NOT NULL THEN 'limit' END;
  ELSE
    NEW.waits_for := NULL;
  END IF;
  RETURN NEW;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_jobs_shape() FROM PUBLIC;

-- Jobs of built-in tasks (process.*, notify.*, migrate) run commands of the operator, and are signed with its secrets. So a role that may
-- write dl_jobs needs one more right to add them, or to change what they do: EXECUTE on this function, which our services have.
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
