-- What we add to the contract's tables, all with defaults, so that the document's own SQL goes on as before.
--   waits_for     why a queued row can't run now (time, lock, task); NULL: it is ready, and stands in ix_dl_jobs_ready
--   token         the fence: fresh from dl_token_seq at each claim, named by every later write
--   claimed_by    the worker of a running row; NULL for a foreign service's
--   crashes       runs that ended by an expired lease
--   refunds       attempts taken back (snooze, drain), so that they can be bounded
--   result        what the handler returned
--   request_hash  of the request as sent, to tell a repeated request from another one with the same idempotency key
--   watched       somebody waits for a change of this row and wants a notification
CREATE SEQUENCE IF NOT EXISTS dl_token_seq AS bigint;

ALTER TABLE dl_jobs
  ADD COLUMN IF NOT EXISTS waits_for text,
  ADD COLUMN IF NOT EXISTS token bigint NOT NULL DEFAULT 0,
  ADD COLUMN IF NOT EXISTS claimed_by text,
  ADD COLUMN IF NOT EXISTS crashes int NOT NULL DEFAULT 0,
  ADD COLUMN IF NOT EXISTS refunds int NOT NULL DEFAULT 0,
  ADD COLUMN IF NOT EXISTS result jsonb,
  ADD COLUMN IF NOT EXISTS request_hash bytea,
  ADD COLUMN IF NOT EXISTS watched boolean NOT NULL DEFAULT false;

CREATE TABLE IF NOT EXISTS dl_queues (
  queue text PRIMARY KEY,
  paused boolean NOT NULL DEFAULT false,
  changed_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE IF NOT EXISTS dl_workers (
  worker text PRIMARY KEY,
  host text NOT NULL,
  pid int NOT NULL,
  version text NOT NULL,
  queues jsonb NOT NULL,
  started_at timestamptz NOT NULL DEFAULT now(),
  seen_at timestamptz NOT NULL DEFAULT now()
);

-- One row for each operator's action; job_id is no foreign key, since the row outlives the job.
CREATE TABLE IF NOT EXISTS dl_audit (
  audit_id bigserial PRIMARY KEY,
  ts timestamptz NOT NULL DEFAULT now(),
  actor text NOT NULL,
  action text NOT NULL,
  job_id uuid,
  detail jsonb NOT NULL DEFAULT '{}'::jsonb
);
