"""List of jobs: newest first, filtered by the address, refreshed live."""

from __future__ import annotations

from datetime import datetime
from http import HTTPStatus
from typing import Any, Final

import attrs

from dataloader.jobs.args_pattern import ArgsPattern
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.secrets.record_masks import masked
from dataloader.jobs.states import Status
from dataloader.store.queue.job_facets import (
    SAMPLED,
    JobFacets,
    NamedCount,
    QueueService,
    read_facets,
    read_queue_service,
)
from dataloader.store.queue.job_rows import MOST_COUNTED, SEARCHED, JobRow, JobRows, list_job_rows, search_job_rows
from dataloader.web.pages.addresses import PublicAddress
from dataloader.web.pages.copies import Copy, copies
from dataloader.web.pages.formats import at_least
from dataloader.web.pages.job_choice import STATUSES, JobChoice
from dataloader.web.pages.job_query import id_of, parse_terms
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer, Redirect
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.progress import progress_of
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

PAGE: Final = 50
REFRESH_S: Final = 2.0
_MAX_ERROR: Final = 200


class JobListQuery(JobChoice, kw_only=True):
    """Filter of the list. `q` has more of it in the query language, and is replaced by its values."""

    q: str | None = None


@pages.show("/jobs", query=JobListQuery)
async def show_jobs(visit: Visit, query: JobListQuery) -> PageAnswer:
    """Show the jobs that match the filter. A search of args is not refreshed, since it reads many rows."""
    facets = JobFacets()
    try:
        if query.q is not None:
            return Redirect(_address_of_terms(visit, query))
        found, fault = await _found_jobs(visit, query), None
        if visit.part is None and query.args is None:
            facets = await read_facets(visit.services.database, query.job_filter(visit.preferences.tz))
    except BadRequest as error:
        if visit.part is not None:
            raise
        found, fault = JobRows(), error
    service = await read_queue_service(visit.services.database)
    values: dict[str, Any] = {
        "found": found,
        "jobs": [(row, shown_job_row(row), _why_no_worker(row, service)) for row in found.rows],
        "progress_of": progress_of,
        "facets": [_status_facet(query, facets), *_named_facets(query, facets)],
        "choice": query,
        "given": query.given,
        "chips": list(query.chips),
        "statuses": _statuses(query),
        "count": None if found.count is None else at_least(found.count, MOST_COUNTED),
        "most_searched": SEARCHED,
        "fault": fault,
        "copies": _job_list_copies(visit, query),
    }
    return HtmlPage(
        "jobs.html",
        "Jobs",
        values,
        refresh_s=None if query.args is not None or fault else REFRESH_S,
        status=HTTPStatus.UNPROCESSABLE_ENTITY if fault else HTTPStatus.OK,
    )


def _address_of_terms(visit: Visit, query: JobListQuery) -> str:
    """Return the address of the list with the terms of the filter line. A job's ID leads to the job."""
    terms = parse_terms(query.q or "", visit.preferences.tz)
    if len(terms.words) == 1 and not terms.values and (job_id := id_of(terms.words[0])) is not None:
        return f"/ui/jobs/{job_id}"
    words = {"task": terms.words[0]} if terms.words else {}
    if len(terms.words) > 1:
        raise BadRequest("q", f"has more than one word without a name: {' '.join(terms.words)!r:.60}")
    return PublicAddress().url("/ui/jobs", query.given | words | dict(terms.values))


def _why_no_worker(row: JobRow, service: QueueService) -> str | None:
    """Return why no worker takes a waiting job from its queue, if that is so."""
    if row.status is not Status.QUEUED:
        return None
    if row.queue in service.paused:
        return "its queue is paused"
    return None if row.queue in service.served else f"no worker serves the queue {mask_text(row.queue)}"


@attrs.frozen
class FacetLine:
    """Line of a facet: a value of the filter, its text and its number of jobs."""

    name: str
    value: str | None
    text: str
    count: str
    is_current: bool
    state: str = ""


@attrs.frozen
class Facet:
    """Values of one criterion that narrow the list."""

    label: str
    hint: str
    lines: list[FacetLine]


_STATUS_FACET: Final[tuple[tuple[str, tuple[Status, ...]], ...]] = (
    ("all", ()),
    ("not ended", (Status.QUEUED, Status.RUNNING)),
    *((str(one), (one,)) for one in Status),
)


def _status_facet(query: JobChoice, facets: JobFacets) -> Facet:
    chosen = query.status or frozenset()
    lines = []
    for text, statuses in _STATUS_FACET:
        counted = [facets.statuses[one] for one in (statuses or Status) if one in facets.statuses]
        is_cut = any(number >= MOST_COUNTED for number in counted)
        lines.append(
            FacetLine(
                name="status",
                value=",".join(sorted(statuses)) or None,
                text=text,
                count=f"{'≥ ' if is_cut else ''}{sum(counted):,}" if counted else "",
                is_current=frozenset(statuses) == chosen,
                state=text if len(statuses) == 1 else "",
            )
        )
    return Facet("Status", "", lines)


def _named_facets(query: JobChoice, facets: JobFacets) -> list[Facet]:
    """Return the queues and tasks of the newest jobs."""
    shown_facets = []
    for name, label, counts, chosen in (
        ("queue", "Queue", facets.queues, query.queue),
        ("task", "Task", facets.tasks, query.task),
    ):
        if chosen is not None and not counts:
            counts = [NamedCount(chosen, 0)]  # noqa: PLW2901 - the chosen one is always there
        lines = [
            FacetLine(
                name, None if one.name == chosen else one.name, mask_text(one.name), f"{one.jobs:,}", one.name == chosen
            )
            for one in counts
        ]
        if lines:
            shown_facets.append(Facet(label, f"Of the newest {SAMPLED:,} jobs of this list", lines))
    return shown_facets


_OPTIONS: Final = {
    "status": "--status", "queue": "--queue", "task": "--task", "lock_key": "--lock-key", "worker": "--worker",
    "schedule": "--schedule", "root": "--root", "error_group": "--error-group", "created_from": "--since",
    "created_to": "--until", "finished_from": "--ended-since", "finished_to": "--ended-until",
}  # fmt: skip
"""Options of `dataloader jobs`."""


def _job_list_copies(visit: Visit, query: JobChoice) -> tuple[Copy, ...]:
    """Return the list as a link, an API call and a command. Only pages search by args."""
    if visit.part is not None:
        return ()
    try:
        criteria = query.job_filter(visit.preferences.tz).criteria()
    except BadRequest:
        return ()
    asked: dict[str, str] = {}
    for name, value in criteria.items():
        match value:
            case frozenset():
                asked[name] = ",".join(sorted(value))
            case datetime():
                asked[name] = value.isoformat()
            case _:
                asked[name] = str(value)
    options = [part for name, value in asked.items() for part in (_OPTIONS[name], value)]
    return copies(visit, "/api/v1/jobs", asked, ["jobs", *options])[: 1 if query.args is not None else None]


async def _found_jobs(visit: Visit, query: JobChoice) -> JobRows:
    wanted, database = query.job_filter(visit.preferences.tz), visit.services.database
    if query.args is None:
        return await list_job_rows(database, wanted, limit=PAGE, after=query.after, count=visit.part is None)
    pattern = ArgsPattern.parsed(query.args)
    return await search_job_rows(database, wanted, pattern, limit=PAGE, after=query.after, in_thread=visit.in_thread)


def _statuses(query: JobChoice) -> list[tuple[str, str]]:
    """Return the form's choices, and one more if the address has another value."""
    chosen = query.given.get("status")
    offered = [(",".join(sorted(value.split(","))), words) for value, words in STATUSES]
    if chosen is not None and chosen not in dict(offered):
        offered.append((chosen, chosen.replace(",", " or ")))
    return offered


def shown_job_row(row: JobRow) -> JobRow:
    """Return a row without secrets, with the beginning of its error."""
    shown = masked(row)
    return shown if shown.error is None else attrs.evolve(shown, error=shown.error[:_MAX_ERROR])
