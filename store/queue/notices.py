"""Gather failures into groups, and add the jobs that notify operators of them (S6).

Triggers write failures in the transactions in which they happen, until the time `until` of dl_notice_watch. The first
session that locks a notice gathers it into the row of its group. The session that locks a group adds the jobs that
notify of it. Each step is one transaction, so that a process may be killed at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from dataloader.jobs.model import DEFAULT_LEASE_S, MAX_NAME, NewJob
from dataloader.jobs.notices import MAX_JOBS, QUEUE, Notice, Target, Telling
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.enqueue import row_of
from dataloader.store.queue.job_inserts import aio_insert

GATHER_S: Final = 10.0
"""Seconds between the first failure of a group and its notification."""
AGAIN_S: Final = 300.0
"""Minimum seconds between two notifications of a group."""
GATHERED: Final = 5_000
"""Number of notices that one transaction gathers."""
TOLD: Final = 200
"""Number of groups that one transaction notifies of."""
MAX_ATTEMPTS: Final = 10

# Only once an hour: each failure reads the row, which this writes.
_WATCH: Final = """
INSERT INTO dl_notice_watch AS w (until) VALUES (now() + interval '1 day')
ON CONFLICT (one) DO UPDATE SET until = excluded.until WHERE w.until < now() + interval '23 hours'
"""
# Other services may write names of any length; an index stores at most 2,704 bytes of a group.
_TAKE: Final = f"""
DELETE FROM dl_notices WHERE notice_id = ANY (ARRAY(
  SELECT notice_id FROM dl_notices ORDER BY notice_id LIMIT $1 FOR UPDATE SKIP LOCKED))
RETURNING notice_id, at, kind, left(name, {MAX_NAME}) AS name, left(queue, {MAX_NAME}) AS queue, job_id, times,
          dl_error_group(error) AS error_group, dl_error_line(error) AS error
"""
_GATHER: Final = f"""
INSERT INTO dl_notice_groups AS g (kind, name, error_group, waiting, first_at, last_at, queue, job_ids, error)
SELECT kind, name, error_group, waiting, first_at, last_at, queue, job_ids::uuid[], error
FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::timestamptz[], $6::timestamptz[], $7::text[],
            $8::text[], $9::text[])
  AS u (kind, name, error_group, waiting, first_at, last_at, queue, job_ids, error)
ON CONFLICT (kind, name, error_group) DO UPDATE SET
  waiting = g.waiting + excluded.waiting,
  first_at = CASE WHEN g.waiting = 0 THEN excluded.first_at ELSE least(g.first_at, excluded.first_at) END,
  last_at = greatest(g.last_at, excluded.last_at),
  queue = excluded.queue,
  job_ids = CASE WHEN g.waiting = 0 THEN excluded.job_ids ELSE (g.job_ids || excluded.job_ids)[1:{MAX_JOBS}] END,
  error = excluded.error
"""
_DUE: Final = """
SELECT kind, name, error_group, waiting, first_at, last_at, queue, job_ids, error, told_at FROM dl_notice_groups
WHERE waiting > 0 AND first_at <= now() - make_interval(secs => $1)
  AND (told_at IS NULL OR told_at <= now() - make_interval(secs => $2))
ORDER BY first_at LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED
"""
_TELL: Final = """
UPDATE dl_notice_groups g SET waiting = 0, told_at = now(), job_ids = '{}'
FROM unnest($1::text[], $2::text[], $3::text[]) AS u (kind, name, error_group)
WHERE (g.kind, g.name, g.error_group) = (u.kind, u.name, u.error_group)
"""
_NEXT: Final = """
SELECT extract(epoch FROM min(greatest(first_at + make_interval(secs => $1),
                                       coalesce(told_at + make_interval(secs => $2), first_at)))
                          - clock_timestamp())::float8
FROM dl_notice_groups WHERE waiting > 0
"""


@attrs.frozen
class Told:
    """Number of added jobs, and seconds until the next notification of a group; None if no group waits."""

    added: int
    next_in_s: float | None


@attrs.define(eq=False)
class _Gathered:
    """Failures of a group that one transaction gathers."""

    first: Any
    last: Any
    times: int = 0
    job_ids: list[str] = attrs.field(factory=list)


async def tell(
    database: Database,
    targets: Sequence[Target],
    *,
    gather_s: float = GATHER_S,
    again_s: float = AGAIN_S,
    default_lease_s: int = DEFAULT_LEASE_S,
) -> Told:
    """Gather the failures, and add the jobs that notify `targets` of the groups that are due.

    A group is due `gather_s` seconds after its first failure, and then at most every `again_s` seconds.
    """
    return await database.write(_aio_tell, targets, (gather_s, again_s), default_lease_s)


async def _aio_tell(
    connection: Any, targets: Sequence[Target], pauses: tuple[float, float], default_lease_s: int
) -> Told:
    async with connection.transaction():
        await connection.execute(_WATCH)
        taken = sorted(await connection.fetch(_TAKE, GATHERED), key=lambda record: record["notice_id"])
        if taken:
            await _aio_gather(connection, taken)
    async with connection.transaction():
        due = await connection.fetch(_DUE, *pauses, TOLD)
        jobs = [_job(target, record) for record in due for target in targets if record["kind"] in target.kinds]
        if due:
            keys = [(record["kind"], record["name"], record["error_group"]) for record in due]
            await connection.execute(_TELL, *map(list, zip(*keys, strict=True)))
        if jobs:
            await aio_insert(connection, [row_of(job, default_lease_s, is_ours=True) for job in jobs])
        next_in_s = await connection.fetchval(_NEXT, *pauses)
    if len(taken) == GATHERED or len(due) == TOLD:
        next_in_s = 0.0
    return Told(len(jobs), next_in_s)


async def _aio_gather(connection: Any, taken: Sequence[Any]) -> None:
    groups: dict[tuple[str, str, str], _Gathered] = {}
    for record in taken:
        key = record["kind"], record["name"], record["error_group"]
        group = groups.setdefault(key, _Gathered(record, record))
        group.last = record
        group.times += record["times"]
        if record["job_id"] is not None and len(group.job_ids) < MAX_JOBS:
            group.job_ids.append(str(record["job_id"]))
    # All sessions gather in one order, so that they do not deadlock.
    rows = [
        (
            *key,
            group.times,
            group.first["at"],
            group.last["at"],
            group.last["queue"],
            f"{{{','.join(group.job_ids)}}}",
            group.last["error"],
        )
        for key, group in sorted(groups.items())
    ]
    await connection.execute(_GATHER, *map(list, zip(*rows, strict=True)))


def _job(target: Target, record: Any) -> NewJob:
    notice = Notice(
        kind=record["kind"],
        name=mask_text(record["name"]),
        queue=None if record["queue"] is None else mask_text(record["queue"]),
        group=mask_text(record["error_group"]),
        error=mask_text(record["error"]),
        times=record["waiting"],
        first_at=record["first_at"],
        last_at=record["last_at"],
        told_before_at=record["told_at"],
        job_ids=tuple(record["job_ids"]),
    )
    return NewJob(
        task=target.task,
        queue=QUEUE,
        args=attrs.asdict(Telling(target=target.name, notice=notice)),
        max_attempts=MAX_ATTEMPTS,
        producer="notifier",
    )
