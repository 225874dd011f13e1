"""Rows of schedules: declarations of processes at their start, and operators' changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import attrs
import msgspec

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.schedules import Schedule
from dataloader.jobs.text import stored_json

KNOWN: Final = 5_000
"""Number of parsed schedules in the cache: due and displayed schedules are mostly the same ones."""

_OF_TASKS: Final = """
SELECT name, spec::text AS spec, origin, stored_at, next_at, retired_at
FROM dl_schedules WHERE name = ANY ($1::text[]) OR (task = ANY ($2::text[]) AND origin = 'code' AND retired_at IS NULL)
ORDER BY name FOR NO KEY UPDATE
"""
_STORE: Final = """
INSERT INTO dl_schedules AS s (name, spec, task, origin, stored_by, next_at)
SELECT u.name, u.spec::jsonb, u.task, $5, $6, u.next_at
FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[]) AS u (name, spec, task, next_at)
ORDER BY u.name
ON CONFLICT (name) DO UPDATE SET
  spec = excluded.spec, task = excluded.task, origin = excluded.origin, stored_by = excluded.stored_by,
  changed_at = now(), next_at = excluded.next_at, retired_at = NULL
"""
_RETIRE: Final = """
WITH gone AS (
  UPDATE dl_schedules SET retired_at = now(), changed_at = now() WHERE name = ANY ($1::text[]) RETURNING name
)
INSERT INTO dl_schedule_events (name, kind) SELECT name, 'retired' FROM gone
"""
_EVENT: Final = (
    "INSERT INTO dl_schedule_events (name, kind, payload) SELECT n, $2, $3::text::jsonb FROM unnest($1::text[]) AS n"
)
_UNKNOWN: Final = "SELECT u.task FROM unnest($1::text[]) AS u (task) WHERE u.task NOT IN (SELECT task FROM dl_tasks)"
TELL: Final = "SELECT pg_notify('dl_schedule', '')"
"""Wake the schedulers: a schedule may be due earlier than they know."""


@attrs.frozen
class _Stored:
    spec: dict[str, Any]
    origin: str
    stored_at: datetime
    next_at: datetime | None
    retired: bool


async def aio_declare_schedules(
    connection: Any, schedules: Iterable[Schedule], tasks: Sequence[str], worker: str
) -> list[str]:
    """Store the declarations of `worker`'s program (asyncio-flavored). Unchanged schedules are not written.

    A schedule that an operator has stored stays unchanged; return the names of these. A schedule that was declared for
    one of this program's `tasks`, but is no longer declared, is retired.
    """
    declared = {schedule.name: schedule for schedule in schedules}
    async with connection.transaction():
        stored, now = await _aio_stored(connection, sorted(declared), tasks)
        others = [name for name in declared if name in stored and stored[name].origin != "code"]
        new = [one for name, one in declared.items() if name not in others and not _is_same(stored.get(name), one)]
        await _aio_store_schedules(connection, new, stored, now, ("code", worker))
        gone = [name for name in stored if name not in declared]
        if gone:
            await connection.execute(_RETIRE, gone)
            await connection.execute(TELL)
    return others


async def aio_of_unknown_tasks(connection: Any, schedules: Sequence[Schedule]) -> list[Schedule]:
    """Return the schedules whose task no process has declared (asyncio-flavored). A program with it may start later."""
    tasks = sorted({schedule.task for schedule in schedules})
    unknown = {record["task"] for record in await connection.fetch(_UNKNOWN, tasks)} if tasks else ()
    return [schedule for schedule in schedules if schedule.task in unknown]


async def aio_put_schedule(connection: Any, schedule: Schedule, operator: str) -> None:
    """Store an operator's schedule in the current transaction (asyncio-flavored)."""
    stored, now = await _aio_stored(connection, [schedule.name], [])
    await _aio_store_schedules(connection, [schedule], stored, now, ("operator", operator))


async def _aio_stored(
    connection: Any, names: Sequence[str], tasks: Sequence[str]
) -> tuple[dict[str, _Stored], datetime]:
    """Return the schedules of these names and the declared ones of these tasks, locked, and the server's time."""
    records = await connection.fetch(_OF_TASKS, list(names), list(tasks))
    stored = {
        record["name"]: _Stored(
            stored_json(record["spec"]),
            record["origin"],
            record["stored_at"],
            record["next_at"],
            record["retired_at"] is not None,
        )
        for record in records
    }
    return stored, await connection.fetchval("SELECT statement_timestamp()")


async def _aio_store_schedules(
    connection: Any,
    schedules: Sequence[Schedule],
    stored: Mapping[str, _Stored],
    now: datetime,
    origin: tuple[str, str],
) -> None:
    if not schedules:
        return
    rows = [(one.name, spec_text(one), one.task, _next_at(one, stored.get(one.name), now)) for one in schedules]
    await connection.execute(_STORE, *map(list, zip(*rows, strict=True)), *origin)
    changed = [one.name for one in schedules if one.name in stored]
    if changed:
        _, stored_by = origin
        await connection.execute(_EVENT, changed, "changed", msgspec.json.encode({"by": stored_by}).decode())
    await connection.execute(TELL)


def _next_at(schedule: Schedule, former: _Stored | None, now: datetime) -> datetime | None:
    """Return the next time: unchanged, or computed from now on if its times have changed or it was retired."""
    if former is None:
        return schedule.next_after(schedule.times(now), now)
    if not former.retired and _timing(schedule.name, former.spec) == schedule.timing:
        return former.next_at
    return schedule.next_after(schedule.times(former.stored_at), now)


def _timing(name: str, spec: Mapping[str, Any]) -> tuple[object, ...] | None:
    """Return the values that determine its times; None if the spec cannot be read."""
    try:
        return Schedule.of_spec(name, spec).timing
    except BadRequest:
        return None


def _is_same(former: _Stored | None, schedule: Schedule) -> bool:
    return former is not None and not former.retired and msgspec.json.decode(spec_text(schedule)) == former.spec


@lru_cache(KNOWN)
def read_spec(name: str, spec: str) -> Schedule:
    """Return the schedule of a row. Raises `BadRequest` if this program cannot read it."""
    return Schedule.of_spec(name, stored_json(spec))


def spec_text(schedule: Schedule) -> str:
    """Return the spec of a schedule as JSON text."""
    return msgspec.json.encode(schedule.spec()).decode()
