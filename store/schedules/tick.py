"""Adds the jobs of due schedules: one for each planned time, by one of all processes, or a recorded reason.

All processes tick. One of them locks the row of a due schedule, adds its jobs and writes its next time in the same
transaction. The others skip it. A unique index prevents two jobs of one planned time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import islice
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.ids import uuid7
from dataloader.jobs.logger import get_logger
from dataloader.jobs.model import DEFAULT_LEASE_S, FIRST_INSTANT, NewJob
from dataloader.jobs.schedules import Overlap, PlannedTimes, Schedule, plan
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.driver_errors import aio_is_unserved, is_bug, is_temporary, said
from dataloader.store.connection.error_meanings import LOCKED
from dataloader.store.queue.enqueue import row_of
from dataloader.store.queue.job_inserts import AVAILABLE_AT, JOB_ID, Row, by_column
from dataloader.store.queue.unique_inserts import aio_add_planned
from dataloader.store.schedules.left_out import LeftOut, aio_record_left_out
from dataloader.store.schedules.rows import KNOWN, read_spec

log = get_logger(__name__)

SCHEDULES: Final = 1_000
"""Maximum schedules of one tick."""
IN_A_TURN: Final = 200
"""Schedules that are processed before other tasks of the event loop run."""
_OWN: Final = frozenset({"available_at", "idempotency_key", "version"})
"""Job options with which each job of a schedule has a different row."""
NAMED: Final = 10
"""Maximum unreadable schedules that a tick names, for the log. A metric counts all."""
JOBS: Final = 5_000
"""Number of jobs after which a tick is full. The remaining schedules follow in the next tick."""
LOCK_WAIT_MS: Final = 200
"""Milliseconds that a tick waits for a locked row, such as the row of a job to cancel. A heartbeat locks it briefly; a
psql session may lock it for hours."""
LOCKED_S: Final = 0.5
"""Seconds until the next tick if another process has locked a due schedule."""

_DUE: Final = """
SELECT name, spec::text AS spec, stored_at, next_at, last_job_id
FROM dl_schedules WHERE NOT paused AND retired_at IS NULL AND next_at <= $2 AND name <> ALL ($3::text[])
ORDER BY next_at LIMIT $1 FOR NO KEY UPDATE SKIP LOCKED
"""
# PostgreSQL before version 17 cannot subtract from an infinite time.
_NEXT: Final = """
SELECT CASE WHEN min(next_at) > '1900-01-01+00' THEN extract(epoch FROM min(next_at) - clock_timestamp())::float8
            WHEN min(next_at) IS NOT NULL THEN 0 END, statement_timestamp()
FROM dl_schedules WHERE NOT paused AND retired_at IS NULL AND next_at < 'infinity' AND name <> ALL ($1::text[])
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


_NOTHING: Final = PlannedTimes((), 0, None, None, None)


@attrs.frozen
class Ticked:
    """Number of enqueued jobs, and the seconds until the next schedule is due; None if there is none.

    `set_aside` is the number of due schedules with an invalid row. `left` are those of them that this program can
    neither read nor pause, with the reason, up to `NAMED`.
    """

    added: int
    next_in_s: float | None
    set_aside: int = 0
    left: Mapping[str, str] = attrs.field(factory=dict)


@attrs.define(eq=False)
class _Due:
    """Due schedule: its plan and the resulting jobs."""

    schedule: Schedule
    spec: str
    plan: PlannedTimes
    was_due_at: datetime
    last_job_id: UUID | None
    task_has_key: bool = False
    times: Sequence[datetime] = ()
    added: Sequence[tuple[UUID, datetime]] = ()
    overlapping: Sequence[datetime] = ()
    stood_for: Sequence[datetime] = ()
    paused_why: str | None = None
    is_at_fault: bool = False

    @property
    def name(self) -> str:
        return self.schedule.name


async def tick(database: Database, *, default_lease_s: int = DEFAULT_LEASE_S) -> Ticked:
    """Add the jobs of due schedules, at most one batch.

    Leases last `default_lease_s` if neither the schedule nor its task has a length. A schedule whose job cannot be
    added is paused with the reason. A schedule that this program cannot read is left to other processes. Both are
    `set_aside`, and the others continue. Raises `StoreError` for a bug that prevents the jobs of all schedules; their
    times wait.
    """
    return await database.write(_aio_tick, default_lease_s)


async def _aio_tick(connection: Any, default_lease_s: int) -> Ticked:
    # An idle process sends only this statement.
    next_in_s, now = await connection.fetchrow(_NEXT, [])
    if next_in_s is None or next_in_s > 0:
        return Ticked(0, next_in_s)
    left: dict[str, str] = {}
    bugs: list[tuple[_Due, Exception]] = []
    async with connection.transaction():
        await connection.execute(f"SET LOCAL lock_timeout = {LOCK_WAIT_MS}")
        while True:
            records = await connection.fetch(_DUE, SCHEDULES, now, list(left))
            unread = len(left)
            due = await _aio_plan(records, now, left)
            if len(left) == unread or len(records) < SCHEDULES:
                break  # otherwise unreadable schedules may have displaced others
        is_full = len(due) + len(left) - unread < len(records) or len(records) == SCHEDULES
        done = await _aio_do(connection, due, default_lease_s, left, bugs)
        if any(one.added for one in done):  # so the schedule is the cause of each error
            for one, error in bugs:
                done += await _aio_pause_at_fault(connection, one, error, left)
            bugs.clear()
    for one in done:
        if one.paused_why is not None:
            log.warning("a schedule was paused", schedule=one.name, why=one.paused_why)
    if bugs:
        _, error = bugs[0]
        raise error
    next_in_s, _ = await connection.fetchrow(_NEXT, list(left))
    if next_in_s is not None and next_in_s <= 0:
        next_in_s = 0.0 if is_full and done else LOCKED_S
    set_aside = len(left) + sum(one.is_at_fault for one in done)
    return Ticked(sum(len(one.added) for one in done), next_in_s, set_aside, dict(islice(left.items(), NAMED)))


async def _aio_do(
    connection: Any, due: Sequence[_Due], default_lease_s: int, left: dict[str, str], bugs: list[tuple[_Due, Exception]]
) -> list[_Due]:
    """Add the jobs of due schedules and write their next times. Return the schedules that were written.

    If the statements for all of them fail, each half is tried, down to the single schedule that causes the error. It is
    paused with the error; if even that cannot be written, its name is added to `left`. A schedule that waits for a row
    which another session has locked is not written; the next tick takes it. An outage of the database is no schedule's
    error. A schedule whose statements fail because of a bug is added to `bugs`: whether it is the cause depends on the
    others.
    """
    if not due:
        return []
    try:
        async with connection.transaction():
            return await _aio_try(connection, [attrs.evolve(one) for one in due], default_lease_s)
    except Exception as error:
        is_locked = isinstance(error, LOCKED)
        if is_temporary(error) and not is_locked:
            raise
        if await aio_is_unserved(error, connection):  # noqa: ASYNC120 - asyncio's, within one crossing
            raise
        fault = error
    if len(due) > 1:
        middle = len(due) // 2
        done = await _aio_do(connection, due[:middle], default_lease_s, left, bugs)
        return done + await _aio_do(connection, due[middle:], default_lease_s, left, bugs)
    if is_locked:
        return []
    if is_bug(fault):
        bugs.append((due[0], fault))
        return []
    return await _aio_pause_at_fault(connection, due[0], fault, left)


async def _aio_pause_at_fault(connection: Any, due: _Due, error: Exception, left: dict[str, str]) -> list[_Due]:
    """Pause a schedule whose job cannot be added. If that cannot be written, add its name to `left`."""
    why = due.paused_why or f"its job cannot be enqueued: {_reason_of_fault(error)}"
    paused = attrs.evolve(due, paused_why=why, is_at_fault=True)
    try:
        async with connection.transaction():
            await _aio_write_next_times(connection, [paused])
    except Exception as other:
        if is_temporary(other):
            raise
        left[paused.name] = f"it cannot be paused: {_reason_of_fault(other)}"
        return []
    return [paused]


def _reason_of_fault(error: Exception) -> str:
    return str(error) if isinstance(error, BadRequest) else said(error)


async def _aio_try(connection: Any, due: list[_Due], default_lease_s: int) -> list[_Due]:
    await _aio_pause_after_failures(connection, [one for one in due if one.paused_why is None])
    await _aio_choose(connection, [one for one in due if one.paused_why is None])
    await _aio_insert(connection, [one for one in due if one.times], default_lease_s)
    await _aio_write_next_times(connection, due)
    return due


async def _aio_plan(records: Iterable[Any], now: datetime, left: dict[str, str]) -> list[_Due]:
    """Plan due schedules, up to `JOBS` jobs. The names of unreadable ones are added to `left`."""
    due: list[_Due] = []
    planned = 0
    plans: dict[tuple[object, ...], PlannedTimes] = {}
    for number, (name, spec, stored_at, next_at, last_job_id) in enumerate(records):
        if planned >= JOBS:
            break
        if number % IN_A_TURN == 0:
            await asyncio.sleep(0)
        try:
            schedule = read_spec(name, spec)
        except BadRequest as error:
            # It is a newer program's and has other fields, or its zone is unknown here.
            left[name] = str(error)
            continue
        was_due_at = max(next_at, FIRST_INSTANT)  # SQL may have set any time
        # Many schedules have the same plan.
        alike = (*schedule.planning, None if schedule.start_at else stored_at, was_due_at)
        found = plans.get(alike)
        if found is None:
            try:
                found = plans[alike] = plan(schedule, schedule.times(stored_at), was_due_at, now)
            except Exception as error:  # noqa: BLE001 - any error of one schedule: the others are planned
                why = f"its times cannot be computed: {_reason_of_fault(error)}"
                due.append(_Due(schedule, spec, _NOTHING, was_due_at, last_job_id, paused_why=why, is_at_fault=True))
                continue
            # Missed times are computed one by one.
            await asyncio.sleep(0)
        due.append(_Due(schedule, spec, found, was_due_at, last_job_id))
        planned += len(found.due)
    return due


async def _aio_pause_after_failures(connection: Any, due: Iterable[_Due]) -> None:
    last = {one.last_job_id: one for one in due if one.schedule.pause_on_failure and one.last_job_id is not None}
    if last:
        for record in await connection.fetch(_FAILED, list(last)):
            last[record["job_id"]].paused_why = f"its job {record['job_id']} has ended as {record['status']}"


async def _aio_choose(connection: Any, due: list[_Due]) -> None:
    """Choose the planned times that get a job, by the overlap policy and the unfinished jobs."""
    careful = [
        one.schedule.name for one in due if one.schedule.overlap in {Overlap.BUFFER_ONE, Overlap.SKIP, Overlap.CANCEL}
    ]
    open_ = await connection.fetch(_OPEN, careful) if careful else []
    unended = {record["schedule"]: record["waits"] for record in open_}
    keyed = {record["task"] for record in await connection.fetch(_KEYED, sorted({one.schedule.task for one in due}))}
    for one in due:
        times = one.plan.due
        match one.schedule.overlap:
            case Overlap.BUFFER_ONE:
                times = times[-1:] if not unended.get(one.schedule.name, False) else ()
            case Overlap.SKIP:
                times = times[-1:] if one.schedule.name not in unended else ()
            case Overlap.CANCEL:
                times = times[-1:]
            case Overlap.BUFFER_ALL | Overlap.ALLOW:
                pass
        if len(times) < len(one.plan.due):
            one.overlapping = [at for at in one.plan.due if at not in times]
        one.times, one.task_has_key = times, one.schedule.task in keyed
    cancel = [one.name for one in due if one.schedule.overlap is Overlap.CANCEL and one.times and one.name in unended]
    if cancel:
        await connection.execute(_CANCEL, cancel)


def planned_job(schedule: Schedule, planned_at: datetime, *, task_has_key: bool) -> NewJob:
    """Return the job of a planned time. Jobs of one schedule exclude each other, unless they may run concurrently.

    Raises `BadRequest`.
    """
    options = _options(schedule, task_has_key=task_has_key)
    return schedule.new_job(available_at=schedule.available_at(planned_at), **options)


def _options(schedule: Schedule, *, task_has_key: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"producer": f"schedule:{schedule.name}"}
    if schedule.overlap is not Overlap.ALLOW and not task_has_key:
        options["lock_key"] = f"schedule:{schedule.name}"
    return options


@lru_cache(KNOWN)
def _row_alike(name: str, spec: str, default_lease_s: int, *, task_has_key: bool) -> Row:
    """Return the common row of a schedule's jobs, which differ by their IDs and times. Raises `BadRequest`."""
    schedule = read_spec(name, spec)
    job = schedule.new_job(**_options(schedule, task_has_key=task_has_key))
    return row_of(job, default_lease_s)


def _row_of_planned_job(one: _Due, at: datetime, default_lease_s: int) -> Row:
    """Return the row of a planned time's job. Raises `BadRequest`."""
    schedule = one.schedule
    if not schedule.job.keys().isdisjoint(_OWN):
        return row_of(planned_job(schedule, at, task_has_key=one.task_has_key), default_lease_s)
    row = _row_alike(schedule.name, one.spec, default_lease_s, task_has_key=one.task_has_key)
    return uuid7(), *row[1:AVAILABLE_AT], schedule.available_at(at), *row[AVAILABLE_AT + 1 :]


async def _aio_insert(connection: Any, due: list[_Due], default_lease_s: int) -> None:
    """Add the jobs of due schedules. Raises `BadRequest` for a job that cannot be added."""
    if not due:
        return
    rows: list[Row] = []
    planned: list[tuple[str, datetime | None, UUID | None]] = []
    ids: list[list[tuple[UUID, datetime]]] = []
    for number, one in enumerate(due, 1):
        some = [_row_of_planned_job(one, at, default_lease_s) for at in one.times]
        rows += some
        planned += [(one.schedule.name, at, None) for at in one.times]
        ids.append([(row[JOB_ID], at) for row, at in zip(some, one.times, strict=True)])
        if number % IN_A_TURN == 0:
            await asyncio.sleep(0)
    added, stands = await aio_add_planned(connection, rows, planned)
    for one, jobs in zip(due, ids, strict=True):
        one.added = [(job_id, at) for job_id, at in jobs if job_id in added]
        if len(one.added) < len(jobs):
            one.stood_for = [at for job_id, at in jobs if job_id in stands]


async def _aio_write_next_times(connection: Any, due: list[_Due]) -> None:
    """Write the next times of schedules, and the reasons of times without a job."""
    rows = []
    for one in due:
        last = one.added[-1] if one.added else None
        last_job_id, last_at = (None, None) if last is None else last
        # When it is resumed, the times since then are its missed ones.
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
