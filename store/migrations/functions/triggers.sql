-- The triggers of dl_jobs. Each row trigger except that of deletions has a WHEN clause, so that the common writes (a
-- due insert, our own claim, a heartbeat, a finish) call no function. PostgreSQL parses the clauses again in each
-- statement: they are short, let more rows through than the functions change, and must never let fewer through
-- (test_trigger_conditions.py compares).
-- Creating a trigger takes a lock that all writers wait for, so it is done only if the definition has changed: each
-- trigger's comment has the definition from which it was created.
DO $do$
DECLARE
  v_trigger record;
  v_made_from text;
BEGIN
  -- The document's own two triggers, which ours replace. They are dropped first, since that takes the stronger lock.
  FOR v_trigger IN
    SELECT tgname AS name FROM pg_trigger
    WHERE tgrelid = '{schema}.dl_jobs'::regclass AND tgname = ANY (ARRAY['dl_jobs_notify_ins', 'dl_jobs_notify_upd'])
  LOOP
    EXECUTE format('DROP TRIGGER %I ON {schema}.dl_jobs', v_trigger.name);
  END LOOP;

  FOR v_trigger IN
    SELECT * FROM (VALUES
      ('dl_jobs_shape_ins', $sql$
        BEFORE INSERT ON {schema}.dl_jobs FOR EACH ROW
        WHEN (NEW.available_at > now() OR NEW.waits_for IS NOT NULL OR NEW.waits_on IS NOT NULL OR NEW.lane IS NOT NULL
              OR NEW.error IS NOT NULL OR NEW.status IN ('failed', 'lost') OR (NEW.status = 'running' AND NEW.token = 0))
        EXECUTE FUNCTION {schema}.dl_jobs_shape()$sql$),
      ('dl_jobs_shape_upd', $sql$
        BEFORE UPDATE ON {schema}.dl_jobs FOR EACH ROW
        WHEN (NEW.status IN ('queued', 'failed', 'lost') OR OLD.watched OR NEW.waits_for IS NOT NULL OR NEW.lane <> NEW.task
              OR (OLD.status <> 'running' AND (OLD.status <> 'queued' OR NEW.token = OLD.token)))
        EXECUTE FUNCTION {schema}.dl_jobs_shape()$sql$),
      ('dl_jobs_built_in_ins', $sql$
        BEFORE INSERT ON {schema}.dl_jobs FOR EACH ROW
        WHEN (NEW.task LIKE 'process.%' OR NEW.task LIKE 'notify.%' OR NEW.task = 'migrate')
        EXECUTE FUNCTION {schema}.dl_jobs_built_in()$sql$),
      ('dl_jobs_built_in_upd', $sql$
        BEFORE UPDATE OF task, args ON {schema}.dl_jobs FOR EACH ROW
        WHEN (NEW.task LIKE 'process.%' OR NEW.task LIKE 'notify.%' OR NEW.task = 'migrate')
        EXECUTE FUNCTION {schema}.dl_jobs_built_in()$sql$),
      ('dl_jobs_inserted', $sql$
        AFTER INSERT ON {schema}.dl_jobs REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT
        EXECUTE FUNCTION {schema}.dl_jobs_inserted()$sql$),
      -- A row trigger: one with a transition table cannot have a WHEN clause or a column list and would copy every
      -- heartbeat.
      ('dl_jobs_changed', $sql$
        AFTER UPDATE ON {schema}.dl_jobs FOR EACH ROW
        WHEN (NEW.status = 'queued' OR NEW.cancel_requested OR OLD.awaited OR OLD.watched
              OR (OLD.lane IS NOT NULL AND NEW.status <> 'running'))
        EXECUTE FUNCTION {schema}.dl_jobs_changed()$sql$),
      ('dl_jobs_deleted', $sql$
        AFTER DELETE ON {schema}.dl_jobs FOR EACH ROW
        EXECUTE FUNCTION {schema}.dl_jobs_deleted()$sql$)
    ) AS t (name, definition)
  LOOP
    SELECT obj_description(oid, 'pg_trigger') INTO v_made_from
    FROM pg_trigger WHERE tgrelid = '{schema}.dl_jobs'::regclass AND tgname = v_trigger.name;
    IF v_made_from IS DISTINCT FROM v_trigger.definition THEN
      EXECUTE format('CREATE OR REPLACE TRIGGER %I %s', v_trigger.name, v_trigger.definition);
      EXECUTE format('COMMENT ON TRIGGER %I ON {schema}.dl_jobs IS %L', v_trigger.name, v_trigger.definition);
    END IF;
  END LOOP;
END $do$;
