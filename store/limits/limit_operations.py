"""Implementations of the operations on limits over the database.

Suppliers are locked before tasks, in the same order as when a program declares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dataloader.jobs.contract import MAX_BULK, Operator
from dataloader.jobs.errors import BadRequest, InUse
from dataloader.jobs.limits import stored_limits
from dataloader.jobs.listings import MAX_PAGE, JobFilter
from dataloader.jobs.model import check_between
from dataloader.jobs.operations.limits import (
    ChangedTasks,
    GetSupplier,
    GetTask,
    ListSuppliers,
    ListTasks,
    PauseSupplier,
    PauseTask,
    RemoveSupplier,
    RemoveTask,
    ResumeSupplier,
    ResumeTask,
    SetSupplier,
    SetTask,
    SetTasks,
)
from dataloader.jobs.page_cursor import BY_NAME
from dataloader.jobs.states import Status
from dataloader.jobs.supplier_listings import SupplierNotFound, SupplierPage, SupplierRecord
from dataloader.jobs.task_listings import OpenJobs, TaskNotFound, TaskPage, TaskState
from dataloader.store.implementations import Store, implements
from dataloader.store.limits.limit_reads import aio_supplier, aio_suppliers, aio_task_state
from dataloader.store.limits.limit_rows import TELL, aio_limit_supplier, aio_limit_task, aio_open_lane
from dataloader.store.queue.control import aio_audit, aio_short_transaction, cancel_many
from dataloader.store.queue.name_pages import page_of_tasks

_TASK: Final = """
SELECT task, coalesce(limits, '{}')::text AS limits, coalesce(override, '{}')::text AS override, limited
FROM dl_tasks WHERE task = $1 FOR NO KEY UPDATE
"""
_SUPPLIER: Final = """
SELECT source, coalesce(limits, '{}')::text AS limits, coalesce(override, '{}')::text AS override
FROM dl_sources WHERE source = $1 FOR NO KEY UPDATE
"""
_ADD_SUPPLIER: Final = "INSERT INTO dl_sources (source) VALUES ($1) ON CONFLICT DO NOTHING"
_NAMED: Final = """
SELECT source FROM dl_sources
WHERE source = ANY ($1::text[])
   OR source IN (SELECT t.supplier FROM dl_tasks t WHERE t.task = ANY ($2::text[]))
ORDER BY source FOR SHARE
"""
_OF_SUPPLIER: Final = "SELECT task FROM dl_tasks WHERE supplier = $1 ORDER BY task LIMIT 5"
_PAUSE_TASK: Final = """
UPDATE dl_tasks SET
  paused_at = CASE WHEN NOT $2 THEN NULL WHEN paused THEN paused_at ELSE now() END,
  paused_by = CASE WHEN NOT $2 THEN NULL WHEN paused THEN paused_by ELSE $3 END,
  paused = $2
WHERE task = $1
"""
_PAUSE_SUPPLIER: Final = "UPDATE dl_sources SET paused = $2 WHERE source = $1"
_OPEN_JOBS: Final = (
    "SELECT count(*) FROM (SELECT FROM dl_jobs WHERE task = $1 AND status IN ('queued', 'running') LIMIT 1000) AS open"
)
# The kept jobs are ready, and all claims skip them until a process declares the task again.
_KEEP: Final = (
    "UPDATE dl_jobs SET waits_for = NULL, lane = NULL WHERE lane = $1 AND status = 'queued' AND waits_for = 'limit'"
)
_KEEP_OTHERS: Final = "UPDATE dl_jobs SET lane = NULL WHERE lane = $1 AND status IN ('queued', 'running')"


@implements(ListTasks)
async def _list_declared_tasks(store: Store, request: ListTasks) -> TaskPage:
    return await page_of_tasks(store.database, limit=request.limit, after=request.after)


@implements(GetTask)
async def _get_task(store: Store, request: GetTask) -> TaskState:
    return await store.database.run(aio_task_state, request.task)


@implements(SetTask)
async def _set_task(store: Store, request: SetTask) -> TaskState:
    [found] = await store.database.write(_aio_set_tasks, {request.task: request.given()}, store.operator)
    return found


@implements(SetTasks)
async def _set_tasks(store: Store, request: SetTasks) -> ChangedTasks:
    changes = {one.task: one.given() for one in request.tasks}
    if len(changes) < len(request.tasks):
        raise BadRequest("tasks", "must have each task once")
    return ChangedTasks(await store.database.write(_aio_set_tasks, changes, store.operator))


@implements(RemoveTask)
async def _remove_task(store: Store, request: RemoveTask) -> TaskState:
    if request.jobs not in {None, "keep", "cancel"}:
        raise BadRequest("jobs", f"must be keep or cancel, not {request.jobs!r:.60}")
    await store.database.run(aio_task_state, request.task)
    if request.jobs == "cancel":
        # Jobs that are added in the meantime wait for a process that declares the task.
        open_jobs = JobFilter(task=request.task, status=frozenset({Status.QUEUED, Status.RUNNING}))
        while await cancel_many(store.database, open_jobs, store.operator, limit=MAX_BULK):
            pass
    return await store.database.write(_aio_remove_task, request.task, request.jobs, store.operator)


@implements(PauseTask)
async def _pause_task(store: Store, request: PauseTask) -> TaskState:
    return await store.database.write(_aio_pause_task, request.task, store.operator, paused=True)


@implements(ResumeTask)
async def _resume_task(store: Store, request: ResumeTask) -> TaskState:
    return await store.database.write(_aio_pause_task, request.task, store.operator, paused=False)


@implements(ListSuppliers)
async def _list_suppliers(store: Store, request: ListSuppliers) -> SupplierPage:
    check_between("limit", request.limit, 1, MAX_PAGE)
    behind = "" if request.after is None else BY_NAME.key(request.after)
    found = await store.database.run(aio_suppliers, behind, request.limit + 1)
    return SupplierPage(*BY_NAME.page(found, request.limit, lambda one: one.supplier))


@implements(GetSupplier)
async def _get_supplier(store: Store, request: GetSupplier) -> SupplierRecord:
    return await store.database.run(aio_supplier, request.supplier)


@implements(SetSupplier)
async def _set_supplier(store: Store, request: SetSupplier) -> SupplierRecord:
    return await store.database.write(_aio_set_supplier, request.supplier, request.given(), store.operator)


@implements(PauseSupplier)
async def _pause_supplier(store: Store, request: PauseSupplier) -> SupplierRecord:
    return await store.database.write(_aio_pause_supplier, request.supplier, store.operator, paused=True)


@implements(ResumeSupplier)
async def _resume_supplier(store: Store, request: ResumeSupplier) -> SupplierRecord:
    return await store.database.write(_aio_pause_supplier, request.supplier, store.operator, paused=False)


@implements(RemoveSupplier)
async def _remove_supplier(store: Store, request: RemoveSupplier) -> SupplierRecord:
    return await store.database.write(_aio_remove_supplier, request.supplier, store.operator)


def _overridden(stored: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the override with the changes applied; None removes a field."""
    override = {**stored_limits(stored), **changes}
    return {name: value for name, value in override.items() if value is not None}


async def _aio_locked_task(connection: Any, name: str) -> Any:
    record = await connection.fetchrow(_TASK, name)
    if record is None:
        raise TaskNotFound(f"no process has declared a task {name!r:.200}")
    return record


async def _aio_locked_supplier(connection: Any, name: str) -> Any:
    record = await connection.fetchrow(_SUPPLIER, name)
    if record is None:
        raise SupplierNotFound(f"no supplier has the name {name!r:.200}")
    return record


async def _aio_set_tasks(
    connection: Any, changes: Mapping[str, Mapping[str, Any]], operator: Operator
) -> list[TaskState]:
    plain = {name: changes[name] for name in sorted(changes)}
    wanted = {one["supplier"] for one in plain.values() if one.get("supplier") is not None}
    async with aio_short_transaction(connection):
        there = {record["source"] for record in await connection.fetch(_NAMED, sorted(wanted), list(plain))}
        for supplier in sorted(wanted - there):
            raise BadRequest("supplier", f"must be the name of a known supplier, not {supplier!r:.200}")
        for name, change in plain.items():
            found = await _aio_locked_task(connection, name)
            override = _overridden(found["override"], change)
            declared = stored_limits(found["limits"])
            await aio_limit_task(connection, name, declared, override, limited=found["limited"])
            await aio_audit(connection, operator, "set_task", None, {"task": name, "changes": change})
        await connection.execute(TELL)
        return [await aio_task_state(connection, name) for name in changes]


async def _aio_pause_task(connection: Any, name: str, operator: Operator, *, paused: bool) -> TaskState:
    async with aio_short_transaction(connection):
        found = await _aio_locked_task(connection, name)
        await connection.execute(_PAUSE_TASK, name, paused, operator.name)
        if paused and not found["limited"]:
            await aio_open_lane(connection, name)
        await connection.execute(TELL)
        await aio_audit(connection, operator, "pause_task" if paused else "resume_task", None, {"task": name})
        return await aio_task_state(connection, name)


async def _aio_remove_task(connection: Any, name: str, jobs: OpenJobs | None, operator: Operator) -> TaskState:
    async with aio_short_transaction(connection):
        await _aio_locked_task(connection, name)
        if jobs is None and (count := await connection.fetchval(_OPEN_JOBS, name)):
            few = f"{count:,}" if count < 1_000 else "1,000 or more"
            raise InUse(f"{few} jobs of the task {name!r:.200} have not ended; keep or cancel them with `jobs`")
        found = await aio_task_state(connection, name)
        await connection.execute(_KEEP, name)
        await connection.execute(_KEEP_OTHERS, name)
        await connection.execute("DELETE FROM dl_lanes WHERE lane = $1", name)
        await connection.execute("DELETE FROM dl_tasks WHERE task = $1", name)
        await connection.execute(TELL)
        await aio_audit(connection, operator, "remove_task", None, {"task": name, "jobs": jobs})
        return found


async def _aio_set_supplier(
    connection: Any, name: str, changes: Mapping[str, Any], operator: Operator
) -> SupplierRecord:
    async with aio_short_transaction(connection):
        await connection.execute(_ADD_SUPPLIER, name)
        found = await _aio_locked_supplier(connection, name)
        override = _overridden(found["override"], changes)
        await aio_limit_supplier(connection, name, stored_limits(found["limits"]), override)
        await connection.execute(TELL)
        await aio_audit(connection, operator, "set_supplier", None, {"supplier": name, "changes": changes})
        return await aio_supplier(connection, name)


async def _aio_pause_supplier(connection: Any, name: str, operator: Operator, *, paused: bool) -> SupplierRecord:
    async with aio_short_transaction(connection):
        await _aio_locked_supplier(connection, name)
        await connection.execute(_PAUSE_SUPPLIER, name, paused)
        await connection.execute(TELL)
        action = "pause_supplier" if paused else "resume_supplier"
        await aio_audit(connection, operator, action, None, {"supplier": name})
        return await aio_supplier(connection, name)


async def _aio_remove_supplier(connection: Any, name: str, operator: Operator) -> SupplierRecord:
    async with aio_short_transaction(connection):
        await _aio_locked_supplier(connection, name)
        tasks = [record["task"] for record in await connection.fetch(_OF_SUPPLIER, name)]
        if tasks:
            raise InUse(
                f"the supplier {name!r:.200} is used by the tasks {', '.join(tasks)}; remove or change them first"
            )
        found = await aio_supplier(connection, name)
        if found.slot is not None:
            raise InUse(f"a load's request to the supplier {name!r:.200} is in progress; retry when it has ended")
        await connection.execute("DELETE FROM dl_source_calls WHERE source = $1", name)
        await connection.execute("DELETE FROM dl_sources WHERE source = $1", name)
        await connection.execute(TELL)
        await aio_audit(connection, operator, "remove_supplier", None, {"supplier": name})
        return found
