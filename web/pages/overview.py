"""Overview page: problems, each with a link; counts, running jobs, and ended jobs per hour."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Final, Literal

import attrs
from markupsafe import Markup

from dataloader.jobs.model import QueueRecord
from dataloader.jobs.secrets.masking import mask, mask_text
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.queue.depths import Depths
from dataloader.store.queue.overview import ERRORS, LONG_S, MOST, Overview, TroubledSchedule, read_overview
from dataloader.web.pages.addresses import HOME
from dataloader.web.pages.formats import at_least, in_zone
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer, Redirect
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.progress import progress_of
from dataloader.web.pages.svg import hourly
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

REFRESH_S: Final = 5.0
_EACH: Final = 10
"""Maximum number of queues of one kind that are named."""
_LONGEST: Final = 60
_QUEUES: Final = 10
"""Number of queues on the first page, those with the most jobs."""
_DOING: Final = {"init": "starting", "running": "running", "error": "in error"}
"""Statuses of durable processes in words."""


@attrs.frozen(kw_only=True)
class Concern:
    """Problem as a sentence: a link, the problem, and `when` it began or last occurred.

    action: the label of the button, which leads to the same page.
    """

    level: Literal["bad", "warn"]
    href: str
    label: str
    says: str
    action: str
    when: str | None = None
    at: datetime | None = None
    by: str | None = None


@pages.show("/")
async def lead_to_overview(_visit: Visit) -> PageAnswer:
    """Redirect to the same page without the trailing slash."""
    return Redirect(HOME)


@pages.show("")
async def show_overview(visit: Visit) -> PageAnswer:
    """Show the problems and the state of the service."""
    depths, overview = await read_overview(visit.services.database)
    concerns = [*_of_queues(visit, depths), *_of_tasks(visit, depths, overview), *_of_schedules(visit, overview)]
    concerns += [*_of_errors(visit, overview), *_of_durable(visit, overview), *_of_processes(visit, overview)]
    values = {
        "depths": depths,
        "concerns": sorted(concerns, key=lambda one: one.level),
        "counts": _counts(depths),
        "failed": at_least(overview.failed, ERRORS),
        "running": [
            (
                job,
                masked(job),
            )
            for job in overview.running
        ],
        "processes": [(one.status, _DOING[one.status], at_least(one.processes, MOST)) for one in overview.processes],
        "hours": overview.hours,
        "charts": _charts(visit, overview),
        "waiting_of": _waiting_in,
        "queues": [(record, masked(record)) for record in _busiest(depths)],
        "queue_count": len(depths.queues),
        "next_schedules": [(one, mask_text(one.name)) for one in overview.next_schedules],
        "runs": [(one, mask_text(one.name), progress_of(mask(one.progress))) for one in overview.runs],
    }
    return HtmlPage("overview.html", "Overview", values, refresh_s=REFRESH_S)


def _link(visit: Visit, path: str, **query: object) -> str:
    return visit.link(path, query)


def _short_name(text: str) -> str:
    """Return the beginning of a masked name, for a sentence."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _jobs_concern(number: int) -> str:
    return "1 waiting job" if number == 1 else f"{number:,} waiting jobs"


def _of_queues(visit: Visit, depths: Depths) -> Iterator[Concern]:
    waiting = [
        (queue, number)
        for queue in depths.queues
        if (number := queue.ready + queue.delayed + queue.blocked + queue.limited) and queue.queue
    ]
    for queue, number in [one for one in waiting if one[0].paused][:_EACH]:
        pause = depths.paused[queue.queue]
        yield Concern(
            level="warn",
            href=_link(visit, "/ui/queue", name=queue.queue),
            label=f"Queue {_short_name(masked(queue).queue)}",
            says=f"is paused: {_jobs_concern(number)}",
            action="Open queue",
            when="paused",
            at=pause.at,
            by=masked(pause).by,
        )
    for queue, number in [one for one in waiting if not one[0].paused and not one[0].workers][:_EACH]:
        yield Concern(
            level="bad",
            href=_link(visit, "/ui/queue", name=queue.queue),
            label=f"Queue {_short_name(masked(queue).queue)}",
            says=f"has no worker: {_jobs_concern(number)}",
            action="Open queue",
            when="the oldest became ready",
            at=queue.oldest_ready_at,
        )


def _of_tasks(visit: Visit, depths: Depths, overview: Overview) -> Iterator[Concern]:
    lasting = [
        one
        for one in depths.unknown_tasks
        if one.since is None or depths.at is None or depths.at - one.since > timedelta(seconds=LONG_S)
    ]
    for one in lasting[:_EACH]:
        shown = masked(one)
        yield Concern(
            level="bad",
            href=_link(visit, "/ui/jobs", queue=one.queue, task=one.task, status="queued"),
            label=f"Task {_short_name(shown.task)}",
            says=f"has no worker in the queue {_short_name(shown.queue)}: {_jobs_concern(one.jobs)}",
            action="Show jobs",
            when="the oldest was created",
            at=one.since,
        )
    for task in overview.paused_tasks:
        shown_task = masked(task)
        yield Concern(
            level="warn",
            href=_link(visit, "/ui/task", name=task.task),
            label=f"Task {_short_name(shown_task.task)}",
            says=f"is paused: {_jobs_concern(task.jobs)}",
            action="Open task",
            when=None if task.since is None else "paused",
            at=task.since,
            by=shown_task.by,
        )


def _of_schedules(visit: Visit, overview: Overview) -> Iterator[Concern]:
    for one in overview.schedules[: 3 * _EACH]:
        yield Concern(
            level="warn" if one.what == "missed" else "bad",
            href=_link(visit, "/ui/schedule", name=one.name),
            label=f"Schedule {_short_name(masked(one).name)}",
            says=_trouble_words(one),
            action="Open schedule",
            when={"paused": None, "late": "due", "missed": "noted"}[one.what],
            at=one.since,
        )


def _trouble_words(one: TroubledSchedule) -> str:
    match one.what:
        case "paused":
            return f"was paused automatically: {masked(one).why or 'a failure'}"
        case "late":
            return "is late: no process enqueues its jobs"
        case _:
            return f"has missed {one.times} planned {'time' if one.times == 1 else 'times'} since yesterday"


def _of_errors(visit: Visit, overview: Overview) -> Iterator[Concern]:
    for one in overview.errors:
        shown = masked(one)
        yield Concern(
            level="bad",
            href=_link(visit, f"/ui/errors/{one.group}"),
            label=_short_name(shown.error) or "(no text)",
            says=f"– {_failed(one.failures)}, of {_short_name(shown.task)}",
            action="Show error",
            when="the last",
            at=one.since,
        )


def _failed(number: int) -> str:
    # A retried job fails more than once.
    return f"{at_least(number, ERRORS)} {'failure' if number == 1 else 'failures'} in the last hour"


def _of_durable(visit: Visit, overview: Overview) -> Iterator[Concern]:
    for one in overview.processes:
        if one.status == "error":
            number = at_least(one.processes, MOST)
            yield Concern(
                level="bad",
                href=_link(visit, "/ui/processes/errors"),
                label=f"{number} durable {'process' if number == '1' else 'processes'}",
                action="Show errors",
                says=f"{'is' if number == '1' else 'are'} in error, until repaired or resumed",
            )


def _of_processes(visit: Visit, overview: Overview) -> Iterator[Concern]:
    for one in overview.gone:
        yield Concern(
            level="warn",
            href=_link(visit, "/ui/workers"),
            label=f"Process {_short_name(masked(one).worker)}",
            says="ended without signing off",
            action="Show workers",
            when="last seen",
            at=one.since,
        )


def _counts(depths: Depths) -> dict[str, Any]:
    queues = depths.queues
    return {
        "waiting": sum(map(_waiting_in, queues)),
        "running": sum(queue.running for queue in queues),
        "slots": sum(queue.slots for queue in queues),
        "oldest": min((queue.oldest_ready_at for queue in queues if queue.oldest_ready_at), default=None),
    }


def _busiest(depths: Depths) -> list[QueueRecord]:
    """Return the queues with the most jobs, by name."""
    named = [queue for queue in depths.queues if queue.queue]
    busiest = sorted(named, key=lambda one: -(_waiting_in(one) + one.running))[:_QUEUES]
    return sorted(busiest, key=lambda one: one.queue)


def _waiting_in(queue: QueueRecord) -> int:
    return queue.ready + queue.delayed + queue.blocked + queue.unknown_task + queue.dependent + queue.limited


@attrs.frozen
class HourlyChart:
    """Chart of the last hours: its title, the sum, and the drawing."""

    title: str
    total: int
    words: str
    drawing: Markup


def _charts(visit: Visit, overview: Overview) -> list[HourlyChart]:
    """Return charts of ended and failed jobs per hour, each with its own scale."""
    hours = overview.hours
    names = [in_zone(one.hour, visit.preferences.tz).strftime("%H:%M") for one in hours]
    ended = [one.succeeded + one.failed + one.canceled for one in hours]
    failed = [one.failed for one in hours]
    told = f"in each of the last {len(hours)} hours"
    return [
        HourlyChart(title, sum(numbers), words, hourly(list(zip(names, numbers, strict=True)), said, kind=kind))
        for title, numbers, words, kind, said in (
            ("Ended", ended, "jobs in 24 h", "run", f"Jobs that ended {told}, {sum(ended):,} in all"),
            ("Failed", failed, "jobs in 24 h", "bad", f"Jobs that failed {told}, {sum(failed):,} in all"),
        )
    ]
