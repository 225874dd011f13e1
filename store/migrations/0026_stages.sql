-- Jobs that go through stages.
--   previous      what the stage before has returned, for the stage whose task the row has now
--   moves         how often the job has moved; NULL: never
--   first_stage   of a task that is a whole of stages: the task that its jobs get when they are added
ALTER TABLE dl_jobs
  ADD COLUMN IF NOT EXISTS previous jsonb,
  ADD COLUMN IF NOT EXISTS moves int;
ALTER TABLE dl_tasks ADD COLUMN IF NOT EXISTS first_stage text;
