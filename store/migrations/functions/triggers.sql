-- The triggers of dl_jobs. Each has a WHEN clause, so that the common writes (a due insert, our own claim, a heartbeat, a
-- finish) pay a comparison only.
-- To create one takes a lock that all writers wait for, so it is done only where the definition has changed: each trigger's
-- comment has the definition that it was made from.
DO $do$
DECLARE
  v_trigger record;
  v_made_from text;
BEGIN
  FOR v_trigger IN
    SELECT * FROM (VALUES
      ('dl_jobs_shape_ins', $sql$
        BEFORE INSERT ON {schema}.dl_jobs FOR EACH ROW
        WHEN ((NEW.status = 'queued' AND NEW.waits_for IS NULL AND NEW.available_at > now())
           OR (NEW.status = 'running' AND NEW.token = 0)
           OR (NEW.status = 'queued' AND NEW.waits_on IS NOT NULL
               AND (NEW.waits_for IS DISTINCT FROM 'after' OR NEW.available_at <> 'infinity'
                    -- A row that is restored: what it waited for may not be there.
                    OR NEW.waits_on <> '00000000-0000-0000-0000-000000000000'))
           OR (NEW.waits_for = 'after' AND NEW.waits_on IS NULL)
           OR (NEW.lane IS NOT NULL AND NEW.status = 'queued' AND NEW.waits_for IS NULL)
           OR (NEW.lane <> NEW.task AND NEW.status IN ('queued', 'running'))
           OR (NEW.waits_for = 'limit' AND (NEW.lane IS NULL OR NEW.available_at > now()))
           OR NEW.waits_for NOT IN ('time', 'lock', 'task', 'after', 'limit'))
        EXECUTE FUNCTION {schema}.dl_jobs_shape()$sql$),
      ('dl_jobs_shape_upd', $sql$
        BEFORE UPDATE ON {schema}.dl_jobs FOR EACH ROW
        WHEN ((NEW.status = 'running' AND OLD.status <> 'running' AND NEW.token = OLD.token)
           OR (NEW.status = 'queued' AND NEW.waits_for IS NULL AND NEW.available_at > now())
           OR (NEW.status = 'queued' AND NEW.waits_for = 'time' AND NEW.available_at <= now())
           -- Somebody postpones a job that is parked; our park sets both columns at once.
           OR (NEW.status = 'queued' AND NEW.waits_for = 'lock' AND OLD.waits_for = 'lock'
               AND NEW.available_at <> OLD.available_at AND NEW.available_at > now())
           -- Somebody writes a job that runs after others, or queues it again.
           OR (NEW.status = 'queued' AND NEW.waits_on IS NOT NULL
               AND (OLD.status <> 'queued' OR NEW.waits_for IS DISTINCT FROM 'after' OR NEW.available_at <> 'infinity'))
           OR (NEW.status = 'queued' AND NEW.waits_for = 'after' AND NEW.waits_on IS NULL)
           -- A superseded job ends; one that has ended does not come back to its unique key by itself.
           OR (NEW.unique_key IS NOT NULL
               AND (NEW.superseded_by IS NOT NULL AND NEW.status IN ('queued', 'failed', 'lost')
                    OR OLD.status NOT IN ('queued', 'running') AND NEW.status IN ('queued', 'running')))
           -- What has a lane waits there, whoever makes it ready, or for its time.
           OR (NEW.lane IS NOT NULL AND NEW.status = 'queued' AND NEW.waits_for IS NULL)
           OR (NEW.lane <> NEW.task AND NEW.status IN ('queued', 'running'))
           OR (NEW.waits_for = 'limit' AND NEW.status = 'queued' AND (NEW.lane IS NULL OR NEW.available_at > now()))
           OR NEW.waits_for NOT IN ('time', 'lock', 'task', 'after', 'limit'))
        EXECUTE FUNCTION {schema}.dl_jobs_shape()$sql$),
      ('dl_jobs_built_in_ins', $sql$
        BEFORE INSERT ON {schema}.dl_jobs FOR EACH ROW
        WHEN (NEW.task LIKE 'process.%' OR NEW.task LIKE 'notify.%' OR NEW.task = 'migrate')
        EXECUTE FUNCTION {schema}.dl_jobs_built_in()$sql$),
      ('dl_jobs_built_in_upd', $sql$
        BEFORE UPDATE OF task, args ON {schema}.dl_jobs FOR EACH ROW
        WHEN (NEW.task LIKE 'process.%' OR NEW.task LIKE 'notify.%' OR NEW.task = 'migrate')
        EXECUTE FUNCTION {schema}.dl_jobs_built_in()$sql$),
      ('dl_jobs_failing_ins', $sql$
        BEFORE INSERT ON {schema}.dl_jobs FOR EACH ROW
        WHEN (NEW.status IN ('failed', 'lost') OR (NEW.status = 'queued' AND NEW.error IS NOT NULL))
        EXECUTE FUNCTION {schema}.dl_jobs_failing()$sql$),
      -- It enters one of the three statuses, or its error changes there. A running job's error is not looked at: it may be long,
      -- and each heartbeat would compare it.
      ('dl_jobs_failing_upd', $sql$
        BEFORE UPDATE ON {schema}.dl_jobs FOR EACH ROW
        WHEN ((NEW.status IN ('failed', 'lost')
               AND (OLD.status NOT IN ('failed', 'lost') OR NEW.error IS DISTINCT FROM OLD.error))
           OR (NEW.status = 'queued'
               AND CASE WHEN OLD.status = 'queued' THEN NEW.error IS DISTINCT FROM OLD.error
                        ELSE NEW.error IS NOT NULL OR NEW.error_group IS NOT NULL END))
        EXECUTE FUNCTION {schema}.dl_jobs_failing()$sql$),
      ('dl_jobs_unwatch', $sql$
        BEFORE UPDATE ON {schema}.dl_jobs FOR EACH ROW
        WHEN (OLD.watched AND (NEW.status <> OLD.status OR NEW.progress IS DISTINCT FROM OLD.progress))
        EXECUTE FUNCTION {schema}.dl_jobs_unwatch()$sql$),
      ('dl_jobs_inserted', $sql$
        AFTER INSERT ON {schema}.dl_jobs REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT
        EXECUTE FUNCTION {schema}.dl_jobs_inserted()$sql$),
      -- A row trigger: one with a transition table can't have a WHEN clause or a column list and would copy every heartbeat.
      ('dl_jobs_changed', $sql$
        AFTER UPDATE ON {schema}.dl_jobs FOR EACH ROW
        WHEN ((NEW.status = 'queued' AND NEW.waits_for IS NULL AND (OLD.status <> 'queued' OR OLD.waits_for IS NOT NULL))
           OR (NEW.status = 'queued' AND NEW.waits_for = 'time'
               AND (OLD.status <> 'queued' OR OLD.waits_for IS DISTINCT FROM 'time' OR NEW.available_at < OLD.available_at))
           OR (NEW.status = 'running' AND NEW.cancel_requested AND NOT OLD.cancel_requested)
           OR (OLD.awaited AND NEW.status NOT IN ('queued', 'running') AND OLD.status IN ('queued', 'running'))
           OR (NEW.status = 'queued' AND NEW.waits_for = 'after' AND OLD.status <> 'queued')
           OR (NEW.status = 'queued' AND NEW.waits_for = 'limit' AND (OLD.status <> 'queued' OR OLD.waits_for IS DISTINCT FROM 'limit' OR NEW.queue <> OLD.queue))
           OR (OLD.lane IS NOT NULL AND OLD.status = 'running' AND NEW.status <> 'running')
           OR (OLD.watched AND (NEW.status <> OLD.status OR NEW.progress IS DISTINCT FROM OLD.progress)))
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

  -- The document's own two, whose duty ours do.
  FOR v_trigger IN
    SELECT tgname AS name FROM pg_trigger
    WHERE tgrelid = '{schema}.dl_jobs'::regclass AND tgname IN ('dl_jobs_notify_ins', 'dl_jobs_notify_upd')
  LOOP
    EXECUTE format('DROP TRIGGER %I ON {schema}.dl_jobs', v_trigger.name);
  END LOOP;
END $do$;
