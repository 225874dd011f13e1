-- outside a transaction
-- Parts that only programs from before the first release have used.

-- Jobs that such a program has parked because no worker knew their task.
-- repeat while rows change
UPDATE dl_jobs j SET waits_for = NULL, lane = coalesce(j.lane, (SELECT t.task FROM dl_tasks t WHERE t.task = j.task AND t.limited))
WHERE j.job_id IN (
  SELECT p.job_id FROM dl_jobs p WHERE p.status = 'queued' AND p.waits_for = 'task'
  ORDER BY p.queue, hashtext(p.task), p.created_at LIMIT 5000 FOR NO KEY UPDATE SKIP LOCKED);
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_unknown;

-- Numbers for fencing tokens, which are random now.
DROP SEQUENCE IF EXISTS dl_token_seq;
