"""Leases: one statement renews all of a process's jobs (Q8), another one reclaims expired jobs (Q10).

Both skip rows that another session has locked: a row locked in a psql session must not cost other jobs their lease. The
heartbeat reports such a row as `UNKNOWN`, not as lost, and it is asked for again soon. A heartbeat never renews an
expired lease, because another job with the same key may have started since it expired. There are two exceptions for
leases that expired because the database's clock jumped (F32): a job with a key on the session that holds the key
(`aio_revive`), where no other job can have started, and a job without a key on any session, by its token alone.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import attrs
import trio

from dataloader.jobs.logger import get_logger
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.driver_errors import said
from dataloader.store.connection.error_meanings import NO_RIGHT
from dataloader.store.queue.finish import RETRY_PRIORITY
from dataloader.store.queue.make_ready import aio_unpark

log = get_logger(__name__)

# No ORDER BY: sessions that skip locked rows cannot deadlock, and without sorts (PLANNER) the whole primary key was
# scanned.
_BEAT: Final = """
WITH mine AS MATERIALIZED (
  SELECT * FROM unnest($1::uuid[], $2::bigint[], $3::bool[]) AS m (job_id, token, journal)
), locked AS MATERIALIZED (
  SELECT j.job_id, m.token, m.journal FROM mine m JOIN dl_jobs j ON j.job_id = ANY (ARRAY[m.job_id])
  WHERE j.token = m.token AND (j.status = 'running') IS TRUE AND (j.lease_expires_at > now()) IS TRUE
  FOR NO KEY UPDATE OF j SKIP LOCKED
), renewed AS (
  UPDATE dl_jobs j SET heartbeat_at = now(), lease_expires_at = now() + make_interval(secs => j.lease_ttl_sec)
  FROM locked l WHERE j.job_id = ANY (ARRAY[l.job_id])
  RETURNING j.job_id, l.token, j.queue, j.cancel_requested, l.journal
), written AS (
  INSERT INTO dl_job_events (job_id, queue, kind) SELECT job_id, queue, 'heartbeat' FROM renewed WHERE journal
)
SELECT m.token, r.job_id IS NOT NULL AS renewed,
       coalesce(r.cancel_requested, j.cancel_requested AND j.token = m.token, false) AS cancel_requested,
       coalesce(j.token = m.token AND j.status = 'running' AND j.lease_expires_at IS NOT NULL, false) AS ours,
       coalesce(j.lease_expires_at > now(), false) AS live
FROM mine m LEFT JOIN renewed r ON r.job_id = m.job_id AND r.token = m.token
LEFT JOIN dl_jobs j ON j.job_id = ANY (ARRAY[m.job_id])
"""

_REVIVE: Final = """
WITH locked AS MATERIALIZED (
  SELECT j.job_id FROM unnest($1::uuid[], $2::bigint[]) AS m (job_id, token)
  JOIN dl_jobs j ON j.job_id = ANY (ARRAY[m.job_id])
  WHERE j.token = m.token AND (j.status = 'running') IS TRUE
  FOR NO KEY UPDATE OF j SKIP LOCKED
)
UPDATE dl_jobs j SET heartbeat_at = now(), lease_expires_at = now() + make_interval(secs => j.lease_ttl_sec)
FROM locked l WHERE j.job_id = ANY (ARRAY[l.job_id])
RETURNING j.token
"""

_RUN_START: Final = "greatest(j.run_started_at, j.started_at)"
"""Start of the run whose lease has expired. Claims of other services do not write `run_started_at`."""

MAX_ENDLESS: Final = 100
"""Maximum number of jobs with an endless lease that a sweep reports, of each kind."""
_UNRENEWED: Final = """
NOT coalesce(heartbeat_at, started_at, created_at)
    BETWEEN now() - make_interval(secs => lease_ttl_sec) AND now() + make_interval(secs => lease_ttl_sec)
"""
ENDLESS: Final = f"""
status = 'running' AND (lease_expires_at IS NULL OR lease_expires_at = 'infinity') AND {_UNRENEWED}
"""
"""Condition for a running job whose lease never ends and that no worker has renewed for the length of a lease.

Such a lease was written by hand: each claim and heartbeat, ours and the document's, sets a lease that ends. The reaper
does not end these jobs; an operator can.
"""

MAX_COUNT: Final = 2**31 - 2
"""Largest count of crashes, which another role may have written, to which 1 can be added."""

# A run whose lease has expired counts as having run until then.
_REAP: Final = f"""
WITH clock AS MATERIALIZED (
  SELECT extract(epoch FROM now())::float8 AS now,
         coalesce(abs(extract(epoch FROM now())::float8 - $2::float8) > $3::float8, false) AS jumped
), expired AS MATERIALIZED (
  SELECT job_id, lease_expires_at, claimed_by,
         cancel_requested OR attempt >= max_attempts OR least(crashes, {MAX_COUNT}) + 1 >= max_attempts AS ends
  FROM dl_jobs
  WHERE status = 'running' AND lease_expires_at < now() AND (SELECT NOT jumped FROM clock)
    AND NOT coalesce(dl_lease_counts(heartbeat_at, lease_ttl_sec), false)
  ORDER BY lease_expires_at LIMIT $1 FOR NO KEY UPDATE SKIP LOCKED
), taken AS (
  UPDATE dl_jobs j SET
    status = (CASE WHEN j.cancel_requested THEN 'canceled'
                   WHEN e.ends THEN 'lost'
                   ELSE 'queued' END)::dl_status,
    crashes = least(j.crashes, {MAX_COUNT}) + 1,
    priority = {RETRY_PRIORITY},
    available_at = CASE WHEN e.ends THEN j.available_at ELSE now() END,
    waits_for = NULL,
    lease_expires_at = NULL,
    claimed_by = NULL,
    error = format('worker lost: the lease of %s ended in attempt %s',
                   coalesce(j.claimed_by, 'a foreign worker'), j.attempt),
    finished_at = CASE WHEN e.ends THEN now() END
  FROM expired e WHERE j.job_id = ANY (ARRAY[e.job_id])
  RETURNING j.job_id, j.queue, j.task, j.status, CASE WHEN j.keyed THEN hashtext(j.lock_key) END AS lock_hash,
            j.attempt, e.claimed_by,
            CASE WHEN isfinite(e.lease_expires_at) AND isfinite({_RUN_START}) THEN
              greatest(extract(epoch FROM e.lease_expires_at - ({_RUN_START})), 0) ELSE 0 END::float8 AS run_s
), stats AS (
  INSERT INTO dl_run_stats_new (queue, task, outcome, runs, total_s, max_s)
  SELECT queue, task, CASE status WHEN 'queued' THEN 'expired' ELSE status::text END, count(*), sum(run_s), max(run_s)
  FROM taken GROUP BY 1, 2, 3
), journal AS (
  INSERT INTO dl_job_events (job_id, queue, kind, payload)
  SELECT job_id, queue, CASE status WHEN 'queued' THEN 'requeue' ELSE status::text END,
         jsonb_strip_nulls(jsonb_build_object('reason', 'lease expired', 'attempt', attempt, 'worker', claimed_by))
  FROM taken
)
SELECT now, jumped, ARRAY(SELECT lock_hash FROM taken WHERE lock_hash IS NOT NULL) AS hashes,
       ARRAY(SELECT queue FROM taken) AS queues, ARRAY(SELECT status::text FROM taken) AS statuses,
       ARRAY(SELECT job_id FROM dl_jobs WHERE status = 'running' AND lease_expires_at IS NULL AND {_UNRENEWED} LIMIT $4)
       || ARRAY(SELECT job_id FROM dl_jobs
                WHERE status = 'running' AND lease_expires_at = 'infinity' AND {_UNRENEWED} LIMIT $4) AS endless
FROM clock
"""

JUMP_S: Final = 2.0
"""Minimum change of the database's clock against ours that counts as a jump, in seconds."""
_MARK_JUMP: Final = "UPDATE dl_history SET clock_jumped_at = clock_timestamp()"
PLAUSIBLE_S: Final = 10.0
"""Maximum plausible error of the database's clock in seconds: times that are further ahead are cut back."""
# A lease that never ends was written by hand (ENDLESS).
_CUT_BACK: Final = f"""
WITH ahead AS MATERIALIZED (
  SELECT job_id FROM dl_jobs
  WHERE status = 'running' AND lease_expires_at > now() + make_interval(secs => lease_ttl_sec + {PLAUSIBLE_S})
    AND lease_expires_at < 'infinity'
  FOR NO KEY UPDATE SKIP LOCKED
), cut AS (
  UPDATE dl_jobs j SET lease_expires_at = now() + make_interval(secs => j.lease_ttl_sec), heartbeat_at = now()
  FROM ahead a WHERE j.job_id = ANY (ARRAY[a.job_id]) RETURNING j.job_id
)
SELECT count(*) FROM cut
"""


class Beat(enum.Enum):
    """Result of a heartbeat for one job; `EXPIRED`: still ours, but its lease has ended by the database's clock."""

    RENEWED = enum.auto()
    UNKNOWN = enum.auto()
    EXPIRED = enum.auto()
    LOST = enum.auto()


@attrs.frozen
class Pulse:
    """Answer for one job: its token, the result of the heartbeat, and whether its cancel is requested."""

    token: int
    beat: Beat
    cancel_requested: bool


async def aio_rehearse(connection: Any) -> None:
    """Prepare the heartbeat's statement on a new connection, so that the first beat takes one round trip, too."""
    await aio_beat(connection, [(UUID(int=0), -1, False)])


async def aio_beat(connection: Any, runs: Sequence[tuple[UUID, int, bool]]) -> list[Pulse]:
    """Renew the leases of `runs` in the order of their IDs (asyncio-flavored).

    `runs` are (job_id, token, whether to write an event).
    """
    ordered = sorted(runs)
    records = await connection.fetch(_BEAT, *map(list, zip(*ordered, strict=True)))
    return [Pulse(record["token"], _found(record), record["cancel_requested"]) for record in records]


def _found(record: Any) -> Beat:
    if record["renewed"]:
        return Beat.RENEWED
    if not record["ours"]:
        return Beat.LOST
    return Beat.UNKNOWN if record["live"] else Beat.EXPIRED


async def aio_revive(connection: Any, runs: Sequence[tuple[UUID, int]]) -> set[int]:
    """Renew leases of (job_id, token), expired or not, and return the tokens that are ours (asyncio-flavored).

    Jobs with a key only on the session that holds it: no other job with the key can have started, and none can start
    while this runs. A job without a key has not been started elsewhere, since its token would have changed.
    """
    records = await connection.fetch(_REVIVE, *map(list, zip(*sorted(runs), strict=True)))
    return {record["token"] for record in records}


@attrs.frozen
class Reaped:
    """Result of a sweep of expired leases.

    Attributes:
        hashes: hashes of the keys of the ended runs; the next jobs of these keys have already been woken.
        ahead_s: the database's clock minus Trio's, or up to `took_s` more if the statement waited before the server
            read its clock.
        jumped: whether this difference has changed too much, so that no run was ended.
        became: the queue and the new status of each changed job.
        took_s: the duration of the statement in seconds.
        endless: running jobs whose lease never ends and that no worker renews (`ENDLESS`): some whose lease has no end,
            and some whose lease ends at infinity.
    """

    hashes: list[int]
    ahead_s: float
    jumped: bool
    became: list[tuple[str, str]] = attrs.field(factory=list)
    took_s: float = 0.0
    endless: list[UUID] = attrs.field(factory=list)


async def reap(
    database: Database,
    limit: int,
    *,
    ahead_s: float | None = None,
    jump_s: float = math.inf,
    most_endless: int = MAX_ENDLESS,
) -> Reaped:
    """Queue up to `limit` jobs with an expired lease again, or end them as `lost` if no attempt is left (Q10).

    Changes no job if the database's clock differs from Trio's by more than `jump_s` from `ahead_s`. Reports at most
    `most_endless` jobs with an endless lease, of each kind.
    """
    return await database.write(_aio_reap, limit, ahead_s, jump_s, most_endless)


async def aio_mark_jump(connection: Any) -> None:
    """Record that the database's clock has jumped ahead (asyncio-flavored).

    For claims and sweeps of all processes, leases that were renewed before the jump count for their whole length from
    now on: a worker that cannot reach the database goes by its own clock.
    """
    try:
        await connection.execute(_MARK_JUMP)
    except NO_RIGHT as error:  # a claim must not fail because of this
        log.warning("the jump of the database's clock cannot be recorded", error=said(error))


async def aio_cut_back_leases(connection: Any) -> int:
    """Cut leases that are longer than any that the clock grants now; return their number (asyncio-flavored).

    The clock was ahead when they were granted. A live worker renews its leases in any case.
    """
    count: int = await connection.fetchval(_CUT_BACK)
    return count


async def _aio_reap(connection: Any, limit: int, ahead_s: float | None, jump_s: float, most_endless: int) -> Reaped:
    sent_at = trio.current_time()
    clock = None if ahead_s is None else sent_at + ahead_s
    [record] = await connection.fetch(_REAP, limit, clock, jump_s, most_endless)
    took_s = trio.current_time() - sent_at
    hashes = record["hashes"]
    if hashes:
        await aio_unpark(connection, sorted(set(hashes)))
    became = list(zip(record["queues"], record["statuses"], strict=True))
    return Reaped(hashes, record["now"] - sent_at, record["jumped"], became, took_s, record["endless"])
