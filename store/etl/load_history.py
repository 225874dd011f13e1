"""Data for the pages of loads, besides the watermark: their last runs, the rows written per day, their queue."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime
from typing import Annotated, Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.secrets.record_masks import FIXED_WORD, Sensitive
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.fetching import aio_fetch, aio_fetchval
from dataloader.store.etl.run_status import as_job
from dataloader.store.etl.run_views import WRITTEN

MOST_RUNS: Final = 500
MOST_SEGMENTS: Final = 20_000
"""Maximum number of segments that are summed up by day, from the newest `MOST_RUNS` runs."""

_RUNS: Final = f"""
SELECT n.load, r.* FROM unnest($1::text[]) AS n (load) CROSS JOIN LATERAL (
  SELECT t.run_id, {as_job("t")} FROM dl_etl_tasks t JOIN dl_jobs j ON j.job_id = t.run_id
  WHERE t.task = n.load AND t.started_at IS NOT NULL ORDER BY t.started_at DESC LIMIT $2
) AS r ORDER BY n.load, r.started_at
"""
_DAYS: Final = f"""
WITH runs AS MATERIALIZED (
  SELECT run_id FROM dl_etl_tasks WHERE task = $1 AND started_at IS NOT NULL ORDER BY started_at DESC LIMIT {MOST_RUNS}
), segments AS MATERIALIZED (
  SELECT s.committed_at, s.counts FROM runs JOIN dl_etl_segments s ON s.run_id = runs.run_id AND s.task = $1
  WHERE s.committed_at >= $2 LIMIT {MOST_SEGMENTS}
)
SELECT (s.committed_at AT TIME ZONE 'UTC')::date AS day, count(*) AS segments, sum(w.rows)::bigint AS rows
FROM segments s CROSS JOIN LATERAL (
  SELECT coalesce(sum(value::numeric), 0) AS rows FROM jsonb_each_text(s.counts) WHERE key = ANY ($3::text[])
) AS w GROUP BY 1 ORDER BY 1
"""
# The task's own queue, else the queue of its last run.
_QUEUE: Final = """
SELECT coalesce((SELECT queue FROM dl_tasks WHERE task = $1), (
  SELECT j.queue FROM dl_etl_tasks t JOIN dl_jobs j ON j.job_id = t.run_id
  WHERE t.task = $1 AND t.started_at IS NOT NULL AND j.task = $1 ORDER BY t.started_at DESC LIMIT 1))
"""


@attrs.frozen(kw_only=True)
class LoadRun:
    """Run of a load, by itself or in a flow."""

    run_id: UUID
    status: Annotated[str, FIXED_WORD]
    started_at: datetime
    finished_at: datetime | None
    reason: Sensitive[str | None]
    counts: Sensitive[dict[str, Any]]

    @property
    def written(self) -> int:
        """Number of rows that it has written."""
        return written(self.counts)


@attrs.frozen
class LoadDay:
    """Committed segments and rows of a day in UTC."""

    day: date
    segments: int
    rows: int


def written(counts: dict[str, Any]) -> int:
    """Return the number of written rows: the sum of the counts in `WRITTEN`."""
    return sum(number for name in WRITTEN if isinstance(number := counts.get(name), int))


async def last_runs_of_loads(database: Database, loads: Sequence[str], *, number: int) -> dict[str, list[LoadRun]]:
    """Return the newest `number` runs of each load, oldest first."""
    found: dict[str, list[LoadRun]] = {load: [] for load in loads}
    for row in await database.run(aio_fetch, _RUNS, list(loads), number):
        fields = dict(row)
        found[fields.pop("load")].append(LoadRun(**fields))
    return found


async def days_of_load(database: Database, load: str, since: datetime) -> list[LoadDay]:
    """Return the days since then on which rows were written, within `MOST_RUNS` and `MOST_SEGMENTS`."""
    rows = await database.run(aio_fetch, _DAYS, load, since, list(WRITTEN))
    return [LoadDay(**row) for row in rows]


async def queue_of_load(database: Database, load: str) -> str | None:
    """Return the queue of a load's jobs: the task's own, else that of the last run; None if it is unknown."""
    queue: str | None = await database.run(aio_fetchval, _QUEUE, load)
    return queue
