"""Runs of loads and flows: the list, and one run with its timeline and its log by tasks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import attrs
from msgspec import Meta, Struct

from dataloader.jobs.listings import Level
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.etl.run_views import MOST_FAILURES, RunView, RunViewTask, get_run_view, list_run_lines
from dataloader.web.pages.formats import as_json
from dataloader.web.pages.log_blocks import BlockOfLines, LogFilter, log_as_text, read_block
from dataloader.web.pages.page_answers import Download, HtmlPage, PageAnswer
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.run_timeline import Bar, Line, bar_of
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

PAGE: Final = 50
REFRESH_LIST_S: Final = 2.0
REFRESH_S: Final = 1.0

_WAITS: Final = {
    "pause": "after the pause",
    "retry-after": "after the source's Retry-After",
    "request": "after another run's request",
    "rate-limit": "when the rate limit has a free unit",
    "period": "in the next work period",
    "paused": "when the supplier is resumed",
    "error": "when the supplier's limits are corrected",
}

RunStatus = Literal[
    "running", "succeeded", "succeeded_with_failures", "failed", "canceled", "interrupted", "waiting", "queued", "lost"
]


class RunsPageQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Page of runs, newest first, of one name or one status."""

    name: str | None = None
    status: RunStatus | None = None
    after: str | None = None


class RunPageQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Run, with a filter of its lines, the view by task or in order, the open block, and where the block begins.

    `task` may be repeated; the view reads it itself, since a name may contain a comma. `behind` is an event's number.
    """

    task: str | None = None
    level: Level | None = None
    q: Annotated[str, Meta(max_length=200)] | None = None
    view: Literal["tasks", "all"] = "tasks"
    open: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    behind: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


class RunFailuresQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Page of a run's failures."""

    after: str | None = None


@attrs.frozen
class ShownTask:
    """Task on the page: its real name for links, the masked record, its bar."""

    own: str
    record: RunViewTask
    bar: Bar | None


@pages.show("/runs", query=RunsPageQuery)
async def show_runs(visit: Visit, query: RunsPageQuery) -> PageAnswer:
    """Show the runs of loads and flows, newest first."""
    page = await list_run_lines(
        visit.services.database, name=query.name, status=query.status, limit=PAGE, after=query.after
    )
    runs = [
        (run, shown.name, _args_text(shown.args), shown.reason)
        for run, shown in zip(page.runs, map(masked, page.runs), strict=True)
    ]
    values = {
        "runs": runs,
        "next": page.next,
        "query": query,
        "statuses": RunStatus.__args__,  # type: ignore[attr-defined]
        "many": MOST_FAILURES,
    }
    return HtmlPage("runs.html", "Runs", values, refresh_s=REFRESH_LIST_S)


def _args_text(args: Mapping[str, Any] | None) -> str:
    """Return the args, which distinguish runs of one load: `from=2026-10-12 to=2026-10-16`."""
    named = sorted((args or {}).items())
    return " ".join(f"{name}={value if isinstance(value, str) else as_json(value, None)}" for name, value in named)


@pages.show("/runs/<uuid:run_id>", query=RunPageQuery)
async def show_run(visit: Visit, run_id: UUID, query: RunPageQuery) -> PageAnswer:
    """Show a run: its status, its timeline, and its log: a block for each task, or all lines in order."""
    chosen = visit.arguments.get("task", [])
    wanted = LogFilter(tasks=[task for task in chosen if task], level=query.level, text=query.q)
    block = await _block(visit, run_id, query, wanted)
    if visit.part == "lines":
        return HtmlPage("run.html", "Log", {"block": block})
    run = await get_run_view(visit.services.database, run_id)
    line = Line.of(run)
    shown = masked(run)
    values = {
        "run": shown,
        "tasks": [
            ShownTask(own.task, task, bar_of(task, line, visit.preferences.tz))
            for own, task in zip(run.tasks, shown.tasks, strict=True)
        ],
        "marks": line.marks(visit.preferences.tz),
        "query": query,
        "chosen": frozenset(wanted.tasks),
        "is_narrow": bool(wanted.tasks or wanted.level or wanted.text),
        "block": block,
        "many": MOST_FAILURES,
        "live": _live(shown),
        "has_phases": any(task.phases for task in run.tasks),
    }
    return HtmlPage("run.html", f"{shown.name} · run", values, refresh_s=None if run.is_over else REFRESH_S)


async def _block(visit: Visit, run_id: UUID, query: RunPageQuery, wanted: LogFilter) -> BlockOfLines | None:
    """Return the lines of the page, or of the requested part: of one task, of the run itself, or all."""
    if visit.part not in {None, "lines"}:
        return None
    if query.view == "all":
        return await read_block(visit.services.database, run_id, wanted, None, query.behind)
    if query.open is None:
        return None
    return await read_block(visit.services.database, run_id, wanted, query.open, query.behind)


def _live(run: RunView) -> Mapping[str, Any] | None:
    """Return the live progress of a running load: see `LoadProgress.snapshot`."""
    if run.progress is None or run.is_over:
        return None
    known = {name: value for name, value in run.progress.items() if type(value) is int}
    segment, waits = run.progress.get("segment"), run.progress.get("waiting")
    waits = waits if isinstance(waits, Mapping) else {}
    return {
        **known,
        # Days are named by their midnights.
        "segment": segment.replace("T00:00:00+0000", "") if isinstance(segment, str) and segment else None,
        "load": run.progress.get("load"),
        "waits_for": _WAITS.get(str(waits.get("for")), "when the received answers are processed") if waits else None,
        "waits_until": _instant_of(waits.get("until")),
    }


def _instant_of(text: object) -> datetime | None:
    with suppress(TypeError, ValueError):
        return datetime.fromisoformat(text)  # type: ignore[arg-type]
    return None


@pages.show("/runs/<uuid:run_id>/failures", query=RunFailuresQuery)
async def show_failures(visit: Visit, run_id: UUID, query: RunFailuresQuery) -> PageAnswer:
    """Show the failures of a run, oldest first."""
    run = masked(await get_run_view(visit.services.database, run_id))
    page = await visit.loads.failures_of_run(run_id, after=query.after)
    failures = [(failure.load, masked(failure)) for failure in page.failures]
    # Failures of dimensions are not in the table of failures, but in the task's summary.
    tables = [
        (task, name, table)
        for task in (run.tasks if query.after is None else ())
        for name, table in task.tables.items()
        if isinstance(table, Mapping) and table.get("error")
    ]
    values = {"run": run, "failures": failures, "tables": tables, "next": page.next}
    return HtmlPage("run_failures.html", f"{run.name} · failures", values)


@pages.show("/runs/<uuid:run_id>.txt", query=RunPageQuery, deadline_s=60.0)
async def show_log_as_text(visit: Visit, run_id: UUID, query: RunPageQuery) -> PageAnswer:
    """Return the log as text, in UTC: task by task, or all lines in order."""
    chosen = visit.arguments.get("task", [])
    wanted = LogFilter(tasks=[task for task in chosen if task], level=query.level, text=query.q)
    run = await get_run_view(visit.services.database, run_id)
    data = await log_as_text(visit.services.database, run, wanted, by_task=query.view == "tasks")
    return Download(data=data, media_type="text/plain; charset=utf-8", file_name=f"run-{run_id}.txt")
