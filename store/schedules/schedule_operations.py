"""Implementations of the operations on schedules over the database.

Each change locks the schedule's row, as the tick does, so that only one of them decides on a planned time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Final

import attrs
import msgspec

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import BadRequest, IdempotencyConflict
from dataloader.jobs.ids import uuid7
from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.model import Enqueued, check_between
from dataloader.jobs.operations.schedules import (
    BackfillSchedule,
    DeleteSchedule,
    GetSchedule,
    ListNextTimes,
    ListScheduleEvents,
    ListSchedules,
    NextTimes,
    PauseSchedule,
    PutSchedule,
    ResumeSchedule,
    RunSchedule,
)
from dataloader.jobs.page_cursor import BY_NAME, BY_NUMBER
from dataloader.jobs.schedule_listings import (
    MAX_BACKFILL,
    MAX_NEXT,
    Backfilled,
    ScheduleEvent,
    ScheduleEventPage,
    ScheduleNotFound,
    SchedulePage,
    ScheduleRecord,
)
from dataloader.jobs.schedules import Every, Schedule
from dataloader.jobs.states import Status
from dataloader.jobs.task import check_task
from dataloader.jobs.text import as_object, stored_json
from dataloader.store.connection.fetching import aio_fetch
from dataloader.store.implementations import Store, implements
from dataloader.store.queue.control import LOCK_TIMEOUT_MS, aio_audit
from dataloader.store.queue.enqueue import row_of
from dataloader.store.queue.reads import aio_read_page
from dataloader.store.queue.unique_inserts import aio_add_planned
from dataloader.store.schedules.rows import TELL, aio_put_schedule, read_spec
from dataloader.store.schedules.tick import planned_job

COLUMNS: Final = (
    "name, task, spec::text AS spec, origin, stored_by, stored_at, changed_at, next_at, last_at, last_job_id, paused,"
    " paused_why, retired_at, NOT EXISTS (SELECT FROM dl_tasks t WHERE t.task = dl_schedules.task) AS unknown_task"
)
_PAGE: Final = f"SELECT {COLUMNS} FROM dl_schedules WHERE name > $1 ORDER BY name LIMIT $2"
_ONE: Final = f"SELECT {COLUMNS}, statement_timestamp() AS now FROM dl_schedules WHERE name = $1"
_LOCK: Final = f"{_ONE} FOR NO KEY UPDATE"
_EVENTS: Final = """
SELECT event_id, at, kind, payload::text AS payload FROM dl_schedule_events
WHERE name = $1 AND event_id < $2 ORDER BY event_id DESC LIMIT $3
"""
# A resumed schedule does not check the job again whose failure paused it.
_PAUSE: Final = """
UPDATE dl_schedules SET paused = $2, paused_why = $3, last_job_id = CASE WHEN $2 THEN last_job_id END WHERE name = $1
"""
_EVENT: Final = "INSERT INTO dl_schedule_events (name, kind, payload) VALUES ($1, $2, $3::text::jsonb)"
_THERE: Final = "SELECT schedule, status::text AS status, queue FROM dl_jobs WHERE job_id = $1"
_HAVE_JOBS: Final = (
    "SELECT DISTINCT planned_at FROM dl_jobs WHERE schedule = $1 AND planned_at = ANY ($2::timestamptz[])"
)
_HAS_KEY: Final = (
    "SELECT EXISTS (SELECT FROM dl_tasks WHERE task = $1 AND (lock_key IS NOT NULL OR uniqueness IS NOT NULL))"
)


@implements(ListSchedules)
async def _list_schedules(store: Store, request: ListSchedules) -> SchedulePage:
    check_between("limit", request.limit, 1, MAX_PAGE)
    behind = "" if request.after is None else BY_NAME.key(request.after)
    rows, more = await store.database.run(
        aio_read_page, _PAGE, (behind, request.limit + 1), request.limit, texts=("spec",)
    )
    return SchedulePage(list(map(schedule_record, rows)), BY_NAME.text(rows[-1]["name"]) if more else None)


@implements(GetSchedule)
async def _get_schedule(store: Store, request: GetSchedule) -> ScheduleRecord:
    return schedule_record(await store.database.run(_aio_one, _ONE, request.name))


@implements(ListScheduleEvents)
async def _list_schedule_events(store: Store, request: ListScheduleEvents) -> ScheduleEventPage:
    check_between("limit", request.limit, 1, MAX_PAGE)
    await store.database.run(_aio_one, _ONE, request.name)
    before = 2**63 - 1 if request.after is None else BY_NUMBER.key(request.after)
    records = await store.database.run(aio_fetch, _EVENTS, request.name, before, request.limit + 1)
    events = [
        ScheduleEvent(
            event_id=record["event_id"],
            at=record["at"],
            kind=record["kind"],
            payload=payload_of(stored_json(record["payload"] or "null")),
        )
        for record in records
    ]
    return ScheduleEventPage(*BY_NUMBER.page(events, request.limit, lambda event: event.event_id))


@implements(ListNextTimes)
async def _list_next_times(store: Store, request: ListNextTimes) -> NextTimes:
    check_between("number", request.number, 1, MAX_NEXT)
    found = schedule_record(await store.database.run(_aio_one, _ONE, request.name))
    return NextTimes(found.next_times(request.number))


@implements(PutSchedule)
async def _put_schedule(store: Store, request: PutSchedule) -> ScheduleRecord:
    schedule = request.schedule
    check_task(schedule.task)
    schedule.check_job()
    return await store.database.write(_aio_put, schedule, store.operator)


@implements(DeleteSchedule)
async def _delete_schedule(store: Store, request: DeleteSchedule) -> ScheduleRecord:
    return await store.database.write(_aio_delete, request.name, store.operator)


@implements(PauseSchedule)
async def _pause_schedule(store: Store, request: PauseSchedule) -> ScheduleRecord:
    return await store.database.write(_aio_pause_schedule, request.name, f"by {store.operator.name}", store.operator)


@implements(ResumeSchedule)
async def _resume_schedule(store: Store, request: ResumeSchedule) -> ScheduleRecord:
    return await store.database.write(_aio_pause_schedule, request.name, None, store.operator)


@implements(RunSchedule)
async def _run_schedule(store: Store, request: RunSchedule) -> Enqueued:
    return await store.database.write(_aio_run_beside_plan, request, store.operator, store.enqueuer.default_lease_s)


@implements(BackfillSchedule)
async def _backfill_schedule(store: Store, request: BackfillSchedule) -> Backfilled:
    return await store.database.write(_aio_backfill, request, store.operator, store.enqueuer.default_lease_s)


def payload_of(value: object) -> dict[str, Any] | None:
    """Return the payload of an event as an object. Other programs may write other values, which are wrapped in one."""
    return None if value is None else as_object(value)


def schedule_record(row: Any) -> ScheduleRecord:
    """Return the schedule of a row with `COLUMNS`, with its `fault` if its spec cannot be read.

    The row of a paused schedule keeps its former next time for the end of the pause, but it will not add a job then.
    """
    values = {field.name: row[field.name] for field in attrs.fields(ScheduleRecord) if field.name != "fault"}
    spec, fault = stored_json(row["spec"]), None
    try:
        read_spec(row["name"], row["spec"])
    except BadRequest as error:
        fault = str(error)
    if row["paused"] or row["retired_at"] is not None:
        values["next_at"] = None
    return ScheduleRecord(**values | {"spec": spec if isinstance(spec, dict) else {}}, fault=fault)


async def _aio_one(connection: Any, sql: str, name: str) -> Any:
    record = await connection.fetchrow(sql, name)
    if record is None:
        raise ScheduleNotFound(f"no schedule has the name {name!r}")
    return record


@asynccontextmanager
async def _aio_transaction_with_timeout(connection: Any) -> AsyncIterator[None]:
    """Open a transaction that waits for a locked schedule, up to `LOCK_TIMEOUT_MS`."""
    async with connection.transaction():
        await connection.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
        yield


async def _aio_put(connection: Any, schedule: Schedule, operator: Operator) -> ScheduleRecord:
    async with _aio_transaction_with_timeout(connection):
        await aio_put_schedule(connection, schedule, operator.name)
        detail = {"schedule": schedule.name, "spec": schedule.spec()}
        await aio_audit(connection, operator, "put_schedule", None, detail)
        return schedule_record(await _aio_one(connection, _ONE, schedule.name))


async def _aio_delete(connection: Any, name: str, operator: Operator) -> ScheduleRecord:
    async with _aio_transaction_with_timeout(connection):
        found = await _aio_one(connection, _LOCK, name)
        await connection.execute("DELETE FROM dl_schedules WHERE name = $1", name)
        await connection.execute("DELETE FROM dl_schedule_events WHERE name = $1", name)
        await aio_audit(connection, operator, "delete_schedule", None, {"schedule": name})
        return schedule_record(found)


async def _aio_pause_schedule(connection: Any, name: str, why: str | None, operator: Operator) -> ScheduleRecord:
    kind = "resumed" if why is None else "paused"
    async with _aio_transaction_with_timeout(connection):
        found = await _aio_one(connection, _LOCK, name)
        if found["paused"] != (why is not None):
            await connection.execute(_PAUSE, name, why is not None, why)
            await connection.execute(_EVENT, name, kind, msgspec.json.encode({"by": operator.name}).decode())
            await connection.execute(TELL)
        action = "resume_schedule" if why is None else "pause_schedule"
        await aio_audit(connection, operator, action, None, {"schedule": name})
        record = schedule_record(await _aio_one(connection, _ONE, name))
    if record.next_at is None or record.fault is not None or record.next_at > found["now"]:
        return record
    # The next tick handles the times that were due in the meantime.
    schedule = record.schedule
    return attrs.evolve(record, next_at=schedule.next_after(schedule.times(record.stored_at), found["now"]))


async def _aio_run_beside_plan(
    connection: Any, request: RunSchedule, operator: Operator, default_lease_s: int
) -> Enqueued:
    name, job_id = request.name, request.job_id
    async with _aio_transaction_with_timeout(connection):
        found = await _aio_one(connection, _LOCK, name)
        # The schedule is locked, so two requests with the same ID run one after the other.
        if job_id is not None and (there := await connection.fetchrow(_THERE, job_id)) is not None:
            if there["schedule"] != name:
                raise IdempotencyConflict(str(job_id), job_id)
            return Enqueued(job_id, Status(there["status"]), created=False, queue=there["queue"])
        schedule = schedule_record(found).schedule
        has_key = await connection.fetchval(_HAS_KEY, schedule.task)
        job = planned_job(schedule, found["now"], task_has_key=has_key)
        job = attrs.evolve(job, available_at=None, job_id=job_id or job.job_id)
        row = row_of(job, default_lease_s)
        added, stands = await aio_add_planned(connection, [row], [(name, None, None)])
        if job.job_id not in added and job.job_id not in stands:
            # A request for another schedule has added a job with this ID in the meantime.
            raise IdempotencyConflict(str(job.job_id), job.job_id)
        await aio_audit(connection, operator, "run_schedule", job.job_id, {"schedule": name})
        if (stand := stands.get(job.job_id)) is not None:
            return Enqueued(stand.job_id, stand.status, created=False, queue=stand.queue, did=stand.did)
        return Enqueued(job.job_id, Status.QUEUED, created=True, queue=added[job.job_id])


async def _aio_backfill(
    connection: Any, request: BackfillSchedule, operator: Operator, default_lease_s: int
) -> Backfilled:
    name, backfill = request.name, request.backfill_id or uuid7()
    async with _aio_transaction_with_timeout(connection):
        found = await _aio_one(connection, _LOCK, name)
        schedule = schedule_record(found).schedule
        # Later times are left to the tick.
        until = min(filter(None, (request.end, schedule.end_at, found["next_at"])))
        times = _planned(schedule, found["stored_at"], request.begin, until)
        have = {record["planned_at"] for record in await connection.fetch(_HAVE_JOBS, name, times)}
        wanted = times if request.again else [at for at in times if at not in have]
        had = 0 if request.again else len(have)
        if request.dry_run or not wanted:
            return Backfilled(backfill=None, times=wanted, had_jobs=had)
        has_key = await connection.fetchval(_HAS_KEY, schedule.task)
        jobs = [attrs.evolve(planned_job(schedule, at, task_has_key=has_key), available_at=None) for at in wanted]
        rows = [row_of(job, default_lease_s) for job in jobs]
        added, _ = await aio_add_planned(connection, rows, [(name, at, backfill) for at in wanted])
        # An existing job of a unique task may replace some of these.
        wanted = [at for job, at in zip(jobs, wanted, strict=True) if job.job_id in added]
        detail = msgspec.to_builtins(
            {
                "schedule": name,
                "backfill": backfill,
                "begin": request.begin,
                "end": request.end,
                "jobs": len(wanted),
                "again": request.again,
            }
        )
        await connection.execute(_EVENT, name, "backfilled", msgspec.json.encode(detail).decode())
        await aio_audit(connection, operator, "backfill_schedule", None, detail)
        return Backfilled(backfill=backfill, times=wanted, had_jobs=had)


def _planned(schedule: Schedule, stored_at: datetime, begin: datetime, until: datetime) -> list[datetime]:
    """Return the planned times from `begin` to `until` (exclusive), including those before the schedule was stored."""
    times = schedule.times(stored_at)
    if isinstance(times, Every) and schedule.start_at is None:
        times = times.begun_by(begin)
    found = times.after(begin - timedelta(microseconds=1), until - timedelta(microseconds=1))
    first = list(islice(found, MAX_BACKFILL + 1))
    if len(first) > MAX_BACKFILL:
        raise BadRequest("end", f"has more than {MAX_BACKFILL:,} planned times; choose a shorter period")
    return first
