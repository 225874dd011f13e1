-- Notifications of changes of a job: dl_jobs for dispatchers, dl_due and dl_after for the stager, dl_stop for the
-- worker that runs it (with the token of that run), dl_lane for dispatchers (one of its jobs waits or has ended),
-- dl_changed for waiting callers. They run with the writer's rights. Programs of the previous release listen to
-- dl_cancel, with the job's ID: a later set removes it. dl_after has the payload `ended` for the end of a job that
-- others wait for, and none for a waiting job whose `waits_on` must be chosen.
-- A payload has at most 8,000 bytes; queues with longer names belong to no worker of ours.
CREATE OR REPLACE FUNCTION {schema}.dl_jobs_inserted() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM pg_notify(
    CASE i.waits_for WHEN 'time' THEN 'dl_due' WHEN 'after' THEN 'dl_after' WHEN 'limit' THEN 'dl_lane' ELSE 'dl_jobs' END,
    coalesce(floor(extract(epoch FROM i.due))::text, left(i.name, 1000)))
  FROM (
    SELECT n.waits_for, CASE WHEN n.waits_for IS NULL THEN n.queue WHEN n.waits_for = 'limit' THEN n.lane ELSE '' END AS name,
           min(n.available_at) FILTER (WHERE n.waits_for = 'time') AS due
    FROM inserted n
    WHERE n.status = 'queued' AND (n.waits_for IS NULL OR n.waits_for IN ('time', 'after', 'limit'))
    GROUP BY 1, 2
  ) AS i;
  RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_jobs_inserted() FROM PUBLIC;

CREATE OR REPLACE FUNCTION {schema}.dl_jobs_changed() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF NEW.status = 'queued' AND NEW.waits_for IS NULL AND (OLD.status <> 'queued' OR OLD.waits_for IS NOT NULL) THEN
    PERFORM pg_notify('dl_jobs', left(NEW.queue, 1000));
  ELSIF NEW.status = 'queued' AND NEW.waits_for = 'time'
        AND (OLD.status <> 'queued' OR OLD.waits_for IS DISTINCT FROM 'time' OR NEW.available_at < OLD.available_at) THEN
    -- Whole seconds, so that many retries in one transaction are merged into a few notifications.
    PERFORM pg_notify('dl_due', floor(extract(epoch FROM NEW.available_at))::text);
  ELSIF NEW.status = 'running' AND NEW.cancel_requested AND NOT OLD.cancel_requested THEN
    PERFORM pg_notify('dl_stop', NEW.token::text);
    PERFORM pg_notify('dl_cancel', NEW.job_id::text);
  END IF;
  IF OLD.awaited AND NEW.status NOT IN ('queued', 'running') AND OLD.status IN ('queued', 'running') THEN
    PERFORM pg_notify('dl_after', 'ended');
  ELSIF NEW.status = 'queued' AND NEW.waits_for = 'after' AND OLD.status <> 'queued' THEN
    PERFORM pg_notify('dl_after', '');
  END IF;
  IF (NEW.status = 'queued' AND NEW.waits_for = 'limit' AND (OLD.status <> 'queued' OR OLD.waits_for IS DISTINCT FROM 'limit' OR NEW.queue <> OLD.queue))
     OR (OLD.lane IS NOT NULL AND OLD.status = 'running' AND NEW.status <> 'running') THEN
    PERFORM pg_notify('dl_lane', left(coalesce(OLD.lane, NEW.lane), 1000));
  END IF;
  IF OLD.watched AND (NEW.status <> OLD.status OR NEW.progress IS DISTINCT FROM OLD.progress) THEN
    PERFORM pg_notify('dl_changed', NEW.job_id::text);
  END IF;
  RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_jobs_changed() FROM PUBLIC;
