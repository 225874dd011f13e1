-- Keeps waits_for, tokens and notifications right whoever writes, also a service that runs the document's SQL.
-- Trigger functions run with the definer's rights: a foreign role may write dl_jobs without a grant on our sequence.
-- A payload has at most 8,000 bytes; longer names of queues are nobody's here.
-- Each has a WHEN clause, so that the common writes (a due insert, our own claim, a heartbeat, a finish) pay a comparison only.

CREATE OR REPLACE FUNCTION dl_jobs_shape() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
BEGIN
  IF NEW.status = 'running' THEN
    -- A claim that brought no token of its own is a foreign one: fence whoever ran the job before.
    NEW.token := nextval('dl_token_seq');
    NEW.claimed_by := NULL;
    NEW.waits_for := NULL;
  ELSIF NEW.available_at > now() THEN
    NEW.waits_for := 'time';
  ELSE
    NEW.waits_for := NULL;
  END IF;
  RETURN NEW;
END $$;

DROP TRIGGER IF EXISTS dl_jobs_shape_ins ON dl_jobs;
CREATE TRIGGER dl_jobs_shape_ins BEFORE INSERT ON dl_jobs FOR EACH ROW
  WHEN ((NEW.status = 'queued' AND NEW.waits_for IS NULL AND NEW.available_at > now())
     OR (NEW.status = 'running' AND NEW.token = 0))
  EXECUTE FUNCTION dl_jobs_shape();

DROP TRIGGER IF EXISTS dl_jobs_shape_upd ON dl_jobs;
CREATE TRIGGER dl_jobs_shape_upd BEFORE UPDATE ON dl_jobs FOR EACH ROW
  WHEN ((NEW.status = 'running' AND OLD.status <> 'running' AND NEW.token = OLD.token)
     OR (NEW.status = 'queued' AND NEW.waits_for IS NULL AND NEW.available_at > now())
     OR (NEW.status = 'queued' AND NEW.waits_for = 'time' AND NEW.available_at <= now()))
  EXECUTE FUNCTION dl_jobs_shape();

CREATE OR REPLACE FUNCTION dl_jobs_inserted() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
DECLARE
  v_queue text;
  v_due timestamptz;
BEGIN
  FOR v_queue IN SELECT DISTINCT queue FROM inserted WHERE status = 'queued' AND waits_for IS NULL LOOP
    PERFORM pg_notify('dl_jobs', left(v_queue, 1000));
  END LOOP;
  SELECT min(available_at) INTO v_due FROM inserted WHERE status = 'queued' AND waits_for = 'time';
  IF v_due IS NOT NULL THEN
    PERFORM pg_notify('dl_due', floor(extract(epoch FROM v_due))::text);
  END IF;
  RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION dl_jobs_changed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = {schema}, pg_temp AS $$
BEGIN
  IF NEW.status = 'queued' AND NEW.waits_for IS NULL AND (OLD.status <> 'queued' OR OLD.waits_for IS NOT NULL) THEN
    PERFORM pg_notify('dl_jobs', left(NEW.queue, 1000));
  ELSIF NEW.status = 'queued' AND NEW.waits_for = 'time' THEN
    -- Whole seconds, so that a storm of retries in one transaction folds into a few notifications.
    PERFORM pg_notify('dl_due', floor(extract(epoch FROM NEW.available_at))::text);
  ELSIF NEW.status = 'running' AND NEW.cancel_requested AND NOT OLD.cancel_requested THEN
    PERFORM pg_notify('dl_cancel', NEW.job_id::text);
  END IF;
  IF NEW.watched THEN
    PERFORM pg_notify('dl_changed', NEW.job_id::text);
  END IF;
  RETURN NULL;
END $$;

DROP TRIGGER IF EXISTS dl_jobs_notify_ins ON dl_jobs;
DROP TRIGGER IF EXISTS dl_jobs_notify_upd ON dl_jobs;

DROP TRIGGER IF EXISTS dl_jobs_inserted ON dl_jobs;
CREATE TRIGGER dl_jobs_inserted AFTER INSERT ON dl_jobs REFERENCING NEW TABLE AS inserted
  FOR EACH STATEMENT EXECUTE FUNCTION dl_jobs_inserted();

-- A row trigger: one with a transition table can't have a WHEN clause or a column list and would copy every heartbeat.
DROP TRIGGER IF EXISTS dl_jobs_changed ON dl_jobs;
CREATE TRIGGER dl_jobs_changed AFTER UPDATE ON dl_jobs FOR EACH ROW
  WHEN ((NEW.status = 'queued' AND NEW.waits_for IS NULL AND (OLD.status <> 'queued' OR OLD.waits_for IS NOT NULL))
     OR (NEW.status = 'queued' AND NEW.waits_for = 'time'
         AND (OLD.status <> 'queued' OR OLD.waits_for IS DISTINCT FROM 'time' OR NEW.available_at < OLD.available_at))
     OR (NEW.status = 'running' AND NEW.cancel_requested AND NOT OLD.cancel_requested)
     OR (NEW.watched AND (NEW.status <> OLD.status OR NEW.progress IS DISTINCT FROM OLD.progress)))
  EXECUTE FUNCTION dl_jobs_changed();
