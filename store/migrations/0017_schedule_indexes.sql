-- outside a transaction
-- A planned time has one job, whoever adds it; a backfill that is to add jobs again has one for each as well.
CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_planned ON dl_jobs (schedule, planned_at, coalesce(backfill, '00000000-0000-0000-0000-000000000000'))
  WHERE schedule IS NOT NULL;

-- Those of a schedule that have not ended: whether the next one overlaps.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_schedule_open ON dl_jobs (schedule)
  WHERE schedule IS NOT NULL AND status IN ('queued', 'running');
