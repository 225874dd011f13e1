"""Tasks and suppliers with their limits, as operators see them: effective limits, use, and why no job starts.

Follows the rules of the claim (dl_open_lanes) without locks or writes, so the result may already be outdated when it is
read. Limits that the database cannot evaluate are closed, with the error. Limits that this program cannot read, such as
those of a newer program or with a time zone that only the database knows, are shown as stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.limits import MARGIN_S, Supplier, TaskLimits, readable_limits, stored_limits
from dataloader.jobs.model import MAX_NAME, check_text
from dataloader.jobs.supplier_listings import (
    RateLimitState,
    RequestSlot,
    SupplierClosed,
    SupplierNotFound,
    SupplierRecord,
)
from dataloader.jobs.task_listings import Closed, TaskNotFound, TaskRecord, TaskState
from dataloader.jobs.text import shown_json
from dataloader.jobs.work_periods import WorkPeriods
from dataloader.store.limits.lane_errors import CURRENT_S

T = TypeVar("T")

_TASKS: Final = f"""
WITH work AS MATERIALIZED (
  SELECT task, count(*) AS running, count(lane) AS in_lane FROM dl_jobs WHERE status = 'running' GROUP BY task
)
SELECT t.task, t.description, t.queue, t.priority, t.args_schema::text AS args_schema, t.uniqueness::text AS uniqueness,
  t.declared_by, t.declared_at, coalesce(t.limits, '{{}}')::text AS declared, coalesce(t.override, '{{}}')::text AS override,
  t.max_running, t.max_running_per_partition, t.batch_size, t.batch_delay_s, t.cost, t.paused, coalesce(w.running, 0) AS running, coalesce(w.in_lane, 0) AS in_lane,
  (SELECT count(*) FROM (
    SELECT FROM dl_jobs j WHERE t.limited AND j.lane = t.task AND j.status = 'queued' AND j.waits_for = 'limit' LIMIT 10000
  ) AS in_its_lane) AS waiting,
  l.batch_left,
  CASE WHEN isfinite(l.idle_since) THEN l.idle_since END AS idle_since, l.idle_since IS NULL AS is_busy,
  s.source AS supplier, s.paused AS supplier_paused, s.margin_s,
  coalesce(s.limits, '{{}}')::text AS supplier_declared, coalesce(s.override, '{{}}')::text AS supplier_override,
  v.now, u.task_wait_s, u.supplier_wait_s, u.units, u.wait_s,
  coalesce(CASE WHEN l.failed_at > now() - interval '{CURRENT_S} s' THEN l.error END, u.error) AS error
FROM dl_tasks t
LEFT JOIN work w ON w.task = t.task
LEFT JOIN dl_lanes l ON l.lane = t.task
LEFT JOIN dl_sources s ON s.source = t.supplier
CROSS JOIN LATERAL (SELECT greatest(statement_timestamp(), s.last_at) AS now) AS v
CROSS JOIN LATERAL dl_limits_seen(
  t.periods, t.zone, s, coalesce(s.units, '{{}}'), coalesce(s.spans_s, '{{}}'), s.zones, coalesce(t.cost, 1), v.now) AS u
WHERE {{where}}
"""  # noqa: E501 - one line a part
_TASK_PAGE: Final = _TASKS.replace("{where}", "t.task > $1 ORDER BY t.task LIMIT $2")


def one_task(name: str) -> str:
    """Return the statement that reads the task which a parameter names, as a part of another statement."""
    return _TASKS.replace("{where}", f"t.task = {name}")


_SUPPLIERS: Final = """
SELECT s.source AS supplier, coalesce(s.limits, '{}')::text AS declared, coalesce(s.override, '{}')::text AS override,
  s.paused, s.margin_s, v.now,
  ARRAY(SELECT t.task FROM dl_tasks t WHERE t.supplier = s.source ORDER BY t.task) AS tasks,
  b.units, b.waits_s, coalesce(p.error, b.error) AS error, p.supplier_wait_s,
  CASE WHEN s.holder IS NOT NULL AND s.held_until > v.now THEN s.held_until END AS held_until,
  (SELECT j.job_id FROM dl_jobs j WHERE j.status = 'running' AND j.token = s.holder AND s.held_until > v.now LIMIT 1) AS job_id
FROM dl_sources s
CROSS JOIN LATERAL (SELECT greatest(statement_timestamp(), s.last_at) AS now) AS v
CROSS JOIN LATERAL dl_limits_seen(NULL, NULL, s, '{}', '{}', '{}', 1, v.now) AS p
CROSS JOIN LATERAL (
  SELECT coalesce(array_agg(u.units ORDER BY i), '{}') AS units, coalesce(array_agg(u.wait_s ORDER BY i), '{}') AS waits_s,
         min(u.error) AS error
  FROM generate_subscripts(s.units, 1) AS i
  CROSS JOIN LATERAL dl_limits_seen(NULL, NULL, s, ARRAY[s.units[i]], ARRAY[s.spans_s[i]], ARRAY[s.zones[i]], 1, v.now) AS u
) AS b
WHERE {where} ORDER BY s.source LIMIT $2
"""  # noqa: E501 - one line a part
_SUPPLIER_PAGE: Final = _SUPPLIERS.replace("{where}", "s.source > $1")
_ONE_SUPPLIER: Final = _SUPPLIERS.replace("{where}", "s.source = $1")
_RECORD_FIELDS: Final = tuple(field.name for field in attrs.fields(TaskRecord))


async def aio_task_states(connection: Any, after: str, limit: int) -> list[TaskState]:
    """Return at most `limit` tasks by name, after `after` (asyncio-flavored)."""
    return list(map(task_state, await connection.fetch(_TASK_PAGE, after, limit)))


async def aio_task_state(connection: Any, name: str) -> TaskState:
    """Return the task of this name (asyncio-flavored). Raises `TaskNotFound`."""
    check_text("task", name, MAX_NAME)
    record = await connection.fetchrow(one_task("$1"), name)
    if record is None:
        raise TaskNotFound(f"no process has declared a task {name!r:.200}")
    return task_state(record)


async def aio_suppliers(connection: Any, after: str, limit: int) -> list[SupplierRecord]:
    """Return at most `limit` suppliers by name, after `after` (asyncio-flavored)."""
    return list(map(_supplier, await connection.fetch(_SUPPLIER_PAGE, after, limit)))


async def aio_supplier(connection: Any, name: str) -> SupplierRecord:
    """Return the supplier of this name (asyncio-flavored). Raises `SupplierNotFound`."""
    check_text("supplier", name, MAX_NAME)
    record = await connection.fetchrow(_ONE_SUPPLIER, name, 1)
    if record is None:
        raise SupplierNotFound(f"no supplier has the name {name!r:.200}")
    return _supplier(record)


@attrs.frozen
class _Verdict:
    """Verdict on new starts of jobs: the reason against them, when it ends, their maximum number, and any error."""

    closed: Closed | None = None
    opens_at: datetime | None = None
    left: int | None = None
    error: str | None = None


def task_state(record: Mapping[str, Any]) -> TaskState:
    """Return the task of a row with the columns of `one_task`."""
    values = {name: record[name] for name in _RECORD_FIELDS}
    for name in ("args_schema", "uniqueness"):
        values[name] = shown_json(record[name]) if record[name] else None
    declared, override = stored_limits(record["declared"]), stored_limits(record["override"])
    limits = _limits_or_none(TaskLimits.of_spec, {**declared, **override})
    verdict = _judged(record, None if limits is None else limits.periods)
    return TaskState(
        **values,
        declared=declared,
        override=override,
        limits=readable_limits(declared, override) if limits is None else limits.spec(),
        paused=record["paused"],
        waiting=record["waiting"],
        running=record["running"],
        **attrs.asdict(verdict),
    )


def _limits_or_none(kind: Callable[..., T], *spec: Any) -> T | None:
    """Return the limits of a specification; None if this program cannot read them."""
    try:
        return kind(*spec)
    except BadRequest:
        return None


def _judged(  # noqa: C901, PLR0911, PLR0912 - the claim's conditions
    record: Mapping[str, Any], periods: WorkPeriods | None
) -> _Verdict:
    now: datetime = record["now"]
    if record["paused"]:
        return _Verdict("paused", None, 0)
    if record["error"] is not None:
        return _Verdict("error", None, 0, record["error"])
    if record["task_wait_s"] > 0:
        return _Verdict("period", _opens_at(periods, now, MARGIN_S, record["task_wait_s"]), 0)
    bounds = []
    if record["max_running"] is not None:
        bounds.append(record["max_running"] - record["in_lane"])
        if bounds[0] <= 0:
            return _Verdict("running", None, 0)
    if record["batch_size"] is not None:
        begins_at = _batch_begins_at(record, record["batch_delay_s"] or 0, now)
        if begins_at is not None and begins_at > now:
            return _Verdict("batch", begins_at, 0)
        bounds.append(record["batch_size"] if begins_at is not None else record["batch_left"] or 0)
        if bounds[-1] <= 0:
            return _Verdict("batch", None, 0)
    if record["supplier"] is not None:
        if record["supplier_paused"]:
            return _Verdict("supplier_paused", None, 0)
        if record["supplier_wait_s"] > 0:
            supplier = _supplier_of(record["supplier"], record["supplier_declared"], record["supplier_override"])
            periods = None if supplier is None else supplier.periods
            opens_at = _opens_at(periods, now, record["margin_s"], record["supplier_wait_s"])
            return _Verdict("supplier_period", opens_at, 0)
        if record["wait_s"] > 0:
            return _Verdict("budget", now + timedelta(seconds=record["wait_s"]), 0)
        cost = 1 if record["cost"] is None else record["cost"]
        if record["units"] is not None and cost > 0:
            bounds.append(record["units"] // cost)
    return _Verdict(left=min(bounds, default=None))


def _batch_begins_at(record: Mapping[str, Any], delay_s: float, now: datetime) -> datetime | None:
    """Return the time when the next batch may begin; None while jobs of a batch are running."""
    if record["in_lane"]:
        return None
    if record["is_busy"]:
        # No claim has noticed yet that no job is running: the pause begins with the claim that does.
        return now + timedelta(seconds=delay_s)
    idle_since = record["idle_since"]
    return now if idle_since is None else idle_since + timedelta(seconds=delay_s)


def _opens_at(periods: WorkPeriods | None, now: datetime, margin_s: float, wait_s: float) -> datetime | None:
    """Return the time when closed periods open. The database has proposed the next check after `wait_s` seconds.

    If the time zones of this machine and of the database differ, it is the time of that check.
    """
    at = now
    if periods is not None and periods.is_open(now):
        at = now + timedelta(seconds=margin_s)
    if periods is None or periods.is_open(at):
        return now + timedelta(seconds=wait_s)
    return periods.next_change(at)


def _supplier(record: Mapping[str, Any]) -> SupplierRecord:
    declared, override = stored_limits(record["declared"]), stored_limits(record["override"])
    supplier = _supplier_of(record["supplier"], record["declared"], record["override"])
    now: datetime = record["now"]
    closed, opens_at = _supplier_closed(record, None if supplier is None else supplier.periods)
    return SupplierRecord(
        supplier=record["supplier"],
        declared=declared,
        override=override,
        limits=readable_limits(declared, override) if supplier is None else supplier.spec(),
        margin_s=record["margin_s"],
        paused=record["paused"],
        tasks=record["tasks"],
        rate_limits=[
            RateLimitState(
                requests=rate_limit.requests,
                per_s=rate_limit.per_s,
                per=rate_limit.per,
                zone=rate_limit.zone,
                used=rate_limit.requests - units,
                left=max(units, 0),
                free_at=now + timedelta(seconds=wait_s) if wait_s else None,
            )
            # The lists may differ in length if manual SQL has changed one of them.
            for rate_limit, units, wait_s in zip(
                () if supplier is None else supplier.rate_limits, record["units"], record["waits_s"], strict=False
            )
        ],
        closed=closed,
        opens_at=opens_at,
        error=record["error"],
        slot=None if record["held_until"] is None else RequestSlot(record["job_id"], record["held_until"]),
    )


def _supplier_closed(
    record: Mapping[str, Any], periods: WorkPeriods | None
) -> tuple[SupplierClosed | None, datetime | None]:
    if record["paused"]:
        return "paused", None
    if record["error"] is not None:
        return "error", None
    if record["supplier_wait_s"] > 0:
        return "period", _opens_at(periods, record["now"], record["margin_s"], record["supplier_wait_s"])
    return None, None


def _supplier_of(name: str, declared: str, override: str) -> Supplier | None:
    return _limits_or_none(Supplier.of_spec, name, {**stored_limits(declared), **stored_limits(override)})
