-- Statistics of runs: how many ended, and how long they took.
--   dl_run_stats       one row an hour, queue, task and outcome: what the pruner has folded together
--   dl_run_stats_new   rows that finishes append, one a queue, task and outcome of a batch; no index, so that they cost little
-- `total_s` and `max_s` are of the runs' own durations, in seconds; outcome: succeeded, failed, retried, snoozed, returned,
-- canceled, expired (its lease ended, and it went back to the queue), lost.
CREATE TABLE IF NOT EXISTS dl_run_stats (
  hour timestamptz NOT NULL,
  queue text NOT NULL,
  task text NOT NULL,
  outcome text NOT NULL,
  runs bigint NOT NULL,
  total_s float8 NOT NULL,
  max_s float8 NOT NULL,
  PRIMARY KEY (hour, queue, task, outcome)
);
CREATE TABLE IF NOT EXISTS dl_run_stats_new (
  at timestamptz NOT NULL DEFAULT statement_timestamp(),
  queue text NOT NULL,
  task text NOT NULL,
  outcome text NOT NULL,
  runs bigint NOT NULL,
  total_s float8 NOT NULL,
  max_s float8 NOT NULL
);
