"""SQL of another service, written from the queue document without knowledge of dataloader."""

CLAIM = """
WITH c AS (
  SELECT job_id FROM dl_jobs WHERE status = 'queued' AND queue = 'q' AND available_at <= now()
  ORDER BY priority, created_at FOR UPDATE SKIP LOCKED LIMIT 1
)
UPDATE dl_jobs j SET status = 'running', started_at = COALESCE(j.started_at, now()), attempt = j.attempt + 1,
  lease_expires_at = now() + make_interval(secs => j.lease_ttl_sec), heartbeat_at = now()
FROM c WHERE j.job_id = c.job_id RETURNING j.job_id, j.lock_key, j.attempt
"""
LOCK = "SELECT pg_try_advisory_lock(hashtext($1))"
UNLOCK = "SELECT pg_advisory_unlock(hashtext($1))"
BACK_OFF = """
UPDATE dl_jobs SET status = 'queued', available_at = now() + make_interval(secs => $2), lease_expires_at = NULL
WHERE job_id = $1 AND status = 'running'
"""
FINISH = """
UPDATE dl_jobs SET status = 'succeeded', finished_at = now(), lease_expires_at = NULL WHERE job_id = $1
"""
REAP = """
UPDATE dl_jobs SET status = 'queued', available_at = now(), lease_expires_at = NULL
WHERE status = 'running' AND lease_expires_at < now() RETURNING job_id
"""
