-- Failures for the notification of operators are written in the transactions in which they happen, by every writer,
-- while a process has targets.

-- A run whose job has failed without a retry, or was lost: its row in the log of errors, which dl_jobs_shape writes.
-- Jobs that notify operators of failures (BUILT_IN in jobs/tasks.py) are excluded: their own failures notify no
-- operator.
CREATE OR REPLACE FUNCTION {schema}.dl_error_noticed() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF EXISTS (SELECT FROM {schema}.dl_notice_watch WHERE until > now()) THEN
    INSERT INTO {schema}.dl_notices (kind, name, queue, job_id, error)
    VALUES (NEW.status::text, NEW.task, NEW.queue, NEW.job_id, left(NEW.error, 1000));
    PERFORM pg_notify('dl_notice', '');
  END IF;
  RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_error_noticed() FROM PUBLIC;

-- A schedule that was paused by its own failure, not by an operator; and left-out planned times, by a new row or by one
-- whose count increases.
CREATE OR REPLACE FUNCTION {schema}.dl_schedule_noticed() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF EXISTS (SELECT FROM {schema}.dl_notice_watch WHERE until > now()) THEN
    INSERT INTO {schema}.dl_notices (kind, name, error, times)
    VALUES (CASE NEW.kind WHEN 'paused' THEN 'schedule_paused' ELSE NEW.kind END, NEW.name, left(NEW.payload ->> 'why', 1000),
            coalesce((NEW.payload ->> 'times')::int, 1) - CASE TG_OP WHEN 'UPDATE' THEN (OLD.payload ->> 'times')::int ELSE 0 END);
    PERFORM pg_notify('dl_notice', '');
  END IF;
  RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_schedule_noticed() FROM PUBLIC;

-- A durable process whose status has become error.
CREATE OR REPLACE FUNCTION {schema}.dl_process_noticed() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF EXISTS (SELECT FROM {schema}.dl_notice_watch WHERE until > now()) THEN
    INSERT INTO {schema}.dl_notices (kind, name, queue, error)
    VALUES ('process_failed', NEW.type, 'process.' || NEW.type, left(NEW.detail, 1000));
    PERFORM pg_notify('dl_notice', '');
  END IF;
  RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_noticed() FROM PUBLIC;
DO $do$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = '{schema}.dl_processes'::regclass AND tgname = 'dl_process_noticed') THEN
    CREATE TRIGGER dl_process_noticed AFTER UPDATE OF status ON {schema}.dl_processes FOR EACH ROW
      WHEN (NEW.status = 'error' AND OLD.status <> 'error')
      EXECUTE FUNCTION {schema}.dl_process_noticed();
  END IF;
  IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = '{schema}.dl_errors'::regclass AND tgname = 'dl_error_noticed') THEN
    CREATE TRIGGER dl_error_noticed AFTER INSERT ON {schema}.dl_errors FOR EACH ROW
      WHEN (NEW.status IN ('failed', 'lost') AND NEW.task NOT IN ('notify.webhook', 'notify.command'))
      EXECUTE FUNCTION {schema}.dl_error_noticed();
  END IF;
  IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = '{schema}.dl_schedule_events'::regclass AND tgname = 'dl_schedule_noticed') THEN
    CREATE TRIGGER dl_schedule_noticed AFTER INSERT ON {schema}.dl_schedule_events FOR EACH ROW
      WHEN (NEW.kind IN ('paused', 'left_out') AND NEW.payload ->> 'why' IS NOT NULL)
      EXECUTE FUNCTION {schema}.dl_schedule_noticed();
  END IF;
  IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = '{schema}.dl_schedule_events'::regclass AND tgname = 'dl_schedule_noticed_upd') THEN
    CREATE TRIGGER dl_schedule_noticed_upd AFTER UPDATE OF payload ON {schema}.dl_schedule_events FOR EACH ROW
      WHEN (NEW.kind = 'left_out' AND (NEW.payload ->> 'times')::int > (OLD.payload ->> 'times')::int)
      EXECUTE FUNCTION {schema}.dl_schedule_noticed();
  END IF;
END $do$;
