"""Bulk operations in the tables (U16): count, freeze and report the jobs; bulk_batches.py changes them.

One INSERT … SELECT freezes the jobs. A bound by time would include jobs that commit late, and repeating until no job
matches would never end for jobs that fail again. The operation's row is written first, so that of two requests with
the same ID only one starts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

import attrs
import msgspec

from dataloader.jobs.bulk_listings import (
    COUNTED,
    BulkCount,
    BulkNotFound,
    BulkPage,
    BulkRecord,
    Chosen,
    check_act,
)
from dataloader.jobs.contract import Change, Operator
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.ids import uuid7
from dataloader.jobs.listings import MAX_PAGE, JobFilter
from dataloader.jobs.model import check_between
from dataloader.jobs.operations.bulk import CountBulk, GetBulk, ListBulk, StartBulk, StopBulk
from dataloader.jobs.page_cursor import BY_INSTANT
from dataloader.jobs.secrets.masking import mask
from dataloader.jobs.states import Status
from dataloader.jobs.text import stored_object
from dataloader.store.connection.bridge import set_local
from dataloader.store.connection.command_tag import row_count
from dataloader.store.connection.connect import PLANNER_OF_USERS
from dataloader.store.connection.error_meanings import TIMED_OUT
from dataloader.store.implementations import Store, implements
from dataloader.store.queue.control import (
    OPEN,
    REVIVABLE,
    TO_CANCEL,
    TO_RETRY,
    TO_RUN_NOW,
    TO_SET_PRIORITY,
    WAKES_PROCESS,
    aio_audit,
    aio_short_transaction,
)
from dataloader.store.queue.job_filters import condition

COUNT_S: Final = 2.0
"""Maximum duration of a count in seconds: a page waits for it."""

_COLUMNS: Final = """
bulk_id, action, priority, filter::text AS filter, actor, created_at, jobs, done, changed, error, stopped_by, ended_at,
CASE WHEN ended_at IS NULL THEN 'open' WHEN stopped_by IS NOT NULL THEN 'stopped' WHEN error IS NOT NULL THEN 'failed'
     ELSE 'done' END AS state
"""
_ONE: Final = f"SELECT {_COLUMNS} FROM dl_bulk WHERE bulk_id = $1"
_PAGE: Final = f"""
SELECT {_COLUMNS} FROM dl_bulk WHERE (created_at, bulk_id) < ($1, $2) ORDER BY created_at DESC, bulk_id DESC LIMIT $3
"""
_NEWEST: Final = f"SELECT {_COLUMNS} FROM dl_bulk ORDER BY created_at DESC, bulk_id DESC LIMIT $1"
_COUNT: Final = "SELECT count(*) FROM (SELECT FROM dl_jobs WHERE {where} LIMIT {most}) AS counted"
_BEGIN: Final = """
INSERT INTO dl_bulk (bulk_id, action, priority, filter, actor) VALUES ($1, $2, $3, $4::text::jsonb, $5)
ON CONFLICT (bulk_id) DO NOTHING RETURNING bulk_id
"""
_FREEZE: Final = "INSERT INTO dl_bulk_jobs (bulk_id, job_id) SELECT ${id}, job_id FROM dl_jobs WHERE {where}{limit}"
_FROZEN: Final = (
    "UPDATE dl_bulk SET jobs = $2::bigint, ended_at = CASE WHEN $2::bigint = 0 THEN now() END WHERE bulk_id = $1"
)
_STOP: Final = "UPDATE dl_bulk SET ended_at = now(), stopped_by = $2 WHERE bulk_id = $1 AND ended_at IS NULL"
_TELL: Final = "SELECT pg_notify('dl_bulk', '')"


@attrs.frozen
class ManyAct:
    """Condition for the jobs of a bulk operation: a status in `allowed`, and `still`: the job would change.

    `{value}` in `still` is the operation's value. With `newest_first`, a cancel does not start jobs that it is about to
    cancel, and a retry does not retry an older job of a unique key in place of a newer one.
    """

    allowed: frozenset[Status]
    still: str
    newest_first: bool = False


ACTS: Final[Mapping[str, ManyAct]] = {
    "cancel": ManyAct(OPEN, TO_CANCEL, newest_first=True),
    "retry": ManyAct(REVIVABLE, TO_RETRY, newest_first=True),
    "run_now": ManyAct(TO_RUN_NOW.allowed, TO_RUN_NOW.still),
    "set_priority": ManyAct(TO_SET_PRIORITY.allowed, TO_SET_PRIORITY.still),
}
_LEFT_OUT: Final = ManyAct(OPEN, WAKES_PROCESS)
"""Jobs that no bulk cancel changes."""


@implements(CountBulk)
async def _count_bulk(store: Store, request: CountBulk) -> BulkCount:
    """Return the number of jobs; if counting takes longer than `COUNT_S`, "at least 0"."""
    check_act(request.change, request.chosen)
    return await store.database.run(_aio_count_bulk, request.change, request.chosen, COUNT_S)


@implements(StartBulk)
async def _start_bulk(store: Store, request: StartBulk) -> BulkRecord:
    check_act(request.change, request.chosen)
    return await store.database.write(
        _aio_start_bulk, request.change, request.chosen, store.operator, request.bulk_id or uuid7(), most=request.most
    )


@implements(GetBulk)
async def _get_bulk(store: Store, request: GetBulk) -> BulkRecord:
    return await store.database.run(_aio_get_bulk, request.bulk_id)


@implements(ListBulk)
async def _find_bulk(store: Store, request: ListBulk) -> BulkPage:
    check_between("limit", request.limit, 1, MAX_PAGE)
    behind = () if request.after is None else BY_INSTANT.key(request.after)
    records = await store.database.run(_aio_find_bulk, *behind, request.limit + 1)
    return BulkPage(*BY_INSTANT.page(records, request.limit, lambda one: (one.created_at, one.bulk_id)))


@implements(StopBulk)
async def _stop_bulk(store: Store, request: StopBulk) -> BulkRecord:
    return await store.database.write(_aio_stop_bulk, request.bulk_id, store.operator)


def _record(row: Any) -> BulkRecord:
    return BulkRecord(**dict(row) | {"filter": stored_object(row["filter"])})


async def _aio_get_bulk(connection: Any, bulk_id: UUID) -> BulkRecord:
    row = await connection.fetchrow(_ONE, bulk_id)
    if row is None:
        raise BulkNotFound(f"no bulk operation has the ID {bulk_id}")
    return _record(row)


async def _aio_find_bulk(connection: Any, *values: object) -> list[BulkRecord]:
    return [_record(row) for row in await connection.fetch(_NEWEST if len(values) == 1 else _PAGE, *values)]


def _where(change: Change, chosen: Chosen, act: ManyAct) -> tuple[str, list[Any]]:
    """Return the condition for the jobs that an operation would change, and its values."""
    if isinstance(chosen, JobFilter):
        allowed = act.allowed if chosen.status is None else act.allowed & chosen.status
        where, values = condition(attrs.evolve(chosen, status=allowed))
    else:
        where, values = "job_id = ANY ($1::uuid[]) AND status = ANY ($2::dl_status[])", [chosen, sorted(act.allowed)]
    if "{value}" in act.still:
        values.append(change.priority)
    return f"{where} AND {act.still.format(value=f'${len(values)}::int')}", values


async def _aio_count_bulk(connection: Any, change: Change, chosen: Chosen, count_s: float) -> BulkCount:
    async def count(act: ManyAct) -> int:
        where, values = _where(change, chosen, act)
        found: int = await connection.fetchval(_COUNT.format(where=where, most=COUNTED), *values)
        return found

    try:
        async with connection.transaction(readonly=True):
            await connection.execute(_plan_for_values(f"{count_s * 1000:.0f}"))
            found = await count(ACTS[change.action])
            left_out = await count(_LEFT_OUT) if change.action == "cancel" else 0
    except TIMED_OUT:
        return BulkCount(0, exact=False)
    return BulkCount(found, exact=found < COUNTED, left_out=left_out)


def _plan_for_values(timeout: str | None = None) -> str:
    """Return the settings for a plan by the filter's values, on which the best index depends."""
    bound = {} if timeout is None else {"statement_timeout": timeout}
    return set_local({**PLANNER_OF_USERS, "plan_cache_mode": "force_custom_plan", **bound})


async def _aio_start_bulk(
    connection: Any, change: Change, chosen: Chosen, operator: Operator, bulk_id: UUID, *, most: int | None
) -> BulkRecord:
    meant = chosen.criteria() if isinstance(chosen, JobFilter) else {"chosen": len(set(chosen))}
    told = msgspec.json.encode(mask(msgspec.to_builtins(meant, order="deterministic"))).decode()
    priority = change.priority if change.action == "set_priority" else None
    async with aio_short_transaction(connection):
        begun = await connection.fetchval(_BEGIN, bulk_id, change.action, priority, told, operator.name)
        if begun is None:
            return _same_act(await _aio_get_bulk(connection, bulk_id), change.action, priority, told)
        await connection.execute(_plan_for_values())
        where, values = _where(change, chosen, ACTS[change.action])
        limit = "" if most is None else f" LIMIT {most + 1:d}"
        sql = _FREEZE.format(id=f"{len(values) + 1}::uuid", where=where, limit=limit)
        jobs = row_count(await connection.execute(sql, *values, bulk_id))
        if most is not None and jobs > most:
            raise BadRequest("most", f"is less than the number of jobs, which is over {most:,} now")
        await connection.execute(_FROZEN, bulk_id, jobs)
        detail = {"bulk": str(bulk_id), "act": change.action, "filter": msgspec.json.decode(told), "jobs": jobs}
        if priority is not None:
            detail["priority"] = priority
        await aio_audit(connection, operator, "start_bulk", None, detail)
        await connection.execute(_TELL)
        return await _aio_get_bulk(connection, bulk_id)


def _same_act(found: BulkRecord, action: str, priority: int | None, told: str) -> BulkRecord:
    """Return the operation that the first of two equal requests started. Raises `BadRequest` if the ID is another's."""
    if (found.action, found.priority, found.filter) != (action, priority, msgspec.json.decode(told)):
        raise BadRequest("bulk_id", f"belongs to another bulk operation, {found.bulk_id}")
    return found


async def _aio_stop_bulk(connection: Any, bulk_id: UUID, operator: Operator) -> BulkRecord:
    async with aio_short_transaction(connection):
        stopped = row_count(await connection.execute(_STOP, bulk_id, operator.name))
        record = await _aio_get_bulk(connection, bulk_id)
        if stopped:
            detail = {"bulk": str(bulk_id), "act": record.action, "done": record.done, "changed": record.changed}
            await aio_audit(connection, operator, "stop_bulk", None, detail)
        return record
