-- Which keys the snapshots of a table of versions had, by their instants; NULL: the snapshot was complete. A snapshot
-- that comes late holds for a key until the next instant at which the key was observed, even if nothing had changed.
-- A key is the first 64 bits of the MD5 hash of its values.
CREATE TABLE IF NOT EXISTS dl_etl_observed (
  target text NOT NULL REFERENCES dl_etl_history ON DELETE CASCADE,
  as_of timestamptz NOT NULL,
  keys bigint[],
  PRIMARY KEY (target, as_of)
);
