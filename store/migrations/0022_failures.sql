-- Of a job that failed, or that waits for a retry: the number of its group, from its task and its error (functions/failures.sql).
-- A trigger writes it, whoever writes the job. Of other jobs it means nothing.
ALTER TABLE dl_jobs ADD COLUMN IF NOT EXISTS error_group bigint;

-- The log of errors: a row for each run that failed, whoever ran it. It outlives its job, so job_id is no foreign key.
--   status   what became of the job: queued (a retry), failed or lost
--   worker   who ran it; NULL: a foreign service
CREATE TABLE IF NOT EXISTS dl_errors (
  error_id bigserial PRIMARY KEY,
  at timestamptz NOT NULL,
  job_id uuid NOT NULL,
  task text NOT NULL,
  queue text NOT NULL,
  attempt int NOT NULL,
  worker text,
  status dl_status NOT NULL,
  error_group bigint NOT NULL,
  error text NOT NULL
);
CREATE INDEX IF NOT EXISTS ix_dl_errors_group ON dl_errors (error_group, error_id);
CREATE INDEX IF NOT EXISTS ix_dl_errors_job ON dl_errors (job_id, error_id);
