-- outside a transaction
-- One open job of a key, whoever adds it. A superseded one may be written by anybody, also back to the queue, without an error.
CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_unique ON dl_jobs (unique_key)
  WHERE unique_key IS NOT NULL AND status IN ('queued', 'running') AND superseded_by IS NULL;

-- All jobs of a key, and the newest version of it, also where they have ended.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_versions ON dl_jobs (unique_key, version)
  WHERE unique_key IS NOT NULL;
