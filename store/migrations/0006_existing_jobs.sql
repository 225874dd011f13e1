-- outside a transaction
-- Values of our columns for jobs that another service has added before our triggers existed: in batches, each of them a transaction, until
-- a batch changes no row. Rows that another session has locked are written by a later batch.

-- Jobs that are not due yet wait for their time.
-- repeat while rows change
UPDATE dl_jobs SET waits_for = 'time' WHERE job_id IN (
  SELECT job_id FROM dl_jobs WHERE status = 'queued' AND waits_for IS NULL AND available_at > now()
  ORDER BY available_at LIMIT 5000 FOR NO KEY UPDATE SKIP LOCKED);

-- Jobs that have failed, or wait for a retry, get the number of their group of errors.
-- repeat while rows change
UPDATE dl_jobs SET error_group = hashtextextended(task || E'\n' || dl_error_group(error), 0) WHERE job_id IN (
  SELECT job_id FROM dl_jobs
  WHERE error_group IS NULL AND (status IN ('failed', 'lost') OR status = 'queued' AND error IS NOT NULL)
  LIMIT 5000 FOR NO KEY UPDATE SKIP LOCKED);
