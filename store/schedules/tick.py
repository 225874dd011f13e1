"""Adds the jobs of schedules that are due (R7): each planned time once, whoever looks, or a reason on record.

Every process ticks. A due schedule's row is locked by one of them, which adds its jobs and writes its next time in the
same transaction; the others pass it over. A planned time can't have two jobs, by a unique index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import asyncpg
import attrs
import msgspec

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.logger import get_logger
from dataloader.jobs.model import NewJob
from dataloader.jobs.schedules import Overlap, Plan, Schedule, plan
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.driver_errors import said
from dataloader.store.queue.enqueue import row_of
from dataloader.store.queue.unique_inserts import aio_add_planned

log = get_logger(__name__)

SCHEDULES: Final = 200
"""Schedules that one tick looks at."""
JOBS: Final = 5_000
"""With so many jobs a tick is full: the schedules that are left over come next."""
CANCEL_WAIT_MS: Final = 200
"""How long a tick waits for a job that is to be canceled: a heartbeat has it for a moment, a psql for long."""
LOCKED_S: Final = 0.5
"""A schedule that is due and that another process has locked is looked at again after so long."""

_DUE: Final = """
SELECT name, spec::text AS spec, stored_at, next_at, last_job_id, statement_timestamp() AS now
FROM dl_schedules WHERE NOT paused AND retired_at IS NULL AND next_at <= statement_timestamp()
ORDER BY next_at LIMIT $1 FOR NO KEY UPDATE SKIP LOCKED
"""
_NEXT: Final = """
SELECT extract(epoch FROM min(next_at) - clock_timestamp())::float8 FROM dl_schedules
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
_EVENTS: Final = """
INSERT INTO dl_schedule_events (name, kind, payload)
SELECT u.name, u.kind, u.payload::jsonb FROM unnest($1::text[], $2::text[], $3::text[]) AS u (name, kind, payload)
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
    plan: Plan
    was_due_at: datetime
    last_job_id: UUID | None
    jobs: list[tuple[NewJob, datetime]] = attrs.field(factory=list)
    added: list[tuple[NewJob, datetime]] = attrs.field(factory=list)
    overlapping: list[datetime] = attrs.field(factory=list)
    stood_for: list[datetime] = attrs.field(factory=list)
    paused_why: str | None = None
    is_left: bool = False


async def tick(database: Database, *, default_lease_s: int = 60) -> Ticked:
    """Add the jobs of schedules that are due, at most a batch (R7).

    Leases last `default_lease_s` where neither the schedule nor its task says how long.
    """
    return await database.write(_aio_tick, default_lease_s)


async def _aio_tick(connection: Any, default_lease_s: int) -> Ticked:
    # A process with nothing to do asks this alone.
    next_in_s = await connection.fetchval(_NEXT, [])
    if next_in_s is None or next_in_s > 0:
        return Ticked(0, next_in_s)
    due: list[_Due] = []
    unread: list[str] = []
    async with connection.transaction():
        records = await connection.fetch(_DUE, SCHEDULES)
        planned = 0
        for record in records:
            if planned >= JOBS:
                break
            try:
                schedule = Schedule.of_spec(record["name"], msgspec.json.decode(record["spec"]))
            except BadRequest as error:
                # A newer program's, which has other fields; or its zone is not known here.
                log.warning("a schedule is left to other processes", schedule=record["name"], error=str(error))
                unread.append(record["name"])
                continue
            found = plan(schedule, schedule.times(record["stored_at"]), record["next_at"], record["now"])
            due.append(_Due(schedule, found, record["next_at"], record["last_job_id"]))
            planned += len(found.due)
            # Missed times are looked at one by one.
            await asyncio.sleep(0)
        if due:
            await _aio_pause_after_failures(connection, due)
            await _aio_choose(connection, [one for one in due if one.paused_why is None])
            due = [one for one in due if not one.is_left]
            await _aio_add(connection, [one for one in due if one.jobs], default_lease_s)
            for one in due:
                if one.paused_why is not None:
                    log.warning("a schedule was paused", schedule=one.schedule.name, why=one.paused_why)
            if due:
                await _aio_write(connection, due)
    next_in_s = await connection.fetchval(_NEXT, unread)
    if next_in_s is not None and next_in_s <= 0:
        is_full = planned >= JOBS or len(records) == SCHEDULES
        next_in_s = 0.0 if is_full and due else LOCKED_S
    return Ticked(sum(len(one.added) for one in due), next_in_s)


async def _aio_pause_after_failures(connection: Any, due: Iterable[_Due]) -> None:
    last = {one.last_job_id: one for one in due if one.schedule.pause_on_failure and one.last_job_id is not None}
    if last:
        for record in await connection.fetch(_FAILED, list(last)):
            last[record["job_id"]].paused_why = f"its job {record['job_id']} has ended as {record['status']}"


async def _aio_choose(connection: Any, due: list[_Due]) -> None:
    """Make the jobs of what is planned, as far as they may overlap with those that have not ended."""
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
        one.overlapping = [at for at in one.plan.due if at not in times]
        has_key = one.schedule.task in keyed
        one.jobs = [(new_job(one.schedule, at, task_has_key=has_key), at) for at in times]
    await _aio_cancel(connection, [one for one in due if one.jobs and one.schedule.name in unended])


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
    options: dict[str, Any] = {
        "available_at": schedule.available_at(planned_at),
        "producer": f"schedule:{schedule.name}",
    }
    if schedule.overlap is not Overlap.PARALLEL and not task_has_key:
        options["lock_key"] = f"schedule:{schedule.name}"
    return NewJob(task=schedule.task, args=dict(schedule.args), **options | dict(schedule.job))


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
    jobs = [(one, job, at) for one in due for job, at in one.jobs]
    rows = [row_of(job, default_lease_s) for _, job, _ in jobs]
    planned: list[tuple[str, datetime | None, UUID | None]] = [(one.schedule.name, at, None) for one, _, at in jobs]
    added, stands = await aio_add_planned(connection, rows, planned)
    for one in due:
        one.added = [(job, at) for job, at in one.jobs if job.job_id in added]
        one.stood_for = [at for job, at in one.jobs if job.job_id in stands]


async def _aio_write(connection: Any, due: list[_Due]) -> None:
    """Write when they are due next, and why times have no job."""
    rows = []
    for one in due:
        last = one.added[-1] if one.added else None
        last_at, last_job_id = (None, None) if last is None else (last[1], last[0].job_id)
        # When it is resumed, what was due since is what it has missed.
        next_at = one.plan.next_at if one.paused_why is None else one.was_due_at
        rows.append((one.schedule.name, next_at, last_at, last_job_id, one.paused_why))
    await connection.execute(_TICKED, *map(list, zip(*rows, strict=True)))
    events = [event for one in due for event in _events(one)]
    if events:
        await connection.execute(_EVENTS, *map(list, zip(*events, strict=True)))


def _events(one: _Due) -> Iterable[tuple[str, str, str]]:
    name, planned, late = one.schedule.name, one.plan, one.overlapping
    if one.paused_why is not None:
        yield name, "paused", _json(why=one.paused_why)
        return
    if planned.left_out:
        first, last = planned.first_left_out, planned.last_left_out
        yield name, "left_out", _json(why="missed", times=planned.left_out, first=first, last=last)
    if one.stood_for:
        first, last = one.stood_for[0], one.stood_for[-1]
        yield name, "left_out", _json(why="unique", times=len(one.stood_for), first=first, last=last)
    if late:
        yield name, "left_out", _json(why="overlap", times=len(late), first=late[0], last=late[-1])


def _json(**payload: Any) -> str:
    return msgspec.json.encode(payload).decode()
