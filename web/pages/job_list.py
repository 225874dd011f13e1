"""List of jobs: newest first, filtered by the address, refreshed live."""

from __future__ import annotations

from datetime import datetime
from http import HTTPStatus
from typing import Any, Final

import attrs

from dataloader.jobs.args_pattern import ArgsPattern
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.queue.job_rows import MOST_COUNTED, SEARCHED, JobRow, JobRows, list_job_rows, search_job_rows
from dataloader.web.pages.copies import Copy, copies
from dataloader.web.pages.formats import at_least
from dataloader.web.pages.job_choice import STATUSES, JobChoice
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

PAGE: Final = 50
REFRESH_S: Final = 2.0
_MAX_ERROR: Final = 200


@pages.show("/jobs", query=JobChoice)
async def show_jobs(visit: Visit, query: JobChoice) -> PageAnswer:
    """Show the jobs that match the filter. A search of args is not refreshed, since it reads many rows."""
    try:
        found, fault = await _found_jobs(visit, query), None
    except BadRequest as error:
        if visit.part is not None:
            raise
        found, fault = JobRows(), error
    values: dict[str, Any] = {
        "found": found,
        "jobs": [(row, shown_job_row(row)) for row in found.rows],
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
