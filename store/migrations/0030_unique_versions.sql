-- outside a transaction
-- The newest version of a key. The former one had all jobs of a key, and a plan made on an empty table went through them to find
-- the open one.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_key_versions ON dl_jobs (unique_key, version)
  WHERE unique_key IS NOT NULL AND version IS NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_jobs_versions;
