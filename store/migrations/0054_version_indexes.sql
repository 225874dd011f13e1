-- outside a transaction
-- Claims skip jobs of unknown tasks now: those that former programs have parked are ready, or wait in their task's lane.
-- repeat while rows change
UPDATE dl_jobs SET waits_for = NULL, lane = coalesce(lane, (SELECT t.task FROM dl_tasks t WHERE t.task = dl_jobs.task AND t.limited))
WHERE job_id IN (
  SELECT job_id FROM dl_jobs WHERE status = 'queued' AND waits_for = 'task' ORDER BY queue, hashtext(task), created_at LIMIT 5000
  FOR NO KEY UPDATE SKIP LOCKED);

-- How many processes of a type a version has.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_processes_version ON dl_processes (type, version, status, key) WHERE removed_at IS NULL;
