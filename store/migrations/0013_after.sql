-- Jobs that run after others.
--   when_failed   what becomes of the job if one that it runs after does not succeed: `cancel` or `run`; NULL: it runs after none
--   waits_on      the one of those whose end is waited for next, also while the job is not queued; all zeros: to be chosen
--   wanted_at     the available_at that was asked for; while the job waits for others its own is infinity, so that nobody's
--                 claim takes it, a foreign service's either
--   awaited       a job waits for this one's end: whoever writes the end tells the stager, and the row stays marked until the
--                 jobs that wait have been judged
--   root_id       the job whose handler enqueued this one, or that one's own root; or what the client gave
ALTER TABLE dl_jobs
  ADD COLUMN IF NOT EXISTS when_failed text,
  ADD COLUMN IF NOT EXISTS waits_on uuid,
  ADD COLUMN IF NOT EXISTS wanted_at timestamptz,
  ADD COLUMN IF NOT EXISTS awaited boolean NOT NULL DEFAULT false,
  ADD COLUMN IF NOT EXISTS root_id uuid;

-- after_id is no foreign key: other services may delete jobs. What it was when it was deleted stands in `was` then.
CREATE TABLE IF NOT EXISTS dl_job_after (
  job_id uuid NOT NULL REFERENCES dl_jobs (job_id) ON DELETE CASCADE,
  after_id uuid NOT NULL,
  was text,
  PRIMARY KEY (job_id, after_id)
);
-- Retention, and the deletion of a job that others wait for.
CREATE INDEX IF NOT EXISTS ix_dl_job_after ON dl_job_after (after_id, job_id);
