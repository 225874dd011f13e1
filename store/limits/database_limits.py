"""`Limits` over the database: operators' changes of tasks and suppliers at run time.

Suppliers are locked before tasks, as in a program's declaration of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import msgspec

from dataloader.jobs.contract import MAX_BULK, Operator
from dataloader.jobs.errors import BadRequest, InUse
from dataloader.jobs.former_names import renamed
from dataloader.jobs.limit_contract import Limits, OpenJobs, SupplierNotFound, SupplierPage, SupplierRecord
from dataloader.jobs.limits import FORMER_LIMITS, Supplier, TaskLimits, stored_limits
from dataloader.jobs.listings import MAX_PAGE, JobFilter
from dataloader.jobs.model import MAX_NAME, check_between, check_name
from dataloader.jobs.page_cursor import BY_NAME, After
from dataloader.jobs.states import Status
from dataloader.jobs.task_listings import TaskNotFound, TaskPage, TaskState
from dataloader.store.connection.bridge import Database
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


@attrs.frozen(kw_only=True)
class DatabaseLimits(Limits):
    """Limits in the tables of the database, on Trio. `operator` signs the audit."""

    database: Database
    operator: Operator

    def signed(self, operator: Operator) -> DatabaseLimits:
        """Return the same limits for another operator."""
        return attrs.evolve(self, operator=operator)

    async def tasks(self, *, limit: int = 200, after: After = None) -> TaskPage:
        """See `Limits.tasks`."""
        return await page_of_tasks(self.database, limit=limit, after=after)

    async def task(self, name: str) -> TaskState:
        """See `Limits.task`."""
        return await self.database.run(aio_task_state, name)

    async def set_tasks(self, changes: Mapping[str, Mapping[str, Any]]) -> list[TaskState]:
        """See `Limits.set_tasks`."""
        return await self.database.write(_aio_set_tasks, changes, self.operator)

    async def pause_task(self, name: str) -> TaskState:
        """See `Limits.pause_task`."""
        return await self.database.write(_aio_pause_task, name, self.operator, paused=True)

    async def resume_task(self, name: str) -> TaskState:
        """See `Limits.resume_task`."""
        return await self.database.write(_aio_pause_task, name, self.operator, paused=False)

    async def remove_task(self, name: str, *, jobs: OpenJobs | None = None) -> TaskState:
        """See `Limits.remove_task`."""
        if jobs not in {None, "keep", "cancel"}:
            raise BadRequest("jobs", f"must be keep or cancel, not {jobs!r:.60}")
        await self.task(name)
        if jobs == "cancel":
            # Jobs that are added in the meantime wait for a process that declares the task.
            open_jobs = JobFilter(task=name, status=frozenset({Status.QUEUED, Status.RUNNING}))
            while await cancel_many(self.database, open_jobs, self.operator, limit=MAX_BULK):
                pass
        return await self.database.write(_aio_remove_task, name, jobs, self.operator)

    async def suppliers(self, *, limit: int = 200, after: After = None) -> SupplierPage:
        """See `Limits.suppliers`."""
        check_between("limit", limit, 1, MAX_PAGE)
        behind = "" if after is None else BY_NAME.key(after)
        found = await self.database.run(aio_suppliers, behind, limit + 1)
        return SupplierPage(*BY_NAME.page(found, limit, lambda one: one.supplier))

    async def supplier(self, name: str) -> SupplierRecord:
        """See `Limits.supplier`."""
        return await self.database.run(aio_supplier, name)

    async def set_supplier(self, name: str, changes: Mapping[str, Any]) -> SupplierRecord:
        """See `Limits.set_supplier`."""
        check_name("supplier", name, MAX_NAME)
        return await self.database.write(_aio_set_supplier, name, changes, self.operator)

    async def pause_supplier(self, name: str) -> SupplierRecord:
        """See `Limits.pause_supplier`."""
        return await self.database.write(_aio_pause_supplier, name, self.operator, paused=True)

    async def resume_supplier(self, name: str) -> SupplierRecord:
        """See `Limits.resume_supplier`."""
        return await self.database.write(_aio_pause_supplier, name, self.operator, paused=False)

    async def remove_supplier(self, name: str) -> SupplierRecord:
        """See `Limits.remove_supplier`."""
        return await self.database.write(_aio_remove_supplier, name, self.operator)


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
    plain = {name: _known(TaskLimits, changes[name]) for name in sorted(changes)}
    wanted = {one["supplier"] for one in plain.values() if one.get("supplier") is not None}
    async with aio_short_transaction(connection):
        there = {record["source"] for record in await connection.fetch(_NAMED, sorted(wanted), list(plain))}
        for supplier in sorted(wanted - there):
            raise BadRequest("supplier", f"must be the name of a supplier that is known, not {supplier!r:.200}")
        for name, change in plain.items():
            found = await _aio_locked_task(connection, name)
            override = _overridden(found["override"], change)
            declared = stored_limits(found["limits"])
            await aio_limit_task(connection, name, declared, override, limited=found["limited"])
            await aio_audit(connection, operator, "set_task", None, {"task": name, "changes": change})
        await connection.execute(TELL)
        return [await aio_task_state(connection, name) for name in changes]


def _known(kind: type[TaskLimits | Supplier], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes as plain values. Raises `BadRequest` for an unknown limit."""
    names = sorted({field.name for field in attrs.fields(kind)} - {"name"})
    what = "task" if kind is TaskLimits else "supplier"
    for name in changes:
        if kind is Supplier and name in FORMER_LIMITS:
            raise BadRequest(name, renamed(FORMER_LIMITS[name]))
        if name not in names:
            raise BadRequest(name, f"is no limit of a {what}; there are {', '.join(names)}")
    return {name: msgspec.to_builtins(value) for name, value in changes.items()}


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
            raise InUse(f"{few} jobs of the task {name!r:.200} have not ended: keep them or cancel them (jobs)")
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
    plain = _known(Supplier, changes)
    async with aio_short_transaction(connection):
        await connection.execute(_ADD_SUPPLIER, name)
        found = await _aio_locked_supplier(connection, name)
        override = _overridden(found["override"], plain)
        await aio_limit_supplier(connection, name, stored_limits(found["limits"]), override)
        await connection.execute(TELL)
        await aio_audit(connection, operator, "set_supplier", None, {"supplier": name, "changes": plain})
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
            raise InUse(f"tasks name the supplier {name!r:.200}: {', '.join(tasks)}; remove them or set another first")
        found = await aio_supplier(connection, name)
        if found.slot is not None:
            raise InUse(f"a load's request to the supplier {name!r:.200} is under way; remove it when it has ended")
        await connection.execute("DELETE FROM dl_source_calls WHERE source = $1", name)
        await connection.execute("DELETE FROM dl_sources WHERE source = $1", name)
        await connection.execute(TELL)
        await aio_audit(connection, operator, "remove_supplier", None, {"supplier": name})
        return found
