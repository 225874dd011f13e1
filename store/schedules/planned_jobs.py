"""Last jobs of schedules for their pages: the end of each planned time's job."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.states import Status
from dataloader.store.connection.bridge import Database

_LAST: Final = """
SELECT s.name, j.* FROM unnest($1::text[]) AS s (name) CROSS JOIN LATERAL (
  SELECT job_id, status::text AS status, planned_at, finished_at FROM dl_jobs
  WHERE schedule = s.name AND planned_at IS NOT NULL ORDER BY planned_at DESC LIMIT $2
) AS j ORDER BY s.name, j.planned_at
"""


@attrs.frozen(kw_only=True)
class PlannedJob:
    """Job of a planned time."""

    job_id: UUID
    status: Status
    planned_at: datetime
    finished_at: datetime | None


async def last_planned_jobs(database: Database, names: Sequence[str], *, number: int) -> dict[str, list[PlannedJob]]:
    """Return the jobs of the newest `number` planned times of each schedule, oldest first."""
    rows = await database.run(_aio_last, list(names), number)
    jobs: dict[str, list[PlannedJob]] = {name: [] for name in names}
    for row in rows:
        fields = dict(row)
        jobs[fields.pop("name")].append(PlannedJob(**fields | {"status": Status(fields["status"])}))
    return jobs


async def _aio_last(connection: Any, names: list[str], number: int) -> list[Any]:
    return list(await connection.fetch(_LAST, names, number))
