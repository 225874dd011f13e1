"""Statistics of runs over HTTP (R3): how many ended, how, and how long they took."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import Instant, about
from dataloader.jobs.run_stats import RunStatsPage, Span, StatsFilter
from dataloader.web import shown
from dataloader.web.api.job_fields import QueueName, TaskName
from dataloader.web.auth import Role
from dataloader.web.paging import Limit, PageQuery, page_answer
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()

_NAMES: Final = {"begin": "from", "end": "to"}
_DAY: Final = timedelta(days=1)


class StatsQuery(PageQuery, kw_only=True, rename=_NAMES):
    """A page of statistics, by time, queue, task and outcome."""

    limit: Limit = 1_000
    begin: (
        Annotated[Instant, about("The hour or day in which it lies is the first; a day ago if not given.")] | None
    ) = None
    end: Annotated[Instant, about("Hours that begin before it; all if not given.")] | None = None
    queue: QueueName | None = None
    task: TaskName | None = None
    by: Annotated[Span, about("What a row sums up: an hour, a day in UTC, or the whole time.")] = "hour"


@routes.add("GET", "/api/v1/stats", role=Role.READ, query=StatsQuery, answers={200: RunStatsPage}, pages=True)
async def list_stats(call: Call, query: StatsQuery) -> Answer:
    """List how many runs ended, by time, queue, task and outcome, and how long they took; no job is read."""
    try:
        wanted = StatsFilter(
            begin=query.begin or datetime.now(UTC) - _DAY,
            end=query.end,
            queue=query.queue,
            task=query.task,
            by=query.by,
        )
    except BadRequest as error:
        raise BadRequest(_NAMES.get(error.field, error.field), error.message.replace("begin", "from")) from None
    page = await call.jobs.stats(wanted, limit=query.limit, after=query.after)
    return page_answer(call, RunStatsPage(list(map(shown.stats, page.stats)), page.next))
