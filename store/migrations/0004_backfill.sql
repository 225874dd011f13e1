-- outside a transaction
-- Rows that were delayed before our triggers existed. In batches, each its own transaction, until none is left.
-- repeat while rows change
UPDATE dl_jobs SET waits_for = 'time' WHERE job_id IN (
  SELECT job_id FROM dl_jobs WHERE status = 'queued' AND waits_for IS NULL AND available_at > now()
  ORDER BY available_at LIMIT 5000 FOR NO KEY UPDATE SKIP LOCKED);
