-- What versions were before the last snapshot of their target brought them up to date in place: a correction of that
-- snapshot which ends one gives it back. The key's values and the beginning of a version, and its columns, as texts.
CREATE TABLE IF NOT EXISTS dl_etl_former (
  target text NOT NULL REFERENCES dl_etl_history ON DELETE CASCADE,
  version jsonb NOT NULL,
  columns jsonb NOT NULL,
  PRIMARY KEY (target, version)
);
