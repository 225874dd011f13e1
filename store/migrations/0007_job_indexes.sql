-- outside a transaction
-- Our indexes of the document's tables, which are built while other services write.

-- Jobs that can run now, in the order of the claim (Q6). It has no other jobs, so a claim costs the same at any backlog.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_ready ON dl_jobs (queue, priority, created_at, job_id)
  WHERE status = 'queued' AND waits_for IS NULL;

-- Jobs that fall due, for the stager.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_due ON dl_jobs (available_at)
  WHERE status = 'queued' AND waits_for = 'time';

-- Jobs that wait for their key, best first, by the hash that the advisory locks use.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_parked ON dl_jobs (hashtext(lock_key), priority, created_at, job_id)
  WHERE status = 'queued' AND waits_for = 'lock';

-- Jobs that an earlier program has parked because it did not know their task.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_unknown ON dl_jobs (queue, hashtext(task), created_at)
  WHERE status = 'queued' AND waits_for = 'task';

-- Running jobs by key, for the claim's check of live leases; and the ended jobs of a key. Jobs without a key are in neither.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_running_keys ON dl_jobs (hashtext(lock_key), job_id)
  WHERE status = 'running' AND keyed;
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_ended_keys ON dl_jobs (hashtext(lock_key), created_at, job_id)
  WHERE status IN ('succeeded', 'failed', 'canceled', 'lost') AND keyed;

-- Jobs that wait for another job's end, and those for which that one is still to be chosen.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_after ON dl_jobs (waits_on, created_at, job_id)
  WHERE status = 'queued' AND waits_for = 'after';

-- Jobs that have ended while others waited for them, until those have been judged.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_awaited ON dl_jobs (job_id)
  WHERE awaited AND status IN ('succeeded', 'failed', 'canceled', 'lost');

-- All jobs of one root.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_root ON dl_jobs (root_id, created_at, job_id) WHERE root_id IS NOT NULL;

-- A planned time has one job, whichever process adds it; a backfill that adds jobs again has one for each planned time, too.
CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_planned ON dl_jobs (schedule, planned_at, coalesce(backfill, '00000000-0000-0000-0000-000000000000'))
  WHERE schedule IS NOT NULL;

-- The open jobs of a schedule: whether the next one overlaps.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_schedule_open ON dl_jobs (schedule)
  WHERE schedule IS NOT NULL AND status IN ('queued', 'running');

-- One open job of a unique key, whichever program adds it. A superseded one may be written by any program, also back to the queue, without
-- an error.
CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_unique ON dl_jobs (unique_key)
  WHERE unique_key IS NOT NULL AND status IN ('queued', 'running') AND superseded_by IS NULL;

-- The newest version of a unique key. Only jobs with a version are in it: otherwise a plan that was made on an empty table would read all
-- jobs of a key to find the open one.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_key_versions ON dl_jobs (unique_key, version)
  WHERE unique_key IS NOT NULL AND version IS NOT NULL;

-- Jobs that failed, and those that wait for a retry, by their group: a count reads this index alone.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_failing ON dl_jobs (error_group, created_at, job_id) INCLUDE (status)
  WHERE error_group IS NOT NULL AND status IN ('queued', 'failed', 'lost');

-- Jobs that wait in a limit queue, in the order in which they start; and the running jobs of a limit queue.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_lane ON dl_jobs (lane, queue, priority, created_at, job_id)
  WHERE status = 'queued' AND waits_for = 'limit';
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_lane_running ON dl_jobs (lane) WHERE status = 'running' AND lane IS NOT NULL;

-- Jobs that wait in a limit queue, by partition: from one partition key to the next in one step, however many jobs a key has. Another
-- program may write a key that is too long for an index: such keys are in it by their hash.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_lane_turns ON dl_jobs (
  lane, queue, (CASE WHEN octet_length(partition_key) <= 500 THEN partition_key ELSE md5(partition_key) END), priority, created_at, job_id)
  WHERE status = 'queued' AND waits_for = 'limit';

-- Lists, newest first, in pages.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_created ON dl_jobs (created_at, job_id);

-- Lists of what went wrong, which is rare among the ended jobs. Only the finish writes into it.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_wrong ON dl_jobs (created_at, job_id)
  WHERE status IN ('failed', 'canceled', 'lost');

-- Retention, and lists of ended jobs.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_finished ON dl_jobs (status, finished_at) WHERE finished_at IS NOT NULL;

-- The events of a job, and their deletion with it.
CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_job_events_job ON dl_job_events (job_id, event_id);
