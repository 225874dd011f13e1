"""Limits of tasks and suppliers as rows: declared, overridden, and effective ones.

The effective limits are computed here when one of the two changes, in the transaction that writes it. Claims read only
these. A change notifies all processes, so that it applies from the next claim on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec
import trio

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.limits import MARGIN_S, Supplier, TaskLimits, stored_limits
from dataloader.jobs.logger import get_logger
from dataloader.jobs.retry import MAX_RETRY_DELAY_S
from dataloader.jobs.task import Task
from dataloader.jobs.work_periods import WEEK, WorkPeriods
from dataloader.jobs.zones import offset, zone_named
from dataloader.store.limits.zone_check import aio_check_zone
from dataloader.store.queue.worker_rows import ClockReading

log = get_logger(__name__)

_TASKS: Final = """
SELECT task, coalesce(limits, '{}')::text AS limits, coalesce(override, '{}')::text AS override, limited
FROM dl_tasks WHERE task = ANY ($1::text[]) ORDER BY task FOR NO KEY UPDATE
"""
_HOLDS: Final = """
UPDATE dl_tasks SET limits = $2::text::jsonb, override = $3::text::jsonb, limited = limited OR $4,
  periods = $5::text::int4multirange, zone = $6, max_running = $7, batch_size = $8, batch_delay_s = $9,
  supplier = $10, cost = $11, retry_priority = $12, max_attempts = $13, at_period_end = $14,
  max_running_per_partition = $15
WHERE task = $1
"""
_LIMITED: Final = "UPDATE dl_tasks SET limited = true WHERE task = $1 AND NOT limited"
_LANE: Final = "INSERT INTO dl_lanes (lane) VALUES ($1) ON CONFLICT DO NOTHING"
# A lane that was opened for jobs of an unknown task, and may be closing, stays from now on.
_NEEDED: Final = """
UPDATE dl_lanes SET unknown_at = NULL, closing_at = NULL, queues = '{}' WHERE lane = $1 AND unknown_at IS NOT NULL
"""
# Running jobs count from now on. A ready job is moved to its lane by the claim that finds it.
_COUNT: Final = "UPDATE dl_jobs SET lane = task WHERE status = 'running' AND task = $1 AND lane IS NULL"
_COUNT_OURS: Final = """
UPDATE dl_jobs SET lane = task
WHERE status = 'running' AND claimed_by = $2 AND lane IS NULL AND task = ANY ($1::text[])
"""
_SUPPLIERS: Final = """
SELECT source, coalesce(limits, '{}')::text AS limits, coalesce(override, '{}')::text AS override
FROM dl_sources WHERE source = ANY ($1::text[]) ORDER BY source FOR NO KEY UPDATE
"""
_SUPPLIER: Final = "INSERT INTO dl_sources (source) VALUES ($1) ON CONFLICT DO NOTHING"
_SUPPLIER_HOLDS: Final = """
UPDATE dl_sources SET limits = $2::text::jsonb, override = $3::text::jsonb,
  periods = $4::text::int4multirange, zone = $5, units = $6, spans_s = $7, margin_s = $8, kept_s = greatest(kept_s, $9),
  zones = $10
WHERE source = $1
"""
_LEAST_RATE_LIMIT: Final = "SELECT min(u) FROM dl_sources s, unnest(s.units) AS u WHERE s.source = $1"
_DEAREST: Final = "SELECT task, cost FROM dl_tasks WHERE supplier = $1 ORDER BY cost DESC, task LIMIT 1"
TELL: Final = "SELECT pg_notify('dl_lane', '')"
"""Limits have changed: each process rereads the list of lanes and checks all of its lanes."""
_RETRY_DELAYS: Final = f"""
SELECT task,
  round(least(greatest((override -> 'retry_delay_s')::numeric, 0), {MAX_RETRY_DELAY_S}), 6)::float8 AS delay_s
FROM dl_tasks WHERE task = ANY ($1::text[]) AND jsonb_typeof(override -> 'retry_delay_s') = 'number'
"""
_KNOWN: Final = """
SELECT t.task, t.limited, l.lane FROM dl_tasks t LEFT JOIN dl_lanes l ON l.lane = t.task
WHERE t.task = ANY ($1::text[]) ORDER BY t.task
"""
_STOPPING: Final = """
SELECT t.task, p.periods, p.zone, p.margin_s, dl_zone_offset_s(p.zone, now()) AS ahead_s, now() AS at
FROM dl_tasks t
LEFT JOIN dl_sources s ON s.source = t.supplier
CROSS JOIN LATERAL (
  VALUES (t.periods, t.zone, $2::float8), (s.periods, s.zone, s.margin_s)
) AS p (periods, zone, margin_s)
WHERE t.task = ANY ($1::text[]) AND t.at_period_end = 'stop' AND p.periods IS NOT NULL
"""


async def aio_lock_suppliers(connection: Any, names: Sequence[str]) -> None:
    """Lock the existing suppliers among these names (asyncio-flavored), before the tasks that name them."""
    await connection.fetch(_SUPPLIERS, names)


async def aio_count_ours(connection: Any, lanes: Sequence[str], worker: str) -> None:
    """Count this worker's running jobs in their lanes (asyncio-flavored): they may be older than the lanes."""
    await connection.execute(_COUNT_OURS, list(lanes), worker)


async def aio_known(connection: Any, tasks: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the declared tasks among `tasks`, those that have a lane, and those whose new jobs wait there.

    Jobs of a task whose lane is closing are plain ready jobs, unless they are already in the lane.
    """
    records = await connection.fetch(_KNOWN, list(tasks))
    lanes = [record for record in records if record["lane"] is not None]
    limited = [record["task"] for record in lanes if record["limited"]]
    return [record["task"] for record in records], [record["lane"] for record in lanes], limited


async def aio_retry_delays(connection: Any, tasks: Sequence[str]) -> dict[str, float]:
    """Return the seconds to the next run for the tasks for which an operator has set them (asyncio-flavored)."""
    return {record["task"]: record["delay_s"] for record in await connection.fetch(_RETRY_DELAYS, list(tasks))}


async def aio_stopping_tasks(
    connection: Any, tasks: Sequence[str]
) -> tuple[ClockReading, dict[str, list[tuple[WorkPeriods, float]]]]:
    """Return the tasks whose runs are stopped at the close of a period (asyncio-flavored), and the database's clock.

    Each has its effective periods and those of its supplier, with the seconds before their ends at which they close.
    The periods follow the database's clock in their zone. Claims open them by the same clock.
    """
    found: dict[str, list[tuple[WorkPeriods, float]]] = {}
    for record in await connection.fetch(_STOPPING, list(tasks), MARGIN_S):
        # Manual SQL may have omitted a bound.
        ranges = tuple((minutes.lower or 0, minutes.upper or WEEK) for minutes in record["periods"])
        try:
            zone = zone_named(record["zone"])
            ahead = _database_is_ahead(record["ahead_s"], zone, record["at"])
            periods = WorkPeriods(ranges, zone, ahead)
        except BadRequest as error:  # the process that has declared it knows the zone
            log.warning(
                "running jobs are not stopped at the end of their work period", task=record["task"], error=str(error)
            )
            continue
        found.setdefault(record["task"], []).append((periods, record["margin_s"]))
    asked_at = trio.current_time()
    shown = await connection.fetchval("SELECT clock_timestamp()")
    return ClockReading(asked_at, trio.current_time(), shown), found


def _database_is_ahead(offset_s: float | None, zone: ZoneInfo, at: datetime) -> timedelta:
    """Return by how much the database's clock of a zone is ahead of this one; 0 if the database has no such zone."""
    return timedelta(0) if offset_s is None else timedelta(seconds=offset_s) - offset(zone, at)


async def aio_declare_limits(connection: Any, tasks: Iterable[Task[Any]], suppliers: Iterable[Supplier]) -> list[str]:
    """Write a program's declared limits (asyncio-flavored), after its tasks. Unchanged limits are not written.

    Return sentences for the operators: limits that stay unchanged because an override conflicts with the new ones, and
    suppliers that a task names but no program has declared.

    Raises `BadRequest` for conflicting limits, such as a cost above a rate limit.
    """
    declared = {task.name: task.declared_limits.spec() for task in tasks}
    named = {supplier.name: supplier.spec() for supplier in suppliers}
    named |= {
        spec["supplier"]: {} for spec in declared.values() if "supplier" in spec and spec["supplier"] not in named
    }
    async with connection.transaction():
        changed, told = await _aio_declare_suppliers(connection, named)
        for record in await connection.fetch(_TASKS, sorted(declared)):
            name = record["task"]
            if stored_limits(record["limits"]) != declared[name]:
                override = stored_limits(record["override"])
                try:
                    limited = record["limited"]
                    changed |= await aio_limit_task(connection, name, declared[name], override, limited=limited)
                except BadRequest as error:
                    if not override:
                        raise BadRequest(f"task {name!r}", str(error)) from error
                    told.append(
                        f"the limits of the task {name!r} do not change, because its override is invalid: {error}"
                    )
        if changed:
            await connection.execute(TELL)
    return told


async def _aio_declare_suppliers(connection: Any, declared: Mapping[str, Mapping[str, Any]]) -> tuple[bool, list[str]]:
    changed, told = False, []
    for name in sorted(declared):
        await connection.execute(_SUPPLIER, name)
    for record in await connection.fetch(_SUPPLIERS, sorted(declared)):
        name, spec = record["source"], declared[record["source"]]
        # A program that only names a supplier keeps the declaration of another program.
        if spec and stored_limits(record["limits"]) != spec:
            override = stored_limits(record["override"])
            try:
                await aio_limit_supplier(connection, name, spec, override)
                changed = True
            except BadRequest as error:
                if not override:
                    raise BadRequest(f"supplier {name!r}", str(error)) from error
                told.append(
                    f"the limits of the supplier {name!r} do not change, because its override is invalid: {error}"
                )
        elif not spec and record["limits"] == record["override"] == "{}":
            told.append(f"the supplier {name!r} is not declared, so it has no limits; check its name")
    return changed, told


async def aio_limit_task(
    connection: Any, name: str, declared: Mapping[str, Any], override: Mapping[str, Any], *, limited: bool
) -> bool:
    """Write the limits of a task whose row is locked (asyncio-flavored). Return whether its jobs wait in a lane.

    Raises `BadRequest` for conflicting limits, for a cost above a rate limit of the supplier, and for a zone that the
    database does not know.
    """
    limits = TaskLimits.of_spec({**declared, **override})
    await aio_check_zone(connection, "zone", limits.zone)
    if limits.supplier is not None:
        await connection.execute(_SUPPLIER, limits.supplier)
        least = await connection.fetchval(_LEAST_RATE_LIMIT, limits.supplier)
        if least is not None and limits.cost > least:
            raise BadRequest(
                "cost",
                f"must be at most {least:,}, a rate limit of the supplier {limits.supplier!r}, not {limits.cost:,}",
            )
    await connection.execute(
        _HOLDS,
        name,
        _encoded_limits(declared),
        _encoded_limits(override) if override else None,
        limits.needs_lane,
        _ranges(limits.periods),
        limits.zone,
        limits.max_running,
        limits.batch_size,
        limits.batch_delay_s,
        limits.supplier,
        limits.cost,
        limits.retry_priority,
        limits.max_attempts,
        limits.at_period_end,
        limits.max_running_per_partition,
    )
    if limits.needs_lane and not limited:
        await aio_open_lane(connection, name)
    return limited or limits.needs_lane


async def aio_open_lane(connection: Any, name: str, *, for_unknown: bool = False) -> None:
    """Open a lane for a task whose row is locked (asyncio-flavored). Its running jobs count immediately.

    A lane `for_unknown` jobs may close when all workers know the task. A lane for limits or for a worker of single
    tasks stays.
    """
    await connection.execute(_LIMITED, name)
    await connection.execute(_LANE, name)
    if not for_unknown:
        await connection.execute(_NEEDED, name)
    await connection.execute(_COUNT, name)


async def aio_limit_supplier(
    connection: Any, name: str, declared: Mapping[str, Any], override: Mapping[str, Any]
) -> None:
    """Write the limits of a supplier whose row is locked (asyncio-flavored).

    Raises `BadRequest` for values out of range, for a rate limit below the cost of a task of the supplier, and for a
    zone that the database does not know.
    """
    supplier = Supplier.of_spec(name, {**declared, **override})
    await aio_check_zone(connection, "zone", supplier.zone)
    for number, rate_limit in enumerate(supplier.rate_limits):
        await aio_check_zone(connection, f"rate_limits[{number}].zone", rate_limit.zone or "UTC")
    dearest = await connection.fetchrow(_DEAREST, name) if supplier.rate_limits else None
    least = min((rate_limit.requests for rate_limit in supplier.rate_limits), default=0)
    if dearest is not None and dearest["cost"] > least:
        raise BadRequest(
            "rate_limits",
            f"must have at least {dearest['cost']:,} units each, the cost of the task {dearest['task']!r}",
        )
    await connection.execute(
        _SUPPLIER_HOLDS,
        name,
        _encoded_limits(declared) if declared else None,
        _encoded_limits(override) if override else None,
        _ranges(supplier.periods),
        supplier.zone,
        [rate_limit.requests for rate_limit in supplier.rate_limits],
        [float(rate_limit.per_s or 0) for rate_limit in supplier.rate_limits],
        supplier.margin,
        max(rate_limit.kept_s for rate_limit in supplier.rate_limits) + supplier.margin
        if supplier.rate_limits
        else 0.0,
        [rate_limit.zone for rate_limit in supplier.rate_limits],
    )


def _ranges(periods: WorkPeriods | None) -> str | None:
    """Return the minutes of a week as PostgreSQL's text of a multirange."""
    return None if periods is None else "{" + ",".join(f"[{begin},{end})" for begin, end in periods.ranges) + "}"


def _encoded_limits(value: Mapping[str, Any]) -> str:
    return msgspec.json.encode(value).decode()
