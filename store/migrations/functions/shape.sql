-- Keeps waits_for and tokens right whoever writes, also a service that runs the document's SQL.
-- The one function that runs with its owner's rights: a foreign role may write dl_jobs without a grant on our sequence.
-- So it does nothing for any other table, and nobody may name it in a trigger of his own.
CREATE OR REPLACE FUNCTION {schema}.dl_jobs_shape() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF TG_RELID <> '{schema}.dl_jobs'::regclass THEN
    RAISE EXCEPTION 'dl_jobs_shape is a trigger of dl_jobs alone';
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
    -- A claim that brought no token of its own is a foreign one: fence whoever ran the job before.
    NEW.token := nextval('{schema}.dl_token_seq');
    NEW.claimed_by := NULL;
    NEW.waits_for := NULL;
  ELSIF NEW.status = 'queued' AND NEW.available_at > now() THEN
    NEW.waits_for := 'time';
  ELSE
    NEW.waits_for := NULL;
  END IF;
  RETURN NEW;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_jobs_shape() FROM PUBLIC;
