-- outside a transaction
-- Who waits for a job's end, and those for whom it is still to be chosen.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_after ON dl_jobs (waits_on, created_at, job_id)
  WHERE status = 'queued' AND waits_for = 'after';

-- Jobs that have ended while others waited for them, until those have been judged.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_awaited ON dl_jobs (job_id)
  WHERE awaited AND status IN ('succeeded', 'failed', 'canceled', 'lost');

-- All jobs of one root.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_root ON dl_jobs (root_id, created_at, job_id) WHERE root_id IS NOT NULL;
