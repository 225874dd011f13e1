-- Keeps waits_for and tokens right whoever writes, also a service that runs the document's SQL.
-- The one function that runs with its owner's rights: a foreign role may write dl_jobs without a grant on our sequence.
-- So it does nothing for any other table, and nobody may name it in a trigger of his own.
CREATE OR REPLACE FUNCTION {schema}.dl_jobs_shape() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF TG_RELID <> '{schema}.dl_jobs'::regclass THEN
    RAISE EXCEPTION 'dl_jobs_shape is a trigger of dl_jobs alone';
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
    NEW.token := nextval('{schema}.dl_token_seq');
    NEW.claimed_by := NULL;
    NEW.waits_for := NULL;
  ELSIF NEW.status = 'queued' AND NEW.available_at > now() THEN
    NEW.waits_for := 'time';
  ELSIF NEW.status = 'queued' AND NEW.lane IS NOT NULL THEN
    NEW.waits_for := 'limit';
  ELSE
    NEW.waits_for := NULL;
  END IF;
  RETURN NEW;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_jobs_shape() FROM PUBLIC;
