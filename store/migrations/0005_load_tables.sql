-- The tables of loads. Those of their runs come last, since they refer to dl_jobs: this locks dl_jobs against writes until the file's
-- transaction commits.

-- How far a load has come: all before `upto` is in its table.
CREATE TABLE IF NOT EXISTS dl_etl_cursors (
  load text PRIMARY KEY,
  upto timestamptz NOT NULL,
  run_id uuid NOT NULL,
  moved_at timestamptz NOT NULL DEFAULT now()
);

-- Which run may write a load's table: one at a time, however its runs are started. A holder counts while its job runs with its token.
CREATE TABLE IF NOT EXISTS dl_load_holders (
  load text PRIMARY KEY,
  run_id uuid NOT NULL,
  token bigint NOT NULL,
  since timestamptz NOT NULL DEFAULT now()
);

-- What each table with versions has taken in: the time of its last snapshot, and the columns by which it was compared.
CREATE TABLE IF NOT EXISTS dl_etl_history (target text PRIMARY KEY, last_as_of timestamptz, columns text[]);

-- The complete snapshots. One that is older than the last one can't be taken in any more, and need not be if it is here.
CREATE TABLE IF NOT EXISTS dl_etl_snapshots (
  target text NOT NULL REFERENCES dl_etl_history ON DELETE CASCADE,
  load text NOT NULL,
  segment text NOT NULL,
  as_of timestamptz NOT NULL,
  PRIMARY KEY (target, load, segment)
);

-- Versions as they were before the last snapshot of their target updated them in place: a correction of that snapshot which ends one
-- restores it. The key's values and the beginning of a version, and its columns, as texts.
CREATE TABLE IF NOT EXISTS dl_etl_former (
  target text NOT NULL REFERENCES dl_etl_history ON DELETE CASCADE,
  version jsonb NOT NULL,
  columns jsonb NOT NULL,
  PRIMARY KEY (target, version)
);

-- Which keys the snapshots of a table with versions had, by the snapshots' times; NULL: the snapshot was complete. A snapshot that comes
-- late counts for a key until the next time at which the key was observed, even if nothing had changed. A key is the first 64 bits of the
-- MD5 hash of its values.
CREATE TABLE IF NOT EXISTS dl_etl_observed (
  target text NOT NULL REFERENCES dl_etl_history ON DELETE CASCADE,
  as_of timestamptz NOT NULL,
  keys bigint[],
  PRIMARY KEY (target, as_of)
);

-- Runs of loads, of flows and of sets of dimensions. A run belongs to a job: it continues when the job runs again, and is deleted with it.
CREATE TABLE IF NOT EXISTS dl_etl_runs (
  run_id uuid PRIMARY KEY REFERENCES dl_jobs (job_id) ON DELETE CASCADE,
  name text NOT NULL,
  kind text NOT NULL,
  status text NOT NULL DEFAULT 'running',
  started_at timestamptz NOT NULL DEFAULT now(),
  finished_at timestamptz,
  summary jsonb
);
-- Lists of runs, newest first, in pages: of one name, and of all.
CREATE INDEX IF NOT EXISTS ix_dl_etl_runs_name ON dl_etl_runs (name, started_at, run_id);
CREATE INDEX IF NOT EXISTS ix_dl_etl_runs_started ON dl_etl_runs (started_at, run_id);

-- The tasks of a run in the order of their registration; the run of a load has one.
CREATE TABLE IF NOT EXISTS dl_etl_tasks (
  run_id uuid NOT NULL REFERENCES dl_etl_runs ON DELETE CASCADE,
  ordinal int NOT NULL,
  layer text NOT NULL DEFAULT '',
  task text NOT NULL,
  status text NOT NULL DEFAULT 'waiting',
  started_at timestamptz,
  finished_at timestamptz,
  summary jsonb,
  PRIMARY KEY (run_id, ordinal)
);
-- The last run of a load, and the names of all.
CREATE INDEX IF NOT EXISTS ix_dl_etl_tasks_task ON dl_etl_tasks (task, started_at);

-- The committed segments, each in the transaction that wrote its rows.
CREATE TABLE IF NOT EXISTS dl_etl_segments (
  run_id uuid NOT NULL REFERENCES dl_etl_runs ON DELETE CASCADE,
  task text NOT NULL,
  segment text NOT NULL,
  counts jsonb NOT NULL,
  committed_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (run_id, task, segment)
);

-- Details that are in their table while their segment is not complete: a run that continues does not request them again. Each merge adds a
-- row, with the counts so far and the token of the attempt. The rows are deleted when the segment is committed.
CREATE TABLE IF NOT EXISTS dl_etl_details (
  row_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  run_id uuid NOT NULL REFERENCES dl_etl_runs ON DELETE CASCADE,
  task text NOT NULL,
  segment text NOT NULL,
  token bigint NOT NULL,
  details text[] NOT NULL,
  counts jsonb NOT NULL,
  committed_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS ix_dl_etl_details ON dl_etl_details (run_id, task, segment);

-- Requests, records, batches and segments that failed, with what is needed to retry them alone.
--   times  how many failures the row stands for: of very many records, one row stands for those that are not listed
CREATE TABLE IF NOT EXISTS dl_etl_failures (
  failure_id bigserial PRIMARY KEY,
  run_id uuid NOT NULL REFERENCES dl_etl_runs ON DELETE CASCADE,
  load text NOT NULL,
  segment text NOT NULL,
  phase text NOT NULL,
  key text NOT NULL,
  error text NOT NULL,
  sample text,
  requests jsonb NOT NULL DEFAULT '[]',
  times int NOT NULL DEFAULT 1,
  failed_at timestamptz NOT NULL DEFAULT now(),
  solved_at timestamptz
);
CREATE INDEX IF NOT EXISTS ix_dl_etl_failures_run ON dl_etl_failures (run_id, failure_id);
CREATE INDEX IF NOT EXISTS ix_dl_etl_failures_load ON dl_etl_failures (load, failure_id) WHERE solved_at IS NULL;

-- The log lines of a run's tasks among the events of its job: from first_event to last_event, for each task and attempt (token), with their
-- number. Tasks run one after the other, so few other events are in between: the lines of a task are read without those of the others. Jobs
-- that load nothing write nothing here.
CREATE TABLE IF NOT EXISTS dl_etl_logs (
  run_id uuid NOT NULL REFERENCES dl_etl_runs ON DELETE CASCADE,
  task text NOT NULL,
  token bigint NOT NULL,
  first_event bigint NOT NULL,
  last_event bigint NOT NULL,
  lines bigint NOT NULL,
  warnings bigint NOT NULL,
  errors bigint NOT NULL,
  PRIMARY KEY (run_id, task, token)
);
