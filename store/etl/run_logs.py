"""A run's log as its page reads it: only one task's lines, only the run's own, or all in order.

Tasks run one after another, so the lines of one are together among the events of the job, in one range for each
attempt; `dl_etl_logs`, written with the lines, has the ranges. A block is read in pages within its ranges. Lines that
an older program has kept have no range: they are searched among all events of the job.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.listings import LEVELS, Level, LogLine
from dataloader.jobs.load_listings import RunNotFound
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.job_logs import ATTEMPTS, LEVEL_OF_EVENT, line_of
from dataloader.store.queue.reads import shown

MAX_LINES: Final = 500
"""Maximum number of lines of a page."""
MAX_EVENTS: Final = 30_000
"""Maximum number of the job's events that one page reads: all events of most runs."""
LONGEST_LINE: Final = 16 << 10
"""Maximum size in bytes of a line as PostgreSQL writes it: ours are shorter; of a longer one the beginning is shown."""
_ALL: Final = (0, 2**63 - 1)

_RANGES: Final = """
SELECT t.task, l.first_event, l.last_event
FROM dl_etl_tasks t LEFT JOIN dl_etl_logs l ON l.run_id = t.run_id AND l.task = t.task
WHERE t.run_id = $1 AND t.ordinal = $2 ORDER BY l.first_event
"""
_EVENTS: Final = """
FROM dl_job_events WHERE job_id = $1 AND event_id > $2 AND event_id <= $3 ORDER BY event_id
"""
_LINES: Final = f"""
SELECT event_id, ts, kind, {LEVEL_OF_EVENT} AS level, {shown("payload", LONGEST_LINE)}
FROM (SELECT event_id, ts, kind, payload {_EVENTS} LIMIT {MAX_EVENTS}) AS looked_at
WHERE (kind = 'log' AND CASE WHEN payload -> 'fields' ->> 'load' IS NULL THEN $5
                             ELSE payload -> 'fields' ->> 'load' = ANY ($4) OR $4 IS NULL END
       OR $5 AND kind IN {ATTEMPTS} AND payload ->> 'reason' IS DISTINCT FROM 'lock_key')
  AND ($6::text[] IS NULL OR {LEVEL_OF_EVENT} = ANY ($6))
  AND ($7::text IS NULL OR kind <> 'log' OR position(lower($7) IN lower(payload ->> 'message')) > 0
       OR position(lower($8) IN lower((payload -> 'fields')::text)) > 0)
ORDER BY event_id LIMIT $9
"""
_LAST_LOOKED_AT: Final = f"SELECT event_id {_EVENTS} OFFSET {MAX_EVENTS - 1} LIMIT 1"


@attrs.frozen(kw_only=True)
class LinesWanted:
    """Filter for the lines of a run. `task`: only those of the task with this number.

    `tasks`: only those of tasks with these names; None: of all. `own`: those of no task, and the run's attempts.
    `level`: those of this level or a more serious one. `text`: those that may have it; a reader masks them, and
    searches again.
    """

    task: int | None = None
    tasks: Sequence[str] | None = None
    own: bool = True
    level: Level | None = None
    text: str | None = None


@attrs.frozen
class LinePage:
    """Lines in order. `after`: the number after which the next page begins; None: there are no more yet."""

    lines: list[LogLine]
    after: int | None


async def read_lines(database: Database, run_id: UUID, wanted: LinesWanted, *, after: int, limit: int) -> LinePage:
    """Return a page of a run's log: at most `limit` lines after the event `after`.

    Raises `RunNotFound` if the run or the task is unknown.
    """
    return await database.run(_aio_read_lines, run_id, wanted, after, limit)


async def _aio_read_lines(connection: Any, run_id: UUID, wanted: LinesWanted, after: int, limit: int) -> LinePage:
    ranges = [_ALL]
    if wanted.task is not None:
        found = await connection.fetch(_RANGES, run_id, wanted.task)
        if not found:
            raise RunNotFound(f"no run {run_id} has a task with the number {wanted.task}")
        wanted = attrs.evolve(wanted, tasks=[found[0]["task"]], own=False)
        if found[0]["first_event"] is not None:
            ranges = [(row["first_event"], row["last_event"]) for row in found]
    lines: list[LogLine] = []
    for first, last in ranges:
        if last <= after:
            continue
        behind = max(after, first - 1)
        found = await connection.fetch(_LINES, run_id, behind, last, *_filter(wanted), limit + 1 - len(lines))
        lines += map(line_of, found)
        if len(lines) > limit:
            return LinePage(lines[:limit], lines[limit - 1].event_id)
        if last - behind > MAX_EVENTS:
            looked_at = await connection.fetchval(_LAST_LOOKED_AT, run_id, behind, last)
            if looked_at is not None:
                return LinePage(lines, looked_at)
    return LinePage(lines, None)


def _filter(wanted: LinesWanted) -> tuple[object, ...]:
    levels = None if wanted.level is None else LEVELS[LEVELS.index(wanted.level) :]
    in_json = None if wanted.text is None else json.dumps(wanted.text, ensure_ascii=False)[1:-1]
    tasks = None if wanted.tasks is None else list(wanted.tasks)
    return tasks, wanted.own, levels, wanted.text, in_json
