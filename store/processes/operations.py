"""Operators' actions on processes: repair, resume, stop, remove, import; on one, or on those in error by a filter.

Each action writes its row of dl_audit in its own transaction.
"""

from __future__ import annotations

from typing import Annotated, Any, Final
from uuid import UUID

from msgspec import Meta

from dataloader.jobs.contract import Operator
from dataloader.jobs.ids import uuid7
from dataloader.jobs.page_cursor import After, PageCursor
from dataloader.jobs.process_listings import ProcessesChanged, ProcessFilter, ProcessRecord
from dataloader.jobs.process_requests import ProcessChange, ProcessImport, ProcessRequest
from dataloader.jobs.processes import MAX_VALUE, ProcessConflict, check_metadata
from dataloader.jobs.text import exact_json
from dataloader.store.processes.reads import aio_get_process, not_found
from dataloader.store.processes.requests import Act, Acted, Asked, aio_act, aio_ask, aio_put, aio_take_back
from dataloader.store.processes.search import group_of
from dataloader.store.queue.control import aio_audit, aio_short_transaction

_Big = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_BY_ERROR: Final = PageCursor(tuple[str, _Big, _Big])
"""Type, number of the group, and number of the process."""
_FIRST: Final = ("", -(2**63), 0)

_IN_ERROR: Final = """
SELECT type, error_group, key, process_id FROM dl_processes
WHERE removed_at IS NULL AND status = 'error' AND (type, error_group, key) > ($1, $2, $3) {more}
ORDER BY type, error_group, key LIMIT $4
"""
_OF_TASK: Final = """
SELECT p.type, p.process_id FROM dl_process_tasks t JOIN dl_processes p USING (key) WHERE t.task_id = $1
"""
# The function sees its own changes for the rows before.
_RESUME_MANY: Final = """
SELECT count(*) FROM unnest($1::text[], $2::text[], $3::uuid[]) AS a (type, id, job)
CROSS JOIN LATERAL dl_process_act(a.type, a.id, 'resume', a.job, $4) AS r WHERE r.verdict = 'done'
"""
_REPAIR_MANY: Final = """
SELECT count(*) FROM unnest($1::text[], $2::text[], $3::uuid[]) AS a (type, id, job)
CROSS JOIN LATERAL dl_process_request(a.type, a.id, 'repair', NULL, $5::text::jsonb, NULL, NULL, NULL, NULL, false,
                                      NULL, NULL, NULL, a.job, $4, NULL) AS r
WHERE r.verdict = 'added'
"""


async def aio_ask_audited(connection: Any, request: ProcessRequest, operator: Operator, lease_s: int) -> Asked:
    """Send a request and audit it (asyncio-flavored)."""
    async with aio_short_transaction(connection):
        asked = await aio_ask(connection, request, lease_s)
        if asked.verdict == "added":
            detail = _process_fields(request.type, request.process_id)
            if request.method is not None:
                detail["method"] = request.method
            action = "start_process" if request.kind == "init" else f"{request.kind}_process"
            await aio_audit(connection, operator, action, None, detail)
        return asked


async def aio_withdraw_audited(connection: Any, task_id: int, ident: UUID | None, operator: Operator) -> list[int]:
    """Withdraw a call if it has not begun, and audit that (asyncio-flavored). Return the withdrawn tasks."""
    async with aio_short_transaction(connection):
        taken = await aio_take_back(connection, {task_id: ident}, expired=False)
        if taken:
            row = await connection.fetchrow(_OF_TASK, task_id)
            detail = _process_fields(row["type"], row["process_id"]) | {"task_id": task_id}
            await aio_audit(connection, operator, "withdraw_call", None, detail)
        return taken


async def aio_change(
    connection: Any, process_type: str, process_id: str, act: Act, *, operator: Operator, lease_s: int
) -> tuple[ProcessRecord, Acted]:
    """Change a process (asyncio-flavored). Return it as it is afterward, or as it was if it was removed."""
    async with aio_short_transaction(connection):
        before = await aio_get_process(connection, process_type, process_id)
        acted = await aio_act(connection, process_type, process_id, act, lease_s)
        if acted.verdict == "missing":
            raise not_found(process_type, process_id)
        if acted.verdict != "done":
            raise _conflict(act, process_type, process_id, acted)
        await aio_audit(connection, operator, f"{act}_process", None, _process_fields(process_type, process_id))
        if act == "remove":
            return before, acted
        return await aio_get_process(connection, process_type, process_id), acted


def _conflict(act: Act, process_type: str, process_id: str, acted: Acted) -> ProcessConflict:
    if acted.verdict == "busy":
        message = "it is already being repaired or resumed"
    elif act == "stop":
        message = "it has no running step"
    else:
        message = f"{act} needs a process in error"
    return ProcessConflict(process_type, process_id, acted.status or "init", message)


async def aio_import(connection: Any, process: ProcessImport, operator: Operator, lease_s: int) -> ProcessRecord:
    """Store a process that another system has begun (asyncio-flavored)."""
    async with aio_short_transaction(connection):
        stored = await aio_put(connection, process, lease_s)
        record = await aio_get_process(connection, process.type, process.process_id)
        if not stored:
            message = "a process with this ID exists"
            raise ProcessConflict(process.type, process.process_id, record.status, message)
        await aio_audit(connection, operator, "put_process", None, _process_fields(process.type, process.process_id))
        return record


async def aio_change_some(
    connection: Any,
    change: ProcessChange,
    wanted: ProcessFilter,
    *,
    operator: Operator,
    lease_s: int,
    limit: int,
    after: After,
) -> ProcessesChanged:
    """Change the matching processes in error, by type and error, oldest first (asyncio-flavored)."""
    values: list[Any] = [*(_FIRST if after is None else _BY_ERROR.key(after)), limit]
    more = []
    for condition, value in (
        ("type = {}", wanted.type),
        ("process_id = {}", wanted.process_id),
        ("error_group = {}", group_of(wanted)),
        (
            "metadata @> {}::text::jsonb",
            None if wanted.metadata is None else check_metadata("metadata", wanted.metadata),
        ),
    ):
        if value is not None:
            values.append(value)
            more.append(f"AND ({condition.format(f'${len(values)}')})")
    async with aio_short_transaction(connection):
        rows = await connection.fetch(_IN_ERROR.format(more=" ".join(more)), *values)
        which = [row["type"] for row in rows], [row["process_id"] for row in rows], [uuid7() for _ in rows], lease_s
        if change.action == "resume":
            changed = await connection.fetchval(_RESUME_MANY, *which)
        else:
            args = None if change.args is None else exact_json("args", change.args, MAX_VALUE)
            changed = await connection.fetchval(_REPAIR_MANY, *which, args)
        detail = {"filter": wanted.criteria(), "limit": limit, "changed": changed}
        await aio_audit(connection, operator, f"{change.action}_processes", None, detail)
    last = rows[-1] if len(rows) == limit else None
    following = None if last is None else _BY_ERROR.text((last["type"], last["error_group"], last["key"]))
    return ProcessesChanged(changed, following)


def _process_fields(process_type: str, process_id: str) -> dict[str, Any]:
    return {"type": process_type, "process_id": process_id}
