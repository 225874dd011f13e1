-- outside a transaction
-- The indexes of keys without the jobs that have none. (A job without a key is never parked for one: ix_dl_jobs_parked has
-- no such jobs as it is.) The former ones go when these are there. An older program beside us asks through our functions for
-- keys that run; only its lists of one key's ended jobs are slower until it is replaced.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_running_keys ON dl_jobs (hashtext(lock_key), job_id)
  WHERE status = 'running' AND keyed;
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_ended_keys ON dl_jobs (hashtext(lock_key), created_at, job_id)
  WHERE status IN ('succeeded', 'failed', 'canceled', 'lost') AND keyed;
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_key_running;
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_key_ended;
