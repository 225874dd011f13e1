"""The plain claim: one prepared statement for ready jobs that need no lock except those of their rows.

The general claim, `dl_claim_known`, serves every job, with keys, limits, stages and cancel requests, and runs up to ten
statements for that. functions/claim.sql describes their common rules: which jobs are read, in which order, which values
are written, and when more jobs may wait. They differ in two ways:

* The plain claim takes all of its candidates or none. If one of them is not plain, the general claim follows: skipping
  that job would change the order.
* It finds its rows again by ctid. A row that another session has changed between snapshot and lock has another ctid. It
  stays unchanged, and counts as a row that another session has locked.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from dataloader.store.queue.claim import Claim, ClaimRequest, claimed_job_of
from dataloader.store.queue.lease_clock import lease_time

GENERAL_CLAIMS: Final = 50
"""Number of a queue's claims that skip the plain one, after one that found a job that is not plain.

So candidates of a queue of such jobs are rarely locked twice.
"""

# `start` is evaluated before the rows are read and `found` after all are, so the difference of the counters is the
# number of rows that were read.
_CLAIM: Final = """
WITH start AS MATERIALIZED (
  SELECT pg_stat_get_xact_tuples_fetched(to_regclass('ix_dl_jobs_ready')) AS rows
  WHERE NOT EXISTS (SELECT FROM dl_queues q WHERE q.queue = $1 AND q.paused)
), behind AS MATERIALIZED (
  SELECT j.priority, j.created_at FROM dl_jobs j WHERE j.job_id = $5 ORDER BY j.job_id
), picked AS MATERIALIZED (
  SELECT j.ctid AS place, pg_column_size(j.args) AS size,
         NOT (j.keyed OR j.cancel_requested OR j.task = ANY ($6)) AND isfinite(j.available_at)
         AND pg_column_size(j.args) <= 65536
         AND num_nonnulls(j.schedule, j.lane, j.previous, j.requested_version) = 0 AS is_plain
  FROM dl_jobs j
  WHERE j.queue = $1 AND j.status = 'queued' AND j.waits_for IS NULL AND (j.task = ANY ($4) OR j.cancel_requested)
    AND (j.priority, j.created_at, j.job_id)
      > (coalesce((SELECT priority FROM behind), -1), coalesce((SELECT created_at FROM behind), '-infinity'),
         coalesce($5, '00000000-0000-0000-0000-000000000000'))
    AND EXISTS (SELECT FROM start)
  ORDER BY j.priority, j.created_at, j.job_id
  LIMIT $2
  FOR NO KEY UPDATE SKIP LOCKED
), found AS MATERIALIZED (
  SELECT p.are_plain, NOT EXISTS (SELECT FROM behind) AS is_front,
         pg_stat_get_xact_tuples_fetched(to_regclass('ix_dl_jobs_ready')) - s.rows > 10000 AS is_blocked
  FROM start s CROSS JOIN (SELECT bool_and(is_plain) AND sum(size) <= 1048576 AS are_plain FROM picked) AS p
), mine AS (
  UPDATE dl_jobs j
  SET status = 'running', attempt = least(j.attempt, 2147483646) + 1,
      token = greatest(uuid_hash_extended(gen_random_uuid(), 0) & 9007199254740991, 1), claimed_by = $3,
      lease_expires_at = now() + make_interval(secs => j.lease_ttl_sec), heartbeat_at = now(),
      started_at = coalesce(j.started_at, now()), run_started_at = now()
  FROM picked p
  WHERE j.ctid = p.place AND (SELECT are_plain FROM found)
  RETURNING j.job_id, j.token, j.queue, j.task, j.args, j.partition_key, j.attempt, j.max_attempts, j.lease_ttl_sec,
            j.available_at
), journal AS (
  INSERT INTO dl_job_events (job_id, queue, kind, payload)
  SELECT m.job_id, m.queue, 'picked', jsonb_build_object('attempt', m.attempt, 'worker', $3::text) FROM mine m
)
SELECT f.are_plain, f.is_front AND f.is_blocked AS blocked,
       CASE WHEN f.is_front AND NOT f.is_blocked AND (SELECT count(*) FROM mine) < $2
            THEN EXISTS (SELECT FROM dl_jobs j
                         WHERE j.queue = $1 AND j.status = 'queued' AND j.waits_for IS NULL
                           AND (j.task = ANY ($4) OR j.cancel_requested)
                         ORDER BY j.priority, j.created_at, j.job_id OFFSET (SELECT count(*) FROM mine))
            ELSE false END AS passed_over,
       NULL::int AS lock_hash, m.job_id, m.token, m.task, m.args::text AS args, NULL::text AS lock_key,
       m.partition_key, m.attempt, m.max_attempts, m.lease_ttl_sec AS lease_s,
       extract(epoch FROM clock_timestamp() - m.available_at)::float8 AS waited_s, NULL::jsonb AS more
FROM found f LEFT JOIN mine m ON true
"""


@attrs.define
class PlainClaims:
    """Decides which claims of a queue begin with the plain one, from what former ones found."""

    _general: dict[str, int] = attrs.field(factory=dict, init=False)

    def may_serve(self, request: ClaimRequest) -> bool:
        """Return whether to try the plain claim first."""
        if request.lanes or request.tasks is None or request.look > request.slots:
            return False
        left = self._general.get(request.queue, 0)
        self._general[request.queue] = max(left - 1, 0)
        return left == 0

    def put_off(self, queue: str) -> None:
        """Make the next claims of `queue` general ones: it has jobs that are not plain."""
        self._general[queue] = GENERAL_CLAIMS


async def aio_claim_plain(connection: Any, worker: str, request: ClaimRequest) -> Claim | None:
    """Claim up to `slots` jobs (asyncio-flavored), or return None if one of these is not plain."""
    sent_at = lease_time()
    records = await connection.fetch(
        _CLAIM, request.queue, request.slots, worker, request.tasks, request.after, request.limited
    )
    if not records:  # the queue is paused
        return Claim([], [], more=False, passed_over=False, last=None, to_test=[], sent_at=sent_at)
    first = records[0]
    if first["are_plain"] is False:
        return None
    jobs = [claimed_job_of(request.queue, record) for record in records if record["job_id"] is not None]
    return Claim(
        jobs,
        [record["waited_s"] for record in records[: len(jobs)]],
        more=len(jobs) >= request.slots,
        passed_over=first["passed_over"],
        last=jobs[-1].job_id if jobs else None,
        to_test=[],
        sent_at=sent_at,
        blocked=first["blocked"],
    )
