-- Statistics of runs by day, in UTC: the sums of dl_run_stats, kept by its trigger, for whoever looks at weeks.
CREATE TABLE IF NOT EXISTS dl_run_stats_days (
  day timestamptz NOT NULL,
  queue text NOT NULL,
  task text NOT NULL,
  outcome text NOT NULL,
  runs bigint NOT NULL,
  total_s float8 NOT NULL,
  max_s float8 NOT NULL,
  PRIMARY KEY (day, queue, task, outcome)
);
