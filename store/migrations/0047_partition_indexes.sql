-- outside a transaction
-- What waits in a lane, by partition: from one key to the next in one step, however many jobs a key has.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_lane_partition ON dl_jobs (lane, queue, partition_key, priority, created_at, job_id)
  WHERE status = 'queued' AND waits_for = 'limit';
