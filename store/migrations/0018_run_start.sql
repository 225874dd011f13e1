-- When the run began that goes on, or that was the last; started_at is the first one's beginning.
--   lane   where a job of a task with limits waits, and is counted while it runs: the task's name. NULL: its task has none
ALTER TABLE dl_jobs
  ADD COLUMN IF NOT EXISTS run_started_at timestamptz,
  ADD COLUMN IF NOT EXISTS lane text;
