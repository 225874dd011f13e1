-- outside a transaction
-- What can run now, in the order of the claim (Q6); nothing else is in it, so a claim costs the same at any backlog.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_ready ON dl_jobs (queue, priority, created_at, job_id)
  WHERE status = 'queued' AND waits_for IS NULL;

-- What falls due, for the stager.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_due ON dl_jobs (available_at)
  WHERE status = 'queued' AND waits_for = 'time';

-- What waits for a key, best first, by the hash that the advisory locks go by.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_parked ON dl_jobs (hashtext(lock_key), priority, created_at, job_id)
  WHERE status = 'queued' AND waits_for = 'lock';

-- What waits for a worker that knows its task.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_unknown ON dl_jobs (queue, hashtext(task), created_at)
  WHERE status = 'queued' AND waits_for = 'task';

-- Which keys run, for the claim's look at live leases.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_key_running ON dl_jobs (hashtext(lock_key), job_id)
  WHERE status = 'running';

-- Lists, newest first, in pages by key.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_created ON dl_jobs (created_at, job_id);

-- Lists of what went wrong, which is rare among what ended, and of what became of a key's jobs. Only the finish pays for it.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_wrong ON dl_jobs (created_at, job_id)
  WHERE status IN ('failed', 'canceled', 'lost');
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_key_ended ON dl_jobs (hashtext(lock_key), created_at, job_id)
  WHERE status IN ('succeeded', 'failed', 'canceled', 'lost');

-- Retention, and lists of what ended.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_finished ON dl_jobs (status, finished_at) WHERE finished_at IS NOT NULL;

-- A job's journal, and the cascade of its deletion.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_job_events_job ON dl_job_events (job_id, event_id);
