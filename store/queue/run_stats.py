"""Statistics of runs in the database (R3): processes append sums, the pruner folds them by hour, readers read both.

Once a second, a process appends a row with the sum of ended runs for each queue, task and outcome. The reaper appends
one for the runs that it ends. A row written by the statement of the finish was tried and rejected: it made a batch of
64 slower by 5 to 10 %, and a single finish by more. A process that is killed or loses its database loses the sums of
its last second; nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.model import check_between
from dataloader.jobs.page_cursor import After
from dataloader.jobs.run_stats import BY_RUN, RunOutcome, RunStats, RunStatsPage, RunSum, StatsFilter
from dataloader.store.connection.bridge import Database

Key = tuple[str, str, str]
"""Queue, task and outcome of runs."""
FOLDED: Final = 20_000
"""Number of appended rows that one statement folds."""

_ADD: Final = """
INSERT INTO dl_run_stats_new (queue, task, outcome, runs, total_s, max_s)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::float8[], $6::float8[])
"""

SANE: Final = f"""
runs BETWEEN 1 AND 1000000000000 AND total_s BETWEEN 0 AND 1e15 AND max_s BETWEEN 0 AND 1e15
AND outcome IN ({", ".join(f"'{outcome}'" for outcome in RunOutcome)})
"""
"""Condition for rows that are summed.

Invalid rows, which another program wrote, are left out: they could overflow a sum.
"""

# Rows are read in their physical order, so the only possible plan, and the best, is a scan of the table.
_FOLD: Final = f"""
WITH gone AS (
  DELETE FROM dl_run_stats_new WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM dl_run_stats_new LIMIT $1 FOR UPDATE SKIP LOCKED))
  RETURNING at, queue, task, outcome, runs, total_s, max_s
), folded AS (
  INSERT INTO dl_run_stats AS s (hour, queue, task, outcome, runs, total_s, max_s)
  SELECT date_trunc('hour', at, 'UTC') AS hour, queue, task, outcome, sum(runs), sum(total_s), max(max_s)
  FROM gone WHERE {SANE} AND at BETWEEN '2000-01-01Z' AND now() + interval '1 day'
  GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
  ON CONFLICT (hour, queue, task, outcome) DO UPDATE
  SET runs = s.runs + excluded.runs, total_s = s.total_s + excluded.total_s, max_s = greatest(s.max_s, excluded.max_s)
)
SELECT count(*) FROM gone
"""

_SPANS: Final = {"hour": "{0}", "day": "date_trunc('day', {0}, 'UTC')", "total": "$1::timestamptz"}
_PAGE: Final = """
SELECT at, queue, task, outcome, sum(runs)::bigint AS runs, sum(total_s) AS total_s, max(max_s) AS max_s
FROM (
  SELECT {folded} AS at, queue, task, outcome, runs, total_s, max_s FROM dl_run_stats
  WHERE hour >= $1 AND hour < coalesce($2::timestamptz, 'infinity')
    AND ($3::text IS NULL OR queue = $3) AND ($4::text IS NULL OR task = $4)
  UNION ALL
  SELECT {appended}, queue, task, outcome, runs, total_s, max_s FROM dl_run_stats_new
  WHERE at >= $1 AND at < coalesce($2::timestamptz, 'infinity')
    AND ($3::text IS NULL OR queue = $3) AND ($4::text IS NULL OR task = $4)
) AS both_tables
WHERE {sane} AND (at, queue, task, outcome) > ($5::timestamptz, $6::text, $7::text, $8::text)
GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4 LIMIT $9
"""
_STATEMENTS: Final = {
    by: _PAGE.format(sane=SANE, folded=span.format("hour"), appended=span.format("date_trunc('hour', at, 'UTC')"))
    for by, span in _SPANS.items()
}
# The statement scans the requested hours, and sums and sorts them.
_AS_A_WALK: Final = (
    "SET LOCAL plan_cache_mode = force_custom_plan; SET LOCAL enable_seqscan = on; SET LOCAL enable_sort = on"
)
_BEGINNING: Final = "SELECT date_trunc($1, $2::timestamptz, 'UTC')"


async def aio_add_run_stats(connection: Any, sums: Mapping[Key, RunSum]) -> None:
    """Append the sums of runs that have just ended (asyncio-flavored)."""
    rows = [(*key, one.runs, one.total_s, one.max_s) for key, one in sums.items()]
    await connection.execute(_ADD, *map(list, zip(*rows, strict=True)))


async def fold_run_stats(database: Database) -> int:
    """Fold a batch of appended rows into those of their hours; return their number."""
    return await database.write(_aio_fold)


async def _aio_fold(connection: Any) -> int:
    folded: int = await connection.fetchval(_FOLD, FOLDED)
    return folded


async def list_run_stats(
    database: Database, wanted: StatsFilter, *, limit: int = 1_000, after: After = None
) -> RunStatsPage:
    """Return a page of at most `limit` (1 to 1,000) rows, without reading jobs.

    It begins behind `after`, the `next` of the previous page. Raises `BadRequest`.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    behind = None if after is None else BY_RUN.key(after)
    records = await database.run(_aio_list_stats, wanted, limit + 1, behind)
    return RunStatsPage(*BY_RUN.page([_stats(record) for record in records], limit, _key))


async def _aio_list_stats(
    connection: Any, wanted: StatsFilter, limit: int, behind: tuple[datetime, str, str, str] | None
) -> list[Any]:
    async with connection.transaction(readonly=True):
        begin = await connection.fetchval(_BEGINNING, "day" if wanted.by == "day" else "hour", wanted.begin)
        await connection.execute(_AS_A_WALK)
        if behind is not None:
            page_begin, *_ = behind
            begin = max(begin, page_begin)
        values = (begin, wanted.end, wanted.queue, wanted.task, *(behind or (begin, "", "", "")), limit)
        return list(await connection.fetch(_STATEMENTS[wanted.by], *values))


def _stats(record: Any) -> RunStats:
    runs, total_s = record["runs"], record["total_s"]
    return RunStats(
        at=record["at"],
        queue=record["queue"],
        task=record["task"],
        outcome=RunOutcome(record["outcome"]),
        runs=runs,
        total_s=total_s,
        mean_s=total_s / runs,
        max_s=record["max_s"],
    )


def _key(one: RunStats) -> tuple[datetime, str, str, str]:
    return one.at, one.queue, one.task, one.outcome
