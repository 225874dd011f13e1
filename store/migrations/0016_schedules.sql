-- Schedules: jobs that are added by themselves.
--   spec        what was declared: a cron expression or a period, its zone, the task, its args and options, the policies
--   origin      `code`: processes declare it at their start, the last one wins; `operator`: it was put by hand, and they leave it
--   stored_at   when it was stored first: a period counts from then, if it has no start
--   next_at     the next planned time; NULL: there is none any more
--   last_*      the newest planned time that was run, and its job
--   paused      nothing is added, and why; after that `missed` decides about what was due meanwhile
--   retired_at  no process declares it any more
CREATE TABLE IF NOT EXISTS dl_schedules (
  name text PRIMARY KEY,
  spec jsonb NOT NULL,
  task text NOT NULL,
  origin text NOT NULL,
  stored_by text NOT NULL,
  stored_at timestamptz NOT NULL DEFAULT now(),
  changed_at timestamptz NOT NULL DEFAULT now(),
  next_at timestamptz,
  last_at timestamptz,
  last_job_id uuid,
  paused boolean NOT NULL DEFAULT false,
  paused_why text,
  retired_at timestamptz
) WITH (fillfactor = 50);
-- What falls due, for the scheduler.
CREATE INDEX IF NOT EXISTS ix_dl_schedules_due ON dl_schedules (next_at) WHERE NOT paused AND retired_at IS NULL;

-- What became of planned times that have no job, and of schedules: `left_out` (missed, or another had not ended), `paused`,
-- `resumed`, `changed`, `retired`.
CREATE TABLE IF NOT EXISTS dl_schedule_events (
  event_id bigserial PRIMARY KEY,
  name text NOT NULL,
  at timestamptz NOT NULL DEFAULT clock_timestamp(),
  kind text NOT NULL,
  payload jsonb
);
CREATE INDEX IF NOT EXISTS ix_dl_schedule_events_name ON dl_schedule_events (name, event_id);

-- The schedule that a job is of, the time for which it was planned, and for a job that a backfill has added again, that one's id.
ALTER TABLE dl_jobs
  ADD COLUMN IF NOT EXISTS schedule text,
  ADD COLUMN IF NOT EXISTS planned_at timestamptz,
  ADD COLUMN IF NOT EXISTS backfill uuid;
