-- Details that are in their table while their segment is not whole: a run that goes on does not ask for them again. A row for
-- each time that some were merged, with what was done by then, by the token of that attempt. They go with the segment's end.
CREATE TABLE IF NOT EXISTS dl_etl_details (
  run_id uuid NOT NULL REFERENCES dl_etl_runs ON DELETE CASCADE,
  task text NOT NULL,
  segment text NOT NULL,
  token bigint NOT NULL,
  details text[] NOT NULL,
  counts jsonb NOT NULL,
  committed_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS ix_dl_etl_details ON dl_etl_details (run_id, task, segment);

-- What a failure counts for: of very many records one stands for those that are not named.
ALTER TABLE dl_etl_failures ADD COLUMN IF NOT EXISTS times int NOT NULL DEFAULT 1;
