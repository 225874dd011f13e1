"""The rows of schedules: what processes declare at their start, and what operators see and do (R7)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final

import attrs
import msgspec

from dataloader.jobs.schedules import Schedule

_OF_TASKS: Final = """
SELECT name, spec::text AS spec, origin, stored_at, next_at, retired_at, statement_timestamp() AS now
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
_TELL: Final = "SELECT pg_notify('dl_schedule', '')"


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
    """Store what the processes of `worker`'s program declare (asyncio-flavoured); what is so already is not written.

    A schedule that was put by hand stays as it is: the names of those come back. One that was declared for a task of
    `tasks`, which this program has, and that it does not declare any more, is retired.
    """
    declared = {schedule.name: schedule for schedule in schedules}
    async with connection.transaction():
        records = await connection.fetch(_OF_TASKS, sorted(declared), list(tasks))
        now = records[0]["now"] if records else await connection.fetchval("SELECT statement_timestamp()")
        stored = {
            record["name"]: _Stored(
                msgspec.json.decode(record["spec"]),
                record["origin"],
                record["stored_at"],
                record["next_at"],
                record["retired_at"] is not None,
            )
            for record in records
        }
        rows, changed = [], []
        for name, schedule in declared.items():
            former = stored.get(name)
            if former is not None and (former.origin != "code" or _is_same(former, schedule)):
                continue
            rows.append((name, spec_text(schedule), schedule.task, _next_at(schedule, former, now)))
            if former is not None:
                changed.append(name)
        if rows:
            await connection.execute(_STORE, *map(list, zip(*rows, strict=True)), "code", worker)
        if changed:
            await connection.execute(_EVENT, changed, "changed", msgspec.json.encode({"by": worker}).decode())
        gone = [name for name in stored if name not in declared]
        if gone:
            await connection.execute(_RETIRE, gone)
        if rows or gone:
            await connection.execute(_TELL)
    return [name for name in declared if name in stored and stored[name].origin != "code"]


def _next_at(schedule: Schedule, former: _Stored | None, now: datetime) -> datetime | None:
    """When it is due: as before, or from now on if its times are others or it was retired."""
    if former is None:
        return schedule.next_after(schedule.times(now), now)
    if not former.retired and Schedule.of_spec(schedule.name, former.spec).timing == schedule.timing:
        return former.next_at
    return schedule.next_after(schedule.times(former.stored_at), now)


def _is_same(former: _Stored, schedule: Schedule) -> bool:
    return not former.retired and msgspec.json.decode(spec_text(schedule)) == former.spec


def spec_text(schedule: Schedule) -> str:
    """What makes a schedule again, as JSON text."""
    return msgspec.json.encode(schedule.spec()).decode()
