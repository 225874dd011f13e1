-- Tasks whose jobs are unique, and updates of jobs that wait or run.
--   unique_key     the key of a job of such a task: one open job of it stands for all requests (dl_unique_key); NULL: it has none
--   version        of the request that the job was made by, for tasks whose jobs are updated: an older one changes nothing
--   superseded_by  the newer job of its key, which waits until this one has ended; this one does not run again
ALTER TABLE dl_jobs
  ADD COLUMN IF NOT EXISTS unique_key text,
  ADD COLUMN IF NOT EXISTS version float8,
  ADD COLUMN IF NOT EXISTS superseded_by uuid;

--   uniqueness   an object, or NULL: the task's jobs are not unique
--     key          true (all args), a template or names of fields
--     duplicates   "waiting", "open" or "update"
--     keep_time, when_running ("cancel"), after_error ("delay"): of updates, where they are set
--   description  the first line of what the task says of itself
--   args_schema  JSON Schema of its arguments
ALTER TABLE dl_tasks
  ADD COLUMN IF NOT EXISTS uniqueness jsonb,
  ADD COLUMN IF NOT EXISTS description text,
  ADD COLUMN IF NOT EXISTS args_schema jsonb;
