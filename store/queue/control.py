"""Actions of operators on jobs and queues: cancel, retry, set priority, run now, pause, resume (Q4, R1, R2).

web/, the command line and the supervisor call this module. Each action writes its row of dl_audit in the same
transaction, also if it found nothing to change. The job's row is locked before its status is checked, so that a finish,
a claim or another action happens before or after, never in between. The transitions are those of jobs/states.py. A
running job is not ended here: a cancel is requested, and its worker answers. The exception is a running job whose lease
never ends and that no worker renews (`ENDLESS`): it has no worker, and is ended here.
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
from dataloader.jobs.load_jobs import ONE_JOB_QUEUE, command_again
from dataloader.jobs.model import MAX_INT, MAX_NAME, JobRecord, check_between, check_name
from dataloader.jobs.secrets.masking import mask
from dataloader.jobs.states import TRANSITIONS, Status, Step, WaitsFor
from dataloader.jobs.text import stored_json
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.error_meanings import TAKEN
from dataloader.store.queue.job_filters import condition
from dataloader.store.queue.leases import ENDLESS
from dataloader.store.queue.make_ready import unpark
from dataloader.store.queue.reads import aio_get_job

LOCK_TIMEOUT_MS: Final = 2_000

OPEN: Final = frozenset({Status.QUEUED, Status.RUNNING})
REVIVABLE: Final = frozenset(status for status, step in TRANSITIONS if step is Step.REVIVE)

# JobFilter builds {where} from constants. The newest version of each row is checked again once it is locked.
_LOCK_MANY: Final = f"""
SELECT job_id, status, waits_for, unique_key, {ENDLESS} AS endless FROM dl_jobs
WHERE job_id = ANY (ARRAY(SELECT job_id FROM dl_jobs WHERE {{where}} AND {{still}} LIMIT ${{limit}}))
  AND {{where}} AND {{still}}
ORDER BY job_id FOR NO KEY UPDATE
"""

WAKES_PROCESS: Final = """
((NOT keyed AND starts_with(task, queue || '.v') AND queue = 'process.' || (args ->> 'type')) IS TRUE)
"""
"""Jobs that wake durable processes, recognized by values that only the database function writes. None is canceled."""

_LOCK: Final = f"""
SELECT job_id, status, waits_for, unique_key, queue, task, lock_key, args::text AS args, {ENDLESS} AS endless,
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

# The trigger clears the key of a job that is queued again, since an UPDATE must not fail there; here it may.
_REVIVE_UNIQUE: Final = """
UPDATE dl_jobs j SET unique_key = u.unique_key
FROM unnest($1::uuid[], $2::text[]) AS u (job_id, unique_key) WHERE j.job_id = ANY (ARRAY[u.job_id])
"""
PLACE_IS_FREE: Final = """
(unique_key IS NULL OR NOT EXISTS (
  SELECT FROM dl_jobs n
  WHERE n.unique_key = dl_jobs.unique_key AND n.status IN ('queued', 'running') AND n.superseded_by IS NULL))
"""
"""Condition of a retry: no job with the same unique key waits or runs."""
TO_RETRY: Final = f"(NOT starts_with(queue, '{ONE_JOB_QUEUE}') AND {PLACE_IS_FREE})"
"""Condition of a bulk retry: the job would run, and replaces no newer one."""

TO_CANCEL: Final = f"((NOT (status = 'running' AND cancel_requested) OR {ENDLESS}) AND NOT {WAKES_PROCESS})"
"""Condition of a bulk cancel: the job has no cancel request yet, and wakes no process."""

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
    """Action on jobs with a status in `allowed`.

    Attributes:
        name: its name in the audit.
        allowed: statuses of the jobs that it may change.
        sql: its statement; the first parameter is the list of jobs, the second one the value.
        still: condition for jobs that it would change, for bulk operations; `{value}` stands for the value.
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
    """Cancel a queued job immediately, or request the cancel of a running one (Q4). An ended job stays as it is.

    A running job whose lease never ends and that no worker renews is canceled immediately. Raises `JobNotFound`, and
    `Conflict` for the job of a durable process.
    """
    job, lock_hashes = await database.write(_aio_cancel_job, job_id, operator)
    await unpark(database, lock_hashes)
    return job


async def cancel_many(database: Database, job_filter: JobFilter, operator: Operator, *, limit: int = 1_000) -> int:
    """Cancel at most `limit` queued and running jobs that match the filter; return their number.

    Jobs with an earlier cancel request are not counted, so a caller can repeat until the result is 0. Jobs that wake
    durable processes are left out. Raises `BadRequest` if `limit` is not allowed.
    """
    check_between("limit", limit, 1, MAX_BULK)
    count, lock_hashes = await database.write(_aio_cancel_many, job_filter, operator, limit)
    await unpark(database, lock_hashes)
    return count


async def retry(database: Database, job_id: UUID, operator: Operator, *, force: bool = False) -> JobRecord:
    """Queue a failed, canceled or lost job again as if it were new, but for its progress.

    With `force`, also retry a running job whose lease never ends and that no worker has renewed: it is canceled first.
    If a service runs it nevertheless, its handler may run twice.

    Raises `JobNotFound`, and `Conflict` for a job with another status, or of a command that has ended.
    """
    job, lock_hashes = await database.write(_aio_retry, job_id, operator, force=force)
    await unpark(database, lock_hashes)
    return job


async def retry_many(database: Database, job_filter: JobFilter, operator: Operator, *, limit: int = 1_000) -> int:
    """Queue at most `limit` failed, canceled and lost jobs that match the filter again; return their number.

    Raises `BadRequest` if `limit` is not allowed.
    """
    check_between("limit", limit, 1, MAX_BULK)
    return await database.write(_aio_retry_many, job_filter, operator, limit)


async def set_priority(database: Database, job_id: UUID, priority: int, operator: Operator) -> JobRecord:
    """Change the priority of a queued job; the smallest runs first (R1).

    Raises `BadRequest` if the priority is not allowed, `Conflict` if the job is not queued, `JobNotFound`.
    """
    check_between("priority", priority, 0, MAX_INT)
    return await database.write(_aio_act, job_id, TO_SET_PRIORITY, operator, priority=priority)


async def run_now(database: Database, job_id: UUID, operator: Operator) -> JobRecord:
    """Make a queued job due now. A job that is blocked by its lock key or a limit stays blocked.

    Raises `Conflict` if the job is not queued, `JobNotFound`.
    """
    return await database.write(_aio_act, job_id, TO_RUN_NOW, operator)


async def postpone(database: Database, job_id: UUID, until: datetime, operator: Operator) -> JobRecord:
    """Make a queued job wait until `until`, which reverses a `run_now`. Raises the errors of `run_now`."""
    return await database.write(_aio_act, job_id, _TO_POSTPONE, operator, until=until)


async def set_priority_many(
    database: Database, job_filter: JobFilter, priority: int, operator: Operator, *, limit: int = 1_000
) -> int:
    """Change the priority of at most `limit` queued jobs that match the filter; return their number.

    Jobs that have the priority already are not counted. Raises `BadRequest` if the priority or `limit` is not allowed.
    """
    check_between("priority", priority, 0, MAX_INT)
    check_between("limit", limit, 1, MAX_BULK)
    return await database.write(_aio_act_many, job_filter, TO_SET_PRIORITY, operator, limit, priority=priority)


async def run_now_many(database: Database, job_filter: JobFilter, operator: Operator, *, limit: int = 1_000) -> int:
    """Make at most `limit` jobs due that match the filter and wait for their time; return their number.

    Raises `BadRequest` if `limit` is not allowed.
    """
    check_between("limit", limit, 1, MAX_BULK)
    return await database.write(_aio_act_many, job_filter, TO_RUN_NOW, operator, limit)


async def pause(database: Database, queue: str, operator: Operator) -> None:
    """Stop all claims from the queue, in all processes, until it is resumed. Running jobs continue.

    The queue need not have jobs. Raises `BadRequest` if the name is not allowed.
    """
    check_name("queue", queue, MAX_NAME)
    await database.write(_aio_pause_queue, queue, operator, paused=True)


async def resume(database: Database, queue: str, operator: Operator) -> None:
    """End the queue's pause and wake its workers. Raises `BadRequest` if the name is not allowed."""
    check_name("queue", queue, MAX_NAME)
    await database.write(_aio_pause_queue, queue, operator, paused=False)


async def _aio_lock_job(connection: Any, job_id: UUID) -> Any:
    row = await connection.fetchrow(_LOCK, job_id)
    if row is None:
        raise JobNotFound(f"no job has the ID {job_id}")
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
    """Open a transaction that waits only briefly for locked rows and tables, since other callers need the pool."""
    async with connection.transaction():
        await connection.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
        yield


async def _aio_cancel_job(connection: Any, job_id: UUID, operator: Operator) -> tuple[JobRecord, list[int]]:
    async with aio_short_transaction(connection):
        row = await _aio_lock_job(connection, job_id)
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
    """Cancel the locked rows as their status allows, and record the operator in their histories (asyncio-flavored).

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
    """Return whether a worker runs the job, so that its cancel must be requested."""
    return row["status"] == Status.RUNNING and not row["endless"]


async def _aio_retry(connection: Any, job_id: UUID, operator: Operator, *, force: bool) -> tuple[JobRecord, list[int]]:
    async with aio_short_transaction(connection):
        row = await _aio_lock_job(connection, job_id)
        lock_hashes: list[int] = []
        if row["endless"] and force:
            lock_hashes = await aio_end(connection, [row], operator)
        elif row["endless"]:
            raise Conflict(job_id, row["status"], "its lease never expires; cancel it, or retry it with force")
        elif row["status"] not in REVIVABLE:
            raise _not_allowed("retry", row, REVIVABLE)
        if row["queue"].startswith(ONE_JOB_QUEUE):
            again = command_again(row["task"], row["lock_key"], stored_json(row["args"]))
            raise Conflict(
                job_id,
                row["status"],
                "its command has ended, and no process serves its queue, so a retry would wait forever; start a new run"
                f" with `{again}`",
            )
        try:
            await aio_revive_jobs(connection, [row], operator)
        except TAKEN as error:
            message = "a newer job of its unique key is queued or running, and replaces it"
            raise Conflict(job_id, row["status"], message) from error
        await aio_audit(
            connection, operator, "retry", job_id, {"was": row["status"]} | ({"force": True} if force else {})
        )
        return await aio_get_job(connection, job_id), lock_hashes


def _not_allowed(action: str, row: Any, allowed: frozenset[Status]) -> Conflict:
    return Conflict(
        row["job_id"], row["status"], f"{action} needs a job with the status {' or '.join(sorted(allowed))}"
    )


async def _aio_retry_many(connection: Any, job_filter: JobFilter, operator: Operator, limit: int) -> int:
    async with aio_short_transaction(connection):
        rows = await _aio_lock_many(connection, job_filter, REVIVABLE, TO_RETRY, limit)
        rows = newest_of_keys(rows)
        await aio_revive_jobs(connection, rows, operator)
        detail = _bulk_detail(job_filter, limit) | {"retried": len(rows)}
        await aio_audit(connection, operator, "retry_many", None, detail)
        return len(rows)


def newest_of_keys(rows: list[Any]) -> list[Any]:
    """Return only the newest of locked rows with the same unique key, by its ID, which contains its time."""
    newest: dict[str, UUID] = {}
    for row in rows:
        if row["unique_key"] is not None:
            newest[row["unique_key"]] = max(newest.get(row["unique_key"], row["job_id"]), row["job_id"])
    return [row for row in rows if row["unique_key"] is None or newest[row["unique_key"]] == row["job_id"]]


async def aio_revive_jobs(connection: Any, rows: list[Any], operator: Operator) -> None:
    """Queue ended jobs again and record the operator in their histories (asyncio-flavored).

    `rows` are locked, and have `job_id` and `unique_key`.
    """
    await connection.execute(_REVIVE, [row["job_id"] for row in rows], operator.name)
    keys = {row["job_id"]: row["unique_key"] for row in rows if row["unique_key"] is not None}
    if keys:
        await connection.execute(_REVIVE_UNIQUE, list(keys), list(keys.values()))


async def _aio_act(connection: Any, /, job_id: UUID, action: _Action, operator: Operator, **values: Any) -> JobRecord:
    """Apply one action to a job if its status allows it. `values`, in the statement's order, are audited by name."""
    async with aio_short_transaction(connection):
        row = await _aio_lock_job(connection, job_id)
        if row["status"] not in action.allowed:
            raise _not_allowed(action.name, row, action.allowed)
        if action is TO_RUN_NOW and row["waits_for"] == WaitsFor.AFTER:
            raise Conflict(job_id, row["status"], "it depends on other jobs that have not ended")
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


async def _aio_pause_queue(connection: Any, queue: str, operator: Operator, *, paused: bool) -> None:
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
    """Record an operator's action in the audit, in the transaction of the action (asyncio-flavored)."""
    if operator.request_id is not None:
        detail = detail | {"request_id": operator.request_id}
    await connection.execute(_AUDIT, operator.name, action, job_id, mask(detail))
