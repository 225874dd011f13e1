-- outside a transaction
-- What waits in a lane, in the order in which it starts.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_lane ON dl_jobs (lane, queue, priority, created_at, job_id)
  WHERE status = 'queued' AND waits_for = 'limit';

-- What of a lane is in work.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_lane_running ON dl_jobs (lane) WHERE status = 'running' AND lane IS NOT NULL;
