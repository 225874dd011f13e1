"""What an operator does to jobs and queues: cancel, retry, change of priority, run now, pause, resume (Q4, R1, R2).

web/, the command line and the supervisor call it. Every action writes its row of dl_audit in its own transaction, also
when it found nothing to change. A job's row is locked before its status is judged, so that a finish, a claim or another
operator comes before or after, never between. The transitions are those of jobs/states.py. A job that somebody runs is
not ended here: it is asked for, and whoever runs the job answers. A running job whose lease never ends and that nobody
renews (`ENDLESS`) is nobody's, and is ended here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.contract import MAX_BULK, Operator
from dataloader.jobs.errors import Conflict, JobNotFound
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.model import MAX_INT, MAX_NAME, JobRecord, check_between, check_name
from dataloader.jobs.secrets.masking import mask
from dataloader.jobs.states import TRANSITIONS, Status, Step, WaitsFor
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.error_meanings import TAKEN
from dataloader.store.queue.job_filters import condition
from dataloader.store.queue.leases import ENDLESS
from dataloader.store.queue.make_ready import unpark
from dataloader.store.queue.reads import aio_get_job

LOCK_TIMEOUT_MS: Final = 2_000

OPEN: Final = frozenset({Status.QUEUED, Status.RUNNING})
REVIVABLE: Final = frozenset(status for status, step in TRANSITIONS if step is Step.REVIVE)

# {where} is put together by JobFilter from constants; the newest version of each row is judged again once it is locked.
_LOCK_MANY: Final = f"""
SELECT job_id, status, waits_for, unique_key, {ENDLESS} AS endless FROM dl_jobs
WHERE job_id = ANY (ARRAY(SELECT job_id FROM dl_jobs WHERE {{where}} AND {{still}} LIMIT ${{limit}}))
  AND {{where}} AND {{still}}
ORDER BY job_id FOR NO KEY UPDATE
"""

WAKES_PROCESS: Final = """
((NOT keyed AND starts_with(task, queue || '.v') AND queue = 'process.' || (args ->> 'type')) IS TRUE)
"""
"""Jobs that wake durable processes, told by what only the database's own function writes: nobody cancels them."""

_LOCK: Final = f"""
SELECT job_id, status, waits_for, unique_key, {ENDLESS} AS endless,
       CASE WHEN {WAKES_PROCESS} THEN (args ->> 'type') || '/' || (args ->> 'process_id') END AS process
FROM dl_jobs WHERE job_id = $1 FOR NO KEY UPDATE
"""

_CANCEL: Final = """
WITH changed AS (
  UPDATE dl_jobs SET status = 'canceled', cancel_requested = true, waits_for = NULL, lease_expires_at = NULL,
                     claimed_by = NULL, finished_at = now()
  WHERE job_id = ANY ($1::uuid[])
  RETURNING job_id, queue, CASE WHEN keyed THEN hashtext(lock_key) END AS lock_hash
), journal AS (
  INSERT INTO dl_job_events (job_id, queue, kind, payload)
  SELECT job_id, queue, 'canceled', jsonb_build_object('reason', 'operator', 'by', $2::text) FROM changed
)
SELECT job_id, lock_hash FROM changed
"""

_REQUEST_CANCEL: Final = "UPDATE dl_jobs SET cancel_requested = true WHERE job_id = ANY ($1::uuid[])"

_REVIVE: Final = """
WITH changed AS (
  UPDATE dl_jobs SET status = 'queued', available_at = now(), waits_for = NULL,
                     waits_on = CASE WHEN when_failed IS NOT NULL THEN '00000000-0000-0000-0000-000000000000'::uuid END,
                     wanted_at = NULL, attempt = 0, crashes = 0, refunds = 0,
                     cancel_requested = false, claimed_by = NULL, lease_expires_at = NULL, heartbeat_at = NULL,
                     started_at = NULL, finished_at = NULL, result = NULL, error = NULL
  WHERE job_id = ANY ($1::uuid[])
  RETURNING job_id, queue
)
INSERT INTO dl_job_events (job_id, queue, kind, payload)
SELECT job_id, queue, 'requeue', jsonb_build_object('reason', 'operator', 'by', $2::text) FROM changed
"""

# The trigger takes the key from a job that comes back, since nobody's UPDATE may fail: here it may.
_REVIVE_UNIQUE: Final = """
UPDATE dl_jobs j SET unique_key = u.unique_key
FROM unnest($1::uuid[], $2::text[]) AS u (job_id, unique_key) WHERE j.job_id = ANY (ARRAY[u.job_id])
"""
PLACE_IS_FREE: Final = """
(unique_key IS NULL OR NOT EXISTS (
  SELECT FROM dl_jobs n
  WHERE n.unique_key = dl_jobs.unique_key AND n.status IN ('queued', 'running') AND n.superseded_by IS NULL))
"""
"""Of many jobs that are retried those of whose unique key no job waits or runs."""

TO_CANCEL: Final = f"((NOT (status = 'running' AND cancel_requested) OR {ENDLESS}) AND NOT {WAKES_PROCESS})"
"""Of many jobs that are canceled those that were not asked before, and wake no process."""

_SET_PRIORITY: Final = "UPDATE dl_jobs SET priority = $2 WHERE job_id = ANY ($1::uuid[])"

_RUN_NOW: Final = """
UPDATE dl_jobs SET available_at = least(available_at, now()), waits_for = CASE waits_for WHEN 'lock' THEN 'lock' END
WHERE job_id = ANY ($1::uuid[])
"""

_PAUSE: Final = """
INSERT INTO dl_queues (queue, paused, changed_by) VALUES ($1, $2, $3)
ON CONFLICT (queue) DO UPDATE SET
  changed_at = CASE WHEN dl_queues.paused = excluded.paused THEN dl_queues.changed_at ELSE now() END,
  changed_by = CASE WHEN dl_queues.paused = excluded.paused THEN dl_queues.changed_by ELSE excluded.changed_by END,
  paused = excluded.paused
"""

_AUDIT: Final = "INSERT INTO dl_audit (actor, action, job_id, detail) VALUES ($1, $2, $3, $4)"


@attrs.frozen
class _Action:
    """Something done to jobs of some statuses: its name in the audit, its statement (jobs first, then its value).

    `still` says of a job that it would be changed: those that would not are none of many. `{value}` is the value there.
    """

    name: str
    allowed: frozenset[Status]
    sql: str
    still: str


TO_SET_PRIORITY: Final = _Action("set_priority", frozenset({Status.QUEUED}), _SET_PRIORITY, "priority <> {value}")
TO_RUN_NOW: Final = _Action("run_now", frozenset({Status.QUEUED}), _RUN_NOW, "waits_for = 'time'")
_TO_POSTPONE: Final = _Action(
    "postpone",
    frozenset({Status.QUEUED}),
    "UPDATE dl_jobs SET available_at = $2 WHERE job_id = ANY ($1::uuid[])",
    "true",
)


async def cancel(database: Database, job_id: UUID, operator: Operator) -> JobRecord:
    """Cancel the job (Q4): at once if it is queued; if it runs, ask for it; if it has ended, leave it as it is.

    At once, too, if it runs with a lease that never ends and nobody renews it. Raises `JobNotFound`, and `Conflict` for
    the job of a durable process.
    """
    job, lock_hashes = await database.write(_aio_cancel, job_id, operator)
    await unpark(database, lock_hashes)
    return job


async def cancel_many(database: Database, job_filter: JobFilter, operator: Operator, *, limit: int = 1_000) -> int:
    """Cancel at most `limit` queued and running jobs that the filter means; how many there were comes back.

    Jobs that were asked before are not counted again, so a caller that wants all repeats until 0. Jobs that wake
    durable processes are left out. Raises `BadRequest` for a `limit` that is not allowed.
    """
    check_between("limit", limit, 1, MAX_BULK)
    count, lock_hashes = await database.write(_aio_cancel_many, job_filter, operator, limit)
    await unpark(database, lock_hashes)
    return count


async def retry(database: Database, job_id: UUID, operator: Operator, *, force: bool = False) -> JobRecord:
    """Queue a failed, canceled or lost job again as if it were new, but for its progress.

    With `force` also a running job whose lease never ends and that nobody has renewed: it is canceled first. If some
    service runs it all the same, its body may run twice.

    Raises `Conflict` for a job with another status, `JobNotFound`.
    """
    job, lock_hashes = await database.write(_aio_retry, job_id, operator, force=force)
    await unpark(database, lock_hashes)
    return job


async def retry_many(database: Database, job_filter: JobFilter, operator: Operator, *, limit: int = 1_000) -> int:
    """Queue at most `limit` failed, canceled and lost jobs that the filter means again; how many there were comes back.

    Raises `BadRequest` for a `limit` that is not allowed.
    """
    check_between("limit", limit, 1, MAX_BULK)
    return await database.write(_aio_retry_many, job_filter, operator, limit)


async def set_priority(database: Database, job_id: UUID, priority: int, operator: Operator) -> JobRecord:
    """Give a queued job another priority; the smallest runs first (R1).

    Raises `BadRequest` for a priority that is not allowed, `Conflict` for a job that is not queued, `JobNotFound`.
    """
    check_between("priority", priority, 0, MAX_INT)
    return await database.write(_aio_act, job_id, TO_SET_PRIORITY, operator, priority=priority)


async def run_now(database: Database, job_id: UUID, operator: Operator) -> JobRecord:
    """Make a queued job due at once. One that waits for its lock_key or its limits goes on waiting for them.

    Raises `Conflict` for a job that is not queued, `JobNotFound`.
    """
    return await database.write(_aio_act, job_id, TO_RUN_NOW, operator)


async def postpone(database: Database, job_id: UUID, until: datetime, operator: Operator) -> JobRecord:
    """Let a queued job wait until an instant: what takes a `run_now` back. Raises as that does."""
    return await database.write(_aio_act, job_id, _TO_POSTPONE, operator, until=until)


async def set_priority_many(
    database: Database, job_filter: JobFilter, priority: int, operator: Operator, *, limit: int = 1_000
) -> int:
    """Give at most `limit` queued jobs that the filter means another priority; how many there were comes back.

    Jobs that have it are not counted. Raises `BadRequest` for a priority or a `limit` that is not allowed.
    """
    check_between("priority", priority, 0, MAX_INT)
    check_between("limit", limit, 1, MAX_BULK)
    return await database.write(_aio_act_many, job_filter, TO_SET_PRIORITY, operator, limit, priority=priority)


async def run_now_many(database: Database, job_filter: JobFilter, operator: Operator, *, limit: int = 1_000) -> int:
    """Make at most `limit` jobs due that the filter means and that wait for their time; how many there were comes back.

    Raises `BadRequest` for a `limit` that is not allowed.
    """
    check_between("limit", limit, 1, MAX_BULK)
    return await database.write(_aio_act_many, job_filter, TO_RUN_NOW, operator, limit)


async def pause(database: Database, queue: str, operator: Operator) -> None:
    """Let no worker claim from the queue, in any process, until it is resumed. What runs goes on.

    Raises `BadRequest` for a name that is not allowed; the queue need not have jobs.
    """
    check_name("queue", queue, MAX_NAME)
    await database.write(_aio_pause, queue, operator, paused=True)


async def resume(database: Database, queue: str, operator: Operator) -> None:
    """End the queue's pause and wake its workers. Raises `BadRequest` for a name that is not allowed."""
    check_name("queue", queue, MAX_NAME)
    await database.write(_aio_pause, queue, operator, paused=False)


async def _aio_lock(connection: Any, job_id: UUID) -> Any:
    row = await connection.fetchrow(_LOCK, job_id)
    if row is None:
        raise JobNotFound(f"no job has the id {job_id}")
    return row


async def _aio_lock_many(
    connection: Any, job_filter: JobFilter, statuses: frozenset[Status], still: str, limit: int, *value: object
) -> list[Any]:
    wanted = statuses if job_filter.status is None else statuses & job_filter.status
    where, values = condition(attrs.evolve(job_filter, status=wanted))
    still = still.format(value=f"${len(values) + 2}")
    sql = _LOCK_MANY.format(where=where, still=still, limit=len(values) + 1)
    return list(await connection.fetch(sql, *values, limit, *value))


@asynccontextmanager
async def aio_short_transaction(connection: Any) -> AsyncIterator[None]:
    """A transaction that waits for a row or table that somebody has locked, but not for long: others need the pool."""
    async with connection.transaction():
        await connection.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
        yield


async def _aio_cancel(connection: Any, job_id: UUID, operator: Operator) -> tuple[JobRecord, list[int]]:
    async with aio_short_transaction(connection):
        row = await _aio_lock(connection, job_id)
        if row["process"] is not None and row["status"] in OPEN:
            message = f"it wakes the process {row['process']}: stop its step, or remove the process"
            raise Conflict(job_id, row["status"], message)
        lock_hashes = await aio_end(connection, [row], operator)
        await aio_audit(connection, operator, "cancel", job_id, {"was": row["status"]})
        return await aio_get_job(connection, job_id), lock_hashes


async def _aio_cancel_many(
    connection: Any, job_filter: JobFilter, operator: Operator, limit: int
) -> tuple[int, list[int]]:
    async with aio_short_transaction(connection):
        rows = await _aio_lock_many(connection, job_filter, OPEN, TO_CANCEL, limit)
        lock_hashes = await aio_end(connection, rows, operator)
        asked = sum(_is_held(row) for row in rows)
        counts = {"canceled": len(rows) - asked, "cancel_requested": asked}
        await aio_audit(connection, operator, "cancel_many", None, _bulk_detail(job_filter, limit) | counts)
        return len(rows), lock_hashes


async def aio_end(connection: Any, rows: list[Any], operator: Operator) -> list[int]:
    """Cancel the locked rows as their status allows; who did it is in their journals (asyncio-flavoured).

    Returns the hashes of the keys that may have lost their next job.
    """
    blocking = {row["job_id"] for row in rows if row["waits_for"] is None}
    nobodys = [row["job_id"] for row in rows if row["status"] == Status.QUEUED or row["endless"]]
    held = [row["job_id"] for row in rows if _is_held(row)]
    ended = await connection.fetch(_CANCEL, nobodys, operator.name) if nobodys else []
    if held:
        await connection.execute(_REQUEST_CANCEL, held)
    return sorted({row["lock_hash"] for row in ended if row["lock_hash"] is not None and row["job_id"] in blocking})


def _is_held(row: Any) -> bool:
    """Whether somebody runs the job, and has to be asked."""
    return row["status"] == Status.RUNNING and not row["endless"]


async def _aio_retry(connection: Any, job_id: UUID, operator: Operator, *, force: bool) -> tuple[JobRecord, list[int]]:
    async with aio_short_transaction(connection):
        row = await _aio_lock(connection, job_id)
        lock_hashes: list[int] = []
        if row["endless"] and force:
            lock_hashes = await aio_end(connection, [row], operator)
        elif row["endless"]:
            raise Conflict(job_id, row["status"], "its lease never ends: cancel it, or retry it with force")
        elif row["status"] not in REVIVABLE:
            raise _not_allowed("retry", row, REVIVABLE)
        try:
            await aio_revive(connection, [row], operator)
        except TAKEN as error:
            message = "a newer job of its unique key waits or runs, and does what it would do"
            raise Conflict(job_id, row["status"], message) from error
        await aio_audit(
            connection, operator, "retry", job_id, {"was": row["status"]} | ({"force": True} if force else {})
        )
        return await aio_get_job(connection, job_id), lock_hashes


def _not_allowed(action: str, row: Any, allowed: frozenset[Status]) -> Conflict:
    return Conflict(row["job_id"], row["status"], f"{action} is for jobs that are {' or '.join(sorted(allowed))}")


async def _aio_retry_many(connection: Any, job_filter: JobFilter, operator: Operator, limit: int) -> int:
    async with aio_short_transaction(connection):
        rows = await _aio_lock_many(connection, job_filter, REVIVABLE, PLACE_IS_FREE, limit)
        rows = newest_of_keys(rows)
        await aio_revive(connection, rows, operator)
        detail = _bulk_detail(job_filter, limit) | {"retried": len(rows)}
        await aio_audit(connection, operator, "retry_many", None, detail)
        return len(rows)


def newest_of_keys(rows: list[Any]) -> list[Any]:
    """Of locked rows of one unique key the newest alone: by its id, which tells its time."""
    newest: dict[str, UUID] = {}
    for row in rows:
        if row["unique_key"] is not None:
            newest[row["unique_key"]] = max(newest.get(row["unique_key"], row["job_id"]), row["job_id"])
    return [row for row in rows if row["unique_key"] is None or newest[row["unique_key"]] == row["job_id"]]


async def aio_revive(connection: Any, rows: list[Any], operator: Operator) -> None:
    """Queue ended jobs again, whose locked rows have `job_id` and `unique_key` (asyncio-flavoured).

    Who did it is in their journals.
    """
    await connection.execute(_REVIVE, [row["job_id"] for row in rows], operator.name)
    keys = {row["job_id"]: row["unique_key"] for row in rows if row["unique_key"] is not None}
    if keys:
        await connection.execute(_REVIVE_UNIQUE, list(keys), list(keys.values()))


async def _aio_act(connection: Any, /, job_id: UUID, action: _Action, operator: Operator, **values: Any) -> JobRecord:
    """Do one action to one job if its status allows it. `values`, in the statement's order, go into the log by name."""
    async with aio_short_transaction(connection):
        row = await _aio_lock(connection, job_id)
        if row["status"] not in action.allowed:
            raise _not_allowed(action.name, row, action.allowed)
        if action is TO_RUN_NOW and row["waits_for"] == WaitsFor.AFTER:
            raise Conflict(job_id, row["status"], "it runs after others, which have not all ended: it can't run now")
        await connection.execute(action.sql, [job_id], *values.values())
        await aio_audit(connection, operator, action.name, job_id, {"was": row["status"]} | values)
        return await aio_get_job(connection, job_id)


async def _aio_act_many(
    connection: Any, /, job_filter: JobFilter, action: _Action, operator: Operator, limit: int, **values: Any
) -> int:
    async with aio_short_transaction(connection):
        rows = await _aio_lock_many(connection, job_filter, action.allowed, action.still, limit, *values.values())
        if rows:
            await connection.execute(action.sql, [row["job_id"] for row in rows], *values.values())
        detail = _bulk_detail(job_filter, limit) | values | {"changed": len(rows)}
        await aio_audit(connection, operator, f"{action.name}_many", None, detail)
        return len(rows)


async def _aio_pause(connection: Any, queue: str, operator: Operator, *, paused: bool) -> None:
    async with aio_short_transaction(connection):
        await connection.execute(_PAUSE, queue, paused, operator.name)
        if not paused:
            await connection.execute("SELECT pg_notify('dl_jobs', $1)", queue)
        await aio_audit(connection, operator, "pause" if paused else "resume", None, {"queue": queue})


def _bulk_detail(job_filter: JobFilter, limit: int) -> dict[str, Any]:
    return {"filter": job_filter.criteria(), "limit": limit}


async def aio_audit(
    connection: Any, operator: Operator, action: str, job_id: UUID | None, detail: dict[str, Any]
) -> None:
    """Write what an operator does, in the transaction that does it (asyncio-flavoured)."""
    if operator.request_id is not None:
        detail = detail | {"request_id": operator.request_id}
    await connection.execute(_AUDIT, operator.name, action, job_id, mask(detail))
