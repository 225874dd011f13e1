-- What an operator does to many jobs (U16): the act, and its jobs, which were frozen by one statement when it was confirmed.
--   dl_bulk        `jobs` were frozen; of these `done` were looked at, and `changed`. ended_at: nothing is left to do, or it was
--                  stopped (stopped_by), or it can't be done (error, after some faults). worked_at: who waited longest is next
--   dl_bulk_jobs   those that were not looked at yet. turn: 0; farther from it, the more often somebody had the row locked
CREATE TABLE IF NOT EXISTS dl_bulk (
  bulk_id uuid PRIMARY KEY,
  action text NOT NULL,
  priority int,
  filter jsonb NOT NULL,
  actor text NOT NULL,
  created_at timestamptz NOT NULL DEFAULT statement_timestamp(),
  worked_at timestamptz NOT NULL DEFAULT statement_timestamp(),
  jobs bigint NOT NULL DEFAULT 0,
  done bigint NOT NULL DEFAULT 0,
  changed bigint NOT NULL DEFAULT 0,
  faults int NOT NULL DEFAULT 0,
  error text,
  stopped_by text,
  ended_at timestamptz
);
CREATE INDEX IF NOT EXISTS ix_dl_bulk_open ON dl_bulk (worked_at) WHERE ended_at IS NULL;
CREATE INDEX IF NOT EXISTS ix_dl_bulk_created ON dl_bulk (created_at, bulk_id);

CREATE TABLE IF NOT EXISTS dl_bulk_jobs (
  bulk_id uuid NOT NULL,
  turn int NOT NULL DEFAULT 0,
  job_id uuid NOT NULL,
  PRIMARY KEY (bulk_id, turn, job_id)
);
