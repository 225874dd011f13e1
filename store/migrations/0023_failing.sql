-- outside a transaction
-- Jobs that failed, and those that wait for a retry, by their group: to count them reads this index alone.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_failing ON dl_jobs (error_group, created_at, job_id) INCLUDE (status)
  WHERE error_group IS NOT NULL AND status IN ('queued', 'failed', 'lost');

-- Those that are there. In batches, each its own transaction, until none is left.
-- repeat while rows change
UPDATE dl_jobs SET error_group = hashtextextended(task || E'\n' || dl_error_group(error), 0) WHERE job_id IN (
  SELECT job_id FROM dl_jobs
  WHERE error_group IS NULL AND (status IN ('failed', 'lost') OR status = 'queued' AND error IS NOT NULL)
  LIMIT 5000 FOR NO KEY UPDATE SKIP LOCKED);
