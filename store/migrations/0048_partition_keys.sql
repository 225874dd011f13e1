-- outside a transaction
-- The same, for keys of any length: who writes rows himself may write one for which an index has no room, and no claim could file it.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_lane_turns ON dl_jobs (
  lane, queue, (CASE WHEN octet_length(partition_key) <= 500 THEN partition_key ELSE md5(partition_key) END), priority, created_at, job_id)
  WHERE status = 'queued' AND waits_for = 'limit';
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_lane_partition;
