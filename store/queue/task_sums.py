"""Sums of the runs of each task for the page of statistics (R3).

The server computes them: one row per task, not per sum. By hour, it reads the hours and the rows that are not folded
yet; by day, the days, and the hours of a day that is not requested as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import attrs

from dataloader.jobs.run_stats import RunOutcome, StatsFilter
from dataloader.jobs.secrets.record_masks import FIXED_WORD, Sensitive
from dataloader.store.connection.bridge import Database

_STEPS_S: Final = {"hour": 3_600, "day": 86_400}
_WANTED: Final = "($3::text IS NULL OR queue = $3) AND ($4::text IS NULL OR task = $4)"
_END: Final = "coalesce($2::timestamptz, 'infinity')"
_HOURS: Final = f"""
  SELECT hour AS at, task, outcome, runs, total_s, max_s FROM dl_run_stats
  WHERE hour >= $1 AND hour < {_END} AND {_WANTED}
"""
_DAYS: Final = f"""
  SELECT day AS at, task, outcome, runs, total_s, max_s FROM dl_run_stats_days
  WHERE day >= $1 AND day < date_trunc('day', {_END}, 'UTC') AND {_WANTED}
  UNION ALL
  SELECT date_trunc('day', $2::timestamptz, 'UTC'), task, outcome, runs, total_s, max_s FROM dl_run_stats
  WHERE hour >= date_trunc('day', $2::timestamptz, 'UTC') AND hour < $2 AND {_WANTED}
"""
_SUMS: Final = """
WITH sums AS MATERIALIZED (
  SELECT task, at, outcome, sum(runs)::bigint AS runs, sum(total_s) AS total_s, max(max_s) AS max_s FROM (
  {folded}
  UNION ALL
  SELECT date_trunc('{by}', at, 'UTC'), task, outcome, runs, total_s, max_s FROM dl_run_stats_new
  WHERE at >= $1 AND at < {end} AND {wanted}
  ) AS of_both GROUP BY 1, 2, 3 ORDER BY 1, 2, 3 LIMIT $5
)
"""
_OF: Final = """
  sum(runs)::bigint AS runs, coalesce(sum(runs) FILTER (WHERE outcome = ANY ($6::text[])), 0)::bigint AS wrong
"""
_OUTCOMES: Final = """
  array_agg(outcome ORDER BY runs DESC, outcome) AS outcomes, array_agg(runs ORDER BY runs DESC, outcome) AS each
"""
_TASKS: Final = f"""
, wholes AS MATERIALIZED (
  SELECT task, {_OF}, sum(total_s) AS total_s, max(max_s) AS max_s FROM sums GROUP BY task
), outcomes AS (
  SELECT task, {_OUTCOMES} FROM (
    SELECT task, outcome, sum(runs)::bigint AS runs FROM sums GROUP BY 1, 2
  ) AS u GROUP BY 1
), parts AS (
  SELECT task, array_agg(place) AS places, array_agg(runs) AS ended, array_agg(wrong) AS not_well FROM (
    SELECT task, (extract(epoch FROM at - $1::timestamptz) / $7::int)::int AS place, {_OF} FROM sums GROUP BY 1, 2
  ) AS u GROUP BY 1
)
SELECT w.*, o.outcomes, o.each, p.places, p.ended, p.not_well,
       (SELECT count(*) FROM wholes) AS tasks, (SELECT count(*) FROM sums) AS sums
FROM (SELECT * FROM wholes ORDER BY runs DESC, task LIMIT $8) AS w
JOIN outcomes o ON o.task = w.task JOIN parts p ON p.task = w.task
ORDER BY w.runs DESC, w.task
"""
_LINES: Final = f"""
SELECT at, task, {_OF}, sum(total_s) AS total_s, max(max_s) AS max_s, {_OUTCOMES}
FROM sums GROUP BY at, task ORDER BY at DESC, task LIMIT $7
"""
_BY: Final = {
    by: _SUMS.format(folded=folded, by=by, end=_END, wanted=_WANTED)
    for by, folded in (("hour", _HOURS), ("day", _DAYS))
}
# The statement scans the requested hours or days, and groups, sorts and joins them.
_AS_A_WALK: Final = (
    "SET LOCAL plan_cache_mode = force_custom_plan; SET LOCAL enable_seqscan = on; SET LOCAL enable_sort = on;"
    " SET LOCAL enable_hashjoin = on"
)


@attrs.frozen(kw_only=True)
class TaskSums:
    """Ended runs of a task.

    Attributes:
        wrong: number of runs that did not end as they should.
        outcomes: outcomes with their numbers, the most frequent first.
        at: the hour or the day of a line.
        parts: for each hour or day with ended runs, its position from the beginning, the number of runs, and the number
            of those that did not end as they should.
    """

    task: Sensitive[str]
    runs: int
    wrong: int
    total_s: float
    max_s: float
    outcomes: Annotated[Sequence[tuple[str, int]], FIXED_WORD]
    at: datetime | None = None
    parts: Sequence[tuple[int, int, int]] = ()

    @property
    def mean_s(self) -> float:
        """Average duration of a run in seconds."""
        return self.total_s / self.runs if self.runs else 0.0

    @property
    def said(self) -> str:
        """Text with the outcomes and their numbers."""
        return ", ".join(f"{outcome} {count:,}" for outcome, count in self.outcomes)


@attrs.frozen
class SumsOfTasks:
    """The tasks with the most runs, of `count` tasks; `is_whole`: whether all sums were read."""

    tasks: Sequence[TaskSums]
    count: int
    is_whole: bool


def first_of(begin: datetime, by: str) -> datetime:
    """Return the beginning of the hour or the day, in UTC, that contains `begin`: the sums start there."""
    at = begin.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    return at.replace(hour=0) if by == "day" else at


async def sums_of_tasks(
    database: Database, wanted: StatsFilter, *, wrong: Collection[RunOutcome], most: int, limit: int
) -> SumsOfTasks:
    """Return the `limit` tasks with the most runs, from at most `most` sums of a task, a time and an outcome."""
    values = (*_values(wanted, wrong, most), _STEPS_S[wanted.by], limit)
    rows = await database.run(_aio_fetch_as_walk, _BY[wanted.by] + _TASKS, values)
    if not rows:
        return SumsOfTasks([], 0, is_whole=True)
    return SumsOfTasks(list(map(_sums, rows)), rows[0]["tasks"], rows[0]["sums"] <= most)


async def newest_sums(
    database: Database, wanted: StatsFilter, *, wrong: Collection[RunOutcome], most: int, limit: int
) -> Sequence[TaskSums]:
    """Return the newest `limit` lines, each for a task in an hour or on a day, from the same sums."""
    rows = await database.run(_aio_fetch_as_walk, _BY[wanted.by] + _LINES, (*_values(wanted, wrong, most), limit))
    return list(map(_sums, rows))


def _values(wanted: StatsFilter, wrong: Collection[RunOutcome], most: int) -> tuple[object, ...]:
    return first_of(wanted.begin, wanted.by), wanted.end, wanted.queue, wanted.task, most + 1, sorted(wrong)


def _sums(row: Any) -> TaskSums:
    return TaskSums(
        task=row["task"],
        runs=row["runs"],
        wrong=row["wrong"],
        total_s=row["total_s"],
        max_s=row["max_s"],
        outcomes=list(zip(row["outcomes"], row["each"], strict=True)),
        at=row.get("at"),
        parts=list(zip(row["places"], row["ended"], row["not_well"], strict=True)) if "places" in row else (),
    )


async def _aio_fetch_as_walk(connection: Any, sql: str, values: tuple[object, ...]) -> list[Any]:
    async with connection.transaction(readonly=True):
        await connection.execute(_AS_A_WALK)
        return list(await connection.fetch(sql, *values))
