"""Adds the jobs of schedules that are due (R7): each planned time once, whoever looks, or a reason on record.

Every process ticks. A due schedule's row is locked by one of them, which adds its jobs and writes its next time in the
same transaction; the others pass it over. A planned time can't have two jobs, by a unique index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

import asyncpg
import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.ids import uuid7
from dataloader.jobs.logger import get_logger
from dataloader.jobs.model import NewJob
from dataloader.jobs.schedules import Overlap, Plan, Schedule, plan
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.driver_errors import said
from dataloader.store.queue.enqueue import row_of
from dataloader.store.queue.job_inserts import AVAILABLE_AT, Row, by_column
from dataloader.store.queue.unique_inserts import aio_add_planned
from dataloader.store.schedules.left_out import LeftOut, aio_record_left_out
from dataloader.store.schedules.rows import KNOWN, read_spec

log = get_logger(__name__)

SCHEDULES: Final = 1_000
"""Schedules that one tick looks at."""
IN_A_TURN: Final = 200
"""Those among them that are looked at before the loop has its turn."""
_ALIKE: Final = {"queue", "priority", "lock_key", "partition_key", "max_attempts", "lease_ttl_sec", "consumer_group"}
"""The options of jobs that are the same for all of a schedule."""
JOBS: Final = 5_000
"""With so many jobs a tick is full: the schedules that are left over come next."""
CANCEL_WAIT_MS: Final = 200
"""How long a tick waits for a job that is to be canceled: a heartbeat has it for a moment, a psql for long."""
LOCKED_S: Final = 0.5
"""A schedule that is due and that another process has locked is looked at again after so long."""

_DUE: Final = """
SELECT name, spec::text AS spec, stored_at, next_at, last_job_id
FROM dl_schedules WHERE NOT paused AND retired_at IS NULL AND next_at <= $2
ORDER BY next_at LIMIT $1 FOR NO KEY UPDATE SKIP LOCKED
"""
_NEXT: Final = """
SELECT extract(epoch FROM min(next_at) - clock_timestamp())::float8, statement_timestamp() FROM dl_schedules
WHERE NOT paused AND retired_at IS NULL AND name <> ALL ($1::text[])
"""
_FAILED: Final = """
SELECT schedule, job_id, status::text AS status FROM dl_jobs
WHERE job_id = ANY ($1::uuid[]) AND status IN ('failed', 'lost')
"""
# A job that waits for a retry has begun.
_OPEN: Final = """
SELECT schedule, bool_or(status = 'queued' AND started_at IS NULL) AS waits FROM dl_jobs
WHERE schedule = ANY ($1::text[]) AND backfill IS NULL AND status IN ('queued', 'running') GROUP BY schedule
"""
_CANCEL: Final = """
WITH asked AS (
  UPDATE dl_jobs SET cancel_requested = true
  WHERE schedule = ANY ($1::text[]) AND backfill IS NULL AND status = 'running' AND NOT cancel_requested
), ended AS (
  UPDATE dl_jobs SET status = 'canceled', cancel_requested = true, waits_for = NULL, finished_at = now()
  WHERE schedule = ANY ($1::text[]) AND backfill IS NULL AND status = 'queued'
  RETURNING job_id, queue
)
INSERT INTO dl_job_events (job_id, queue, kind, payload)
SELECT job_id, queue, 'canceled', '{"reason": "schedule"}' FROM ended
"""
_KEYED: Final = (
    "SELECT task FROM dl_tasks WHERE task = ANY ($1::text[]) AND (lock_key IS NOT NULL OR uniqueness IS NOT NULL)"
)
_TICKED: Final = """
UPDATE dl_schedules s SET
  next_at = u.next_at, last_at = coalesce(u.last_at, s.last_at), last_job_id = coalesce(u.last_job_id, s.last_job_id),
  paused = u.why IS NOT NULL, paused_why = u.why
FROM unnest($1::text[], $2::timestamptz[], $3::timestamptz[], $4::uuid[], $5::text[])
  AS u (name, next_at, last_at, last_job_id, why)
WHERE s.name = u.name
"""
_PAUSED: Final = """
INSERT INTO dl_schedule_events (name, kind, payload)
SELECT u.name, 'paused', jsonb_build_object('why', u.why) FROM unnest($1::text[], $2::text[]) AS u (name, why)
"""


@attrs.frozen
class Ticked:
    """How many jobs were added, and in how many seconds the next schedule is due; None: none is."""

    added: int
    next_in_s: float | None


@attrs.define(eq=False)
class _Due:
    """A schedule that is due: what is planned for it, and what comes of that."""

    schedule: Schedule
    spec: str
    plan: Plan
    was_due_at: datetime
    last_job_id: UUID | None
    task_has_key: bool = False
    times: Sequence[datetime] = ()
    added: Sequence[tuple[UUID, datetime]] = ()
    overlapping: Sequence[datetime] = ()
    stood_for: Sequence[datetime] = ()
    paused_why: str | None = None
    is_left: bool = False


async def tick(database: Database, *, default_lease_s: int = 60) -> Ticked:
    """Add the jobs of schedules that are due, at most a batch (R7).

    Leases last `default_lease_s` where neither the schedule nor its task says how long.
    """
    return await database.write(_aio_tick, default_lease_s)


async def _aio_tick(connection: Any, default_lease_s: int) -> Ticked:
    # A process with nothing to do asks this alone.
    next_in_s, now = await connection.fetchrow(_NEXT, [])
    if next_in_s is None or next_in_s > 0:
        return Ticked(0, next_in_s)
    unread: list[str] = []
    async with connection.transaction():
        records = await connection.fetch(_DUE, SCHEDULES, now)
        due = await _aio_plan(records, now, unread)
        is_full = len(due) + len(unread) < len(records) or len(records) == SCHEDULES
        if due:
            await _aio_pause_after_failures(connection, due)
            await _aio_choose(connection, [one for one in due if one.paused_why is None])
            due = [one for one in due if not one.is_left]
            await _aio_add(connection, [one for one in due if one.times], default_lease_s)
            for one in due:
                if one.paused_why is not None:
                    log.warning("a schedule was paused", schedule=one.schedule.name, why=one.paused_why)
            if due:
                await _aio_write(connection, due)
    next_in_s, _ = await connection.fetchrow(_NEXT, unread)
    if next_in_s is not None and next_in_s <= 0:
        next_in_s = 0.0 if is_full and due else LOCKED_S
    return Ticked(sum(len(one.added) for one in due), next_in_s)


async def _aio_plan(records: Iterable[Any], now: datetime, unread: list[str]) -> list[_Due]:
    """What is planned for schedules that are due, up to `JOBS` jobs; `unread` gets the names of unreadable ones."""
    due: list[_Due] = []
    planned = 0
    plans: dict[tuple[object, ...], Plan] = {}
    for number, (name, spec, stored_at, next_at, last_job_id) in enumerate(records):
        if planned >= JOBS:
            break
        try:
            schedule = read_spec(name, spec)
        except BadRequest as error:
            # A newer program's, which has other fields; or its zone is not known here.
            log.warning("a schedule is left to other processes", schedule=name, error=str(error))
            unread.append(name)
            continue
        # Many are planned alike.
        alike = (*schedule.planning, None if schedule.start_at else stored_at, next_at)
        found = plans.get(alike)
        if found is None:
            found = plans[alike] = plan(schedule, schedule.times(stored_at), next_at, now)
            # Missed times are looked at one by one.
            await asyncio.sleep(0)
        elif number % IN_A_TURN == 0:
            await asyncio.sleep(0)
        due.append(_Due(schedule, spec, found, next_at, last_job_id))
        planned += len(found.due)
    return due


async def _aio_pause_after_failures(connection: Any, due: Iterable[_Due]) -> None:
    last = {one.last_job_id: one for one in due if one.schedule.pause_on_failure and one.last_job_id is not None}
    if last:
        for record in await connection.fetch(_FAILED, list(last)):
            last[record["job_id"]].paused_why = f"its job {record['job_id']} has ended as {record['status']}"


async def _aio_choose(connection: Any, due: list[_Due]) -> None:
    """Choose of what is planned what gets a job: what may overlap with those that have not ended."""
    careful = [one.schedule.name for one in due if one.schedule.overlap in {Overlap.ONE, Overlap.SKIP, Overlap.CANCEL}]
    open_ = await connection.fetch(_OPEN, careful) if careful else []
    unended = {record["schedule"]: record["waits"] for record in open_}
    keyed = {record["task"] for record in await connection.fetch(_KEYED, sorted({one.schedule.task for one in due}))}
    for one in due:
        times = one.plan.due
        match one.schedule.overlap:
            case Overlap.ONE:
                times = times[-1:] if not unended.get(one.schedule.name, False) else ()
            case Overlap.SKIP:
                times = times[-1:] if one.schedule.name not in unended else ()
            case Overlap.CANCEL:
                times = times[-1:]
            case Overlap.ALL | Overlap.PARALLEL:
                pass
        if len(times) < len(one.plan.due):
            one.overlapping = [at for at in one.plan.due if at not in times]
        one.times, one.task_has_key = times, one.schedule.task in keyed
    await _aio_cancel(connection, [one for one in due if one.times and one.schedule.name in unended])


async def _aio_cancel(connection: Any, due: list[_Due]) -> None:
    """Cancel what has not ended of schedules that say so; one whose job somebody has locked is left for later."""
    cancel = [one for one in due if one.schedule.overlap is Overlap.CANCEL]
    if not cancel:
        return
    try:
        async with connection.transaction():
            await connection.execute(f"SET LOCAL lock_timeout = {CANCEL_WAIT_MS}")
            await connection.execute(_CANCEL, [one.schedule.name for one in cancel])
            await connection.execute("SET LOCAL lock_timeout = DEFAULT")
    except asyncpg.LockNotAvailableError:
        if len(cancel) == 1:
            cancel[0].is_left = True
            return
        for one in cancel:
            await _aio_cancel(connection, [one])


def new_job(schedule: Schedule, planned_at: datetime, *, task_has_key: bool) -> NewJob:
    """The job of a planned time. Those of one schedule exclude each other, unless they may run side by side."""
    job = {"available_at": schedule.available_at(planned_at), **_job(schedule, task_has_key=task_has_key)}
    return NewJob(**job)


def _job(schedule: Schedule, *, task_has_key: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"producer": f"schedule:{schedule.name}"}
    if schedule.overlap is not Overlap.PARALLEL and not task_has_key:
        options["lock_key"] = f"schedule:{schedule.name}"
    return {"task": schedule.task, "args": dict(schedule.args), **options, **schedule.job}


@lru_cache(KNOWN)
def _row_alike(name: str, spec: str, default_lease_s: int, *, task_has_key: bool) -> Row:
    """The row of a schedule's jobs, which differ by their ids and times. Raises `BadRequest`."""
    schedule = read_spec(name, spec)
    job = NewJob(**_job(schedule, task_has_key=task_has_key))
    return row_of(job, default_lease_s)


def _row(one: _Due, at: datetime, default_lease_s: int) -> Row:
    """The row of a planned time's job. Raises `BadRequest`."""
    schedule = one.schedule
    if not schedule.job.keys() <= _ALIKE:
        return row_of(new_job(schedule, at, task_has_key=one.task_has_key), default_lease_s)
    row = _row_alike(schedule.name, one.spec, default_lease_s, task_has_key=one.task_has_key)
    return uuid7(), *row[1:AVAILABLE_AT], schedule.available_at(at), *row[AVAILABLE_AT + 1 :]


async def _aio_add(connection: Any, due: list[_Due], default_lease_s: int) -> None:
    """Add their jobs; if one can't be added, its schedule is paused, and the others' are."""
    if not due:
        return
    try:
        async with connection.transaction():
            await _aio_insert(connection, due, default_lease_s)
    except (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, BadRequest) as error:
        if len(due) == 1:
            text = str(error) if isinstance(error, BadRequest) else said(error)
            due[0].paused_why = f"its job can't be added: {text}"
            return
        for one in due:
            await _aio_add(connection, [one], default_lease_s)


async def _aio_insert(connection: Any, due: list[_Due], default_lease_s: int) -> None:
    rows: list[Row] = []
    planned: list[tuple[str, datetime | None, UUID | None]] = []
    ids: list[list[tuple[UUID, datetime]]] = []
    for number, one in enumerate(due, 1):
        some = [_row(one, at, default_lease_s) for at in one.times]
        rows += some
        planned += [(one.schedule.name, at, None) for at in one.times]
        ids.append([(row[0], at) for row, at in zip(some, one.times, strict=True)])
        if number % IN_A_TURN == 0:
            await asyncio.sleep(0)
    added, stands = await aio_add_planned(connection, rows, planned)
    for one, jobs in zip(due, ids, strict=True):
        one.added = [(job_id, at) for job_id, at in jobs if job_id in added]
        if len(one.added) < len(jobs):
            one.stood_for = [at for job_id, at in jobs if job_id in stands]


async def _aio_write(connection: Any, due: list[_Due]) -> None:
    """Write when they are due next, and why times have no job."""
    rows = []
    for one in due:
        last = one.added[-1] if one.added else None
        last_job_id, last_at = (None, None) if last is None else last
        # When it is resumed, what was due since is what it has missed.
        next_at = one.plan.next_at if one.paused_why is None else one.was_due_at
        rows.append((one.schedule.name, next_at, last_at, last_job_id, one.paused_why))
    left_out = [found for one in due if one.paused_why is None for found in _left_out(one)]
    if left_out:
        await aio_record_left_out(connection, left_out)
    await connection.execute(_TICKED, *by_column(rows))
    paused = {one.schedule.name: one.paused_why for one in due if one.paused_why is not None}
    if paused:
        await connection.execute(_PAUSED, list(paused), list(paused.values()))


def _left_out(one: _Due) -> Iterable[LeftOut]:
    name, planned, first = one.schedule.name, one.plan, one.plan.first_left_out
    if first is not None and planned.last_left_out is not None:
        yield LeftOut(name, "missed", planned.left_out, first, planned.last_left_out)
    if some := one.stood_for:
        after_job = any(at < some[0] for _, at in one.added)
        yield LeftOut(name, "unique", len(some), some[0], some[-1], after_job)
    if some := one.overlapping:
        yield LeftOut(name, "overlap", len(some), some[0], some[-1])
