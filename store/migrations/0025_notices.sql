-- What operators are to be told of: failures of jobs and of schedules, while a process has targets to tell them to.
--   dl_notice_watch    one row: until when somebody tells; triggers write notices until then
--   dl_notices         what happened and nobody has gathered yet: failed, lost (name: the task), schedule_paused, left_out (name: the schedule)
--   dl_notice_groups   what was gathered, by task or schedule and error: how many wait to be told, since when, and when they were told of last
CREATE TABLE IF NOT EXISTS dl_notice_watch (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  until timestamptz NOT NULL
);
CREATE TABLE IF NOT EXISTS dl_notices (
  notice_id bigserial PRIMARY KEY,
  at timestamptz NOT NULL DEFAULT statement_timestamp(),
  kind text NOT NULL,
  name text NOT NULL,
  queue text,
  job_id uuid,
  error text,
  times int NOT NULL DEFAULT 1
);
CREATE TABLE IF NOT EXISTS dl_notice_groups (
  kind text NOT NULL,
  name text NOT NULL,
  error_group text NOT NULL,
  waiting bigint NOT NULL,
  first_at timestamptz NOT NULL,
  last_at timestamptz NOT NULL,
  queue text,
  job_ids uuid[] NOT NULL,
  error text NOT NULL,
  told_at timestamptz,
  PRIMARY KEY (kind, name, error_group)
);
CREATE INDEX IF NOT EXISTS ix_dl_notice_groups_waiting ON dl_notice_groups (first_at) WHERE waiting > 0;
