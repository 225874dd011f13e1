"""Statistics of runs, by task and hour or day: numbers, outcomes and durations."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Literal

import attrs
from msgspec import Meta, Struct

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.run_stats import RunOutcome, Span, StatsFilter
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.queue.task_sums import TaskSums, first_of, newest_sums, sums_of_tasks
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit
from dataloader.web.pages.wall_times import field_of_instant, instant_of_field

pages: Final = PageRoutes()

MOST_SUMS: Final = 10_000
"""Maximum number of sums per task, time and outcome that a page reads; beyond it, it asks for a narrower filter."""
MOST_TASKS: Final = 30
MOST_LINES: Final = 100
"""Lines of the table by time."""
DAYS_BY_HOUR: Final = 3
MOST_DAYS: Final = 366
REFRESH_S: Final = 10.0
WENT_WRONG: Final = frozenset({RunOutcome.FAILED, RunOutcome.LOST, RunOutcome.EXPIRED, RunOutcome.RETRIED})
_FIRST: Final = datetime(1900, 1, 1, tzinfo=UTC)
_STEPS: Final = {"hour": timedelta(hours=1), "day": timedelta(days=1)}


class StatsQuery(Struct, forbid_unknown_fields=True, kw_only=True, rename={"begin": "from", "end": "to"}):
    """Filter of runs. `begin` and `end` are by the clock of the displayed zone."""

    begin: str | None = None
    end: str | None = None
    queue: Annotated[str, Meta(min_length=1)] | None = None
    task: Annotated[str, Meta(min_length=1)] | None = None
    by: Literal["hour", "day"] | None = None
    table: bool = False


@attrs.frozen
class TaskLine:
    """Task: its name without secrets, its sums, and the bars of its times."""

    shown: str
    whole: TaskSums
    bars: list[tuple[int, int]]


@pages.show("/stats", query=StatsQuery)
async def show_stats(visit: Visit, query: StatsQuery) -> PageAnswer:
    """Show how many runs ended, by task and time, and their durations. No job is read."""
    tz = visit.preferences.tz
    now = datetime.now(UTC)
    end = instant_of_field("to", query.end, tz)
    until = end or now
    begin = instant_of_field("from", query.begin, tz) or max(until, _FIRST) - timedelta(days=1)
    span = until - begin
    if not timedelta() < span <= timedelta(days=MOST_DAYS):
        raise BadRequest("to", f"must be after `from`, by at most {MOST_DAYS} days")
    by: Span = query.by or ("hour" if span <= timedelta(days=DAYS_BY_HOUR) else "day")
    wanted = StatsFilter(begin=begin, end=end, queue=query.queue, task=query.task, by=by)
    database = visit.services.database
    found = await sums_of_tasks(database, wanted, wrong=WENT_WRONG, most=MOST_SUMS, limit=MOST_TASKS)
    lines: Sequence[TaskSums] = ()
    if query.table:
        lines = await newest_sums(database, wanted, wrong=WENT_WRONG, most=MOST_SUMS, limit=MOST_LINES)
    times = _number_of_periods(begin, until, by)
    values = {
        "query": query,
        "by": by,
        "begin": first_of(begin, by),
        "from_text": field_of_instant(begin, tz) if query.begin else "",
        "to_text": field_of_instant(end, tz),
        "tasks": [_line_of_task(one, times) for one in found.tasks],
        "count": found.count,
        "lines": [(one.at, masked(one).task, one) for one in lines],
        "whole": found.is_whole,
        "most_lines": MOST_LINES,
        "most_tasks": MOST_TASKS,
    }
    # Past statistics no longer change.
    return HtmlPage("stats.html", "Statistics", values, refresh_s=REFRESH_S if end is None or end > now else None)


def _number_of_periods(begin: datetime, end: datetime, by: Span) -> int:
    """Return the number of hours or days, in UTC, that overlap the span."""
    return -((first_of(begin, by) - end) // _STEPS[by])


def _line_of_task(whole: TaskSums, times: int) -> TaskLine:
    """Return a task's line with a bar for each of `times` periods."""
    bars = [(0, 0)] * times
    for place, runs, wrong in whole.parts:
        # Runs that end while the page is created may be after its end.
        if place < times:
            bars[place] = (runs - wrong, wrong)
    return TaskLine(masked(whole).task, whole, bars)
