-- What pipelines keep: whose turn it is at a source, what runs have done and what failed, and how far loads have come.

-- A row for each source. holder is the token of the run whose request is under way, until held_until at the latest; before
-- free_at nobody may ask, for the reason waits_for. kept_s is the longest span of a budget that it was ever asked with.
CREATE TABLE IF NOT EXISTS dl_sources (
  source text PRIMARY KEY,
  holder bigint,
  held_until timestamptz,
  free_at timestamptz NOT NULL DEFAULT '-infinity',
  waits_for text NOT NULL DEFAULT 'pause',
  kept_s float8 NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- When sources that have a budget were asked, for as long as its span; also by loads that have another one, or none.
CREATE TABLE IF NOT EXISTS dl_source_calls (source text NOT NULL, at timestamptz NOT NULL);
CREATE INDEX IF NOT EXISTS ix_dl_source_calls ON dl_source_calls (source, at);

-- A source for `p_lease_s` seconds, or how long to wait, and what for. The row's lock makes one of all who ask at once the
-- first. Budgets: at most p_requests[i] in any p_spans_s[i] seconds.
CREATE OR REPLACE FUNCTION dl_source_take(
  p_source text, p_holder bigint, p_lease_s float8, p_requests int[], p_spans_s float8[],
  OUT wait_s float8, OUT waits_for text
) LANGUAGE plpgsql AS $$
DECLARE
  v_source dl_sources;
  v_now timestamptz;
  v_call timestamptz;
  v_until timestamptz;
BEGIN
  SELECT * INTO v_source FROM dl_sources WHERE source = p_source FOR UPDATE;
  IF NOT FOUND THEN
    INSERT INTO dl_sources (source) VALUES (p_source) ON CONFLICT DO NOTHING;
    SELECT * INTO v_source FROM dl_sources WHERE source = p_source FOR UPDATE;
  END IF;
  v_now := clock_timestamp();
  v_until := v_now;
  IF v_source.holder <> p_holder AND v_source.held_until > v_until THEN
    v_until := v_source.held_until;
    waits_for := 'request';
  END IF;
  IF v_source.free_at > v_until THEN
    v_until := v_source.free_at;
    waits_for := v_source.waits_for;
  END IF;
  FOR i IN 1 .. cardinality(p_requests) LOOP
    SELECT at INTO v_call FROM dl_source_calls WHERE source = p_source ORDER BY at DESC OFFSET p_requests[i] - 1 LIMIT 1;
    v_call := v_call + make_interval(secs => p_spans_s[i]);
    IF v_call > v_until THEN
      v_until := v_call;
      waits_for := 'budget';
    END IF;
  END LOOP;
  wait_s := extract(epoch FROM v_until - v_now);
  IF waits_for IS NULL THEN
    v_source.kept_s := greatest(v_source.kept_s, (SELECT max(span) FROM unnest(p_spans_s) AS span));
    UPDATE dl_sources
    SET holder = p_holder, held_until = v_now + make_interval(secs => p_lease_s), kept_s = v_source.kept_s
    WHERE source = p_source;
    IF v_source.kept_s > 0 THEN
      INSERT INTO dl_source_calls (source, at) VALUES (p_source, v_now);
      DELETE FROM dl_source_calls WHERE source = p_source AND at < v_now - make_interval(secs => v_source.kept_s);
    END IF;
  END IF;
END $$;

-- A run of a load, a flow or a set of dimensions is a job's: it goes on where it was when the job runs again, and goes when the
-- job is deleted.
CREATE TABLE IF NOT EXISTS dl_etl_runs (
  run_id uuid PRIMARY KEY REFERENCES dl_jobs (job_id) ON DELETE CASCADE,
  name text NOT NULL,
  kind text NOT NULL,
  status text NOT NULL DEFAULT 'running',
  started_at timestamptz NOT NULL DEFAULT now(),
  finished_at timestamptz,
  summary jsonb
);
-- Lists of runs, newest first, in pages by key: of one name, and of all.
CREATE INDEX IF NOT EXISTS ix_dl_etl_runs_name ON dl_etl_runs (name, started_at, run_id);
CREATE INDEX IF NOT EXISTS ix_dl_etl_runs_started ON dl_etl_runs (started_at, run_id);

-- The tasks of a run in the order of their registration; a load alone is a run of one.
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

-- What is written for good: each segment in the transaction that wrote its rows.
CREATE TABLE IF NOT EXISTS dl_etl_segments (
  run_id uuid NOT NULL REFERENCES dl_etl_runs ON DELETE CASCADE,
  task text NOT NULL,
  segment text NOT NULL,
  counts jsonb NOT NULL,
  committed_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (run_id, task, segment)
);

-- How far a load has come: all before `upto` is in its table.
CREATE TABLE IF NOT EXISTS dl_etl_cursors (
  load text PRIMARY KEY,
  upto timestamptz NOT NULL,
  run_id uuid NOT NULL,
  moved_at timestamptz NOT NULL DEFAULT now()
);

-- What failed: a request, a record, a batch or a segment; what is needed to try it alone.
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
  failed_at timestamptz NOT NULL DEFAULT now(),
  solved_at timestamptz
);
CREATE INDEX IF NOT EXISTS ix_dl_etl_failures_run ON dl_etl_failures (run_id, failure_id);
CREATE INDEX IF NOT EXISTS ix_dl_etl_failures_load ON dl_etl_failures (load, failure_id) WHERE solved_at IS NULL;

-- What a table with versions has taken in: the last snapshot's instant, and the columns it was compared by.
CREATE TABLE IF NOT EXISTS dl_etl_history (target text PRIMARY KEY, last_as_of timestamptz, columns text[]);

-- Which of them, whole: those behind the last one can't be taken in any more, and need not be if they stand here.
CREATE TABLE IF NOT EXISTS dl_etl_snapshots (
  target text NOT NULL REFERENCES dl_etl_history ON DELETE CASCADE,
  load text NOT NULL,
  segment text NOT NULL,
  as_of timestamptz NOT NULL,
  PRIMARY KEY (target, load, segment)
);
