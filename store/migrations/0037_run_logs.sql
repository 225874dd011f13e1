-- Where the log lines of a run's tasks stand among the events of its job: from `first_event` to `last_event`, for each task and
-- attempt (`token`), with how many there are. Tasks run one after the other, so hardly anything else stands between; a task's lines
-- are read without those of the others, and jobs that load nothing write nothing here.
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
