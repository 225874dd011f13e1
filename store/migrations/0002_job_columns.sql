-- Our columns of dl_jobs. Each is nullable or has a constant default: PostgreSQL adds such columns without rewriting the table, and the
-- document's own SQL continues to work.
--
-- Why a queued job waits, and its runs:
--   waits_for             why a queued job can't run now: time, lock, after, limit (task: written by earlier programs). NULL: it is ready,
--                         and is in ix_dl_jobs_ready
--   token                 the fencing token: random for each claim; every later write of the run names it
--   claimed_by            the worker of a running job; NULL: another service runs it
--   run_started_at        when the current or last run began; started_at is the beginning of the first one
--   crashes               runs that ended because their lease expired
--   refunds               attempts that were given back (snooze, drain), which are bounded
--   result                what the handler returned
--   watched               a client waits for a change of this job and wants a notification
--   keyed                 whether the job has a lock_key. Only our own enqueue writes false, for a job without one: its lock_key, which
--                         the document requires, is its id and has no meaning. Such a job takes no advisory lock and is in no index of keys
--   lane                  the limit queue in which a job of a task with limits waits, and in which it is counted while it runs: the task's
--                         name. NULL: the task has no limits
--   error_group           of a job that failed or waits for a retry: the number of its group, from its task and its error
--                         (functions/failures.sql). A trigger writes it, whichever program writes the job. Otherwise it has no meaning
-- Requests:
--   request_hash          of the request as sent: tells a repeated request from another one with the same idempotency key
--   requested_version     the version in the request that made the job or changed it last; NULL: it had none
--   root_id               the job whose handler enqueued this one, or the root of that job; or what the client gave
-- Unique tasks:
--   unique_key            one open job of a key stands for all requests (dl_unique_key); NULL: the task's jobs are not unique
--   version               of the request that made the job, for tasks whose jobs are updated: an older version changes nothing
--   superseded_by         the newer job of the key, which waits until this one has ended; this one does not run again
-- Jobs that run after others (dl_job_after):
--   when_failed           what happens to the job if one of those does not succeed: cancel or run. NULL: it runs after none
--   waits_on              the one of those whose end is awaited next, also while the job is not queued; all zeros: to be chosen
--   wanted_at             the available_at that was requested. While the job waits for others, its own is infinity, so that no claim takes
--                         it, also none of another service
--   awaited               a job waits for the end of this one: the end notifies the stager. The row stays marked until the waiting jobs
--                         have been judged
-- Schedules and stages:
--   schedule, planned_at  the job's schedule, and the time for which it was planned
--   backfill              of a job that a backfill has added again: the id of the backfill
--   previous, moves       what the stage before returned, and how often the job has moved to a next stage; NULL: never
CREATE SEQUENCE IF NOT EXISTS dl_token_seq AS bigint;

ALTER TABLE dl_jobs
  ADD COLUMN IF NOT EXISTS waits_for text,
  ADD COLUMN IF NOT EXISTS token bigint NOT NULL DEFAULT 0,
  ADD COLUMN IF NOT EXISTS claimed_by text,
  ADD COLUMN IF NOT EXISTS crashes int NOT NULL DEFAULT 0,
  ADD COLUMN IF NOT EXISTS refunds int NOT NULL DEFAULT 0,
  ADD COLUMN IF NOT EXISTS result jsonb,
  ADD COLUMN IF NOT EXISTS request_hash bytea,
  ADD COLUMN IF NOT EXISTS watched boolean NOT NULL DEFAULT false,
  ADD COLUMN IF NOT EXISTS keyed boolean NOT NULL DEFAULT true,
  ADD COLUMN IF NOT EXISTS when_failed text,
  ADD COLUMN IF NOT EXISTS waits_on uuid,
  ADD COLUMN IF NOT EXISTS wanted_at timestamptz,
  ADD COLUMN IF NOT EXISTS awaited boolean NOT NULL DEFAULT false,
  ADD COLUMN IF NOT EXISTS root_id uuid,
  ADD COLUMN IF NOT EXISTS schedule text,
  ADD COLUMN IF NOT EXISTS planned_at timestamptz,
  ADD COLUMN IF NOT EXISTS backfill uuid,
  ADD COLUMN IF NOT EXISTS run_started_at timestamptz,
  ADD COLUMN IF NOT EXISTS lane text,
  ADD COLUMN IF NOT EXISTS unique_key text,
  ADD COLUMN IF NOT EXISTS version float8,
  ADD COLUMN IF NOT EXISTS superseded_by uuid,
  ADD COLUMN IF NOT EXISTS error_group bigint,
  ADD COLUMN IF NOT EXISTS previous jsonb,
  ADD COLUMN IF NOT EXISTS moves int,
  ADD COLUMN IF NOT EXISTS requested_version float8;
