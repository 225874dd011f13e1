"""Schedule for its page: its row, its events and its last jobs, read by one statement."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import attrs
import msgspec

from dataloader.jobs.model import MAX_NAME, check_name
from dataloader.jobs.schedule_listings import ScheduleEvent, ScheduleNotFound, ScheduleRecord
from dataloader.jobs.text import listed_json
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.fetching import aio_fetchrow
from dataloader.store.queue.depths import readable
from dataloader.store.schedules.planned_jobs import PlannedJob
from dataloader.store.schedules.schedule_operations import COLUMNS, payload_of, schedule_record

_LIST: Final = "(SELECT coalesce(json_agg(x), '[]') FROM ({sql}) AS x)::text AS {name}"
_EVENTS: Final = """
  SELECT event_id, at, kind, payload FROM dl_schedule_events WHERE name = $1 ORDER BY event_id DESC LIMIT $2
"""
_JOBS: Final = f"""
  SELECT job_id, status, planned_at, {readable("finished_at")} AS finished_at FROM dl_jobs
  WHERE schedule = $1 AND planned_at IS NOT NULL AND isfinite(planned_at) ORDER BY planned_at DESC LIMIT $3
"""
VIEW: Final = f"""
SELECT {COLUMNS}, {_LIST.format(sql=_EVENTS, name="events")}, {_LIST.format(sql=_JOBS, name="jobs")}
FROM dl_schedules WHERE name = $1
"""


class _Event(msgspec.Struct):
    event_id: int
    at: datetime
    kind: str
    payload: Any


@attrs.frozen
class ScheduleView:
    """Schedule, its newest events, and the jobs of its last planned times, newest first."""

    record: ScheduleRecord
    events: Sequence[ScheduleEvent]
    jobs: Sequence[PlannedJob]


async def read_schedule_view(database: Database, name: str, *, events: int, jobs: int) -> ScheduleView:
    """Read the schedule with at most this many `events` and `jobs`. Raises `ScheduleNotFound`."""
    check_name("name", name, MAX_NAME)
    row = await database.run(aio_fetchrow, VIEW, name, events, jobs)
    if row is None:
        raise ScheduleNotFound(f"no schedule has the name {name!r}")
    told = listed_json(row["events"], _Event)
    planned = listed_json(row["jobs"], PlannedJob)
    shown = [
        ScheduleEvent(event_id=one.event_id, at=one.at, kind=one.kind, payload=payload_of(one.payload)) for one in told
    ]
    return ScheduleView(schedule_record(row), shown, planned)
