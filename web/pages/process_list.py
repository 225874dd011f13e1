"""List of durable processes, filtered by the address, and the groups of their errors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final

from msgspec import Struct

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.process_listings import PROCESS_STATUSES, ProcessFilter, ProcessStatus, ProcessVersion
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.processes.process_rows import (
    MOST_COUNTED,
    MOST_WAITING,
    ProcessRow,
    ProcessRows,
    get_process_error,
    list_process_rows,
)
from dataloader.store.processes.versions import list_versions
from dataloader.web.pages.copies import Copy, copies
from dataloader.web.pages.formats import at_least
from dataloader.web.pages.job_choice import Chip
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.process_words import what_of
from dataloader.web.pages.visit import Visit
from dataloader.web.searchable import searchable

pages: Final = PageRoutes()

PAGE: Final = 50
GROUPS: Final = 25
REFRESH_S: Final = 2.0
GROUPS_REFRESH_S: Final = 5.0
_MAX_METADATA: Final = 300
_LABELS: Final = {
    "type": "type", "status": "status", "id": "id", "metadata": "metadata", "error_group": "error group",
}  # fmt: skip


class ProcessChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    """Filter of processes; `metadata` is `name=value` or a JSON object. `after` is the page's cursor."""

    type: str | None = None
    status: ProcessStatus | None = None
    id: str | None = None
    metadata: str | None = None
    error_group: str | None = None
    after: str | None = None

    def wanted(self) -> ProcessFilter:
        """Return the store's filter. Raises `BadRequest`."""
        return ProcessFilter(
            type=self.type,
            status=self.status,
            process_id=self.id,
            metadata=None if self.metadata is None else _searched(self.metadata),
            error_group=self.error_group,
        )

    @property
    def given(self) -> dict[str, str]:
        """Given values by their names in an address, without the cursor."""
        return {name: value for name in _LABELS if (value := getattr(self, name)) is not None}

    @property
    def chips(self) -> Iterator[Chip]:
        """Criteria for display, without secrets."""
        for name, value in self.given.items():
            yield Chip(name, _LABELS[name], mask_text(value))


class ProcessErrorsQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Page of groups of errors."""

    type: str | None = None
    after: str | None = None


def _searched(text: str) -> dict[str, Any]:
    """Parse the typed metadata. Masked values cannot be searched for, since a search would reveal them."""
    stripped = text.strip()
    if stripped.startswith("{"):
        value = json_of("metadata", stripped)
    else:
        name, is_named, typed = stripped.partition("=")
        if not name.strip() or not is_named:
            raise BadRequest("metadata", "must be name=value, or a JSON object")
        value = {name.strip(): _scalar(typed.strip())}
    if not isinstance(value, dict):
        raise BadRequest("metadata", "must be name=value, or a JSON object")
    return searchable(value)


def _scalar(text: str) -> Any:
    """Return the value of `name=value`: a number, true, false, null, or a text."""
    try:
        value = json_of("metadata", text)
    except BadRequest:
        return text
    return text if isinstance(value, dict | list) else value


def json_of(name: str, text: str) -> Any:
    """Return the JSON value of a field. Raises `BadRequest`, which names the place of an error."""
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise BadRequest(
            name, f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}. Strings need quotes."
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(name, f"is not JSON: {str(error)[:100] or 'it is nested too deeply'}") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):  # it would be stored as null
        raise ValueError(f"{digits} is larger than any stored number")
    return number


@pages.show("/processes", query=ProcessChoice)
async def show_processes(visit: Visit, query: ProcessChoice) -> PageAnswer:
    """Show the processes that match the filter, newest first."""
    database = visit.services.database
    group, fault, found = None, None, ProcessRows()
    versions: list[ProcessVersion] = []
    try:
        found = await list_process_rows(
            database, query.wanted(), limit=PAGE, after=query.after, count=visit.part is None
        )
        if query.type is not None and visit.part is None:
            if query.error_group is None:
                versions = await list_versions(database, query.type)
            else:
                group = await get_process_error(database, query.type, query.error_group)
    except BadRequest as error:
        if visit.part is not None:
            raise
        fault = error
    values: dict[str, Any] = {
        "found": found,
        "processes": [(row, masked(row), _doing(row)) for row in found.rows],
        "choice": query,
        "given": query.given,
        "chips": list(query.chips),
        "statuses": PROCESS_STATUSES,
        "count": None if found.count is None else at_least(found.count, MOST_COUNTED),
        "most_waiting": MOST_WAITING,
        "versions": versions,
        "most_count": MOST_COUNTED,
        "group": None if group is None else masked(group),
        "fault": fault,
        "copies": _process_list_copies(visit, query, fault),
    }
    return HtmlPage(
        "processes.html",
        "Processes",
        values,
        # A search of metadata may read many rows: it is not refreshed.
        refresh_s=None if fault or query.metadata is not None else REFRESH_S,
        status=HTTPStatus.UNPROCESSABLE_ENTITY if fault else HTTPStatus.OK,
    )


def _doing(row: ProcessRow) -> str | None:
    """Return the running step in words, if any."""
    return None if row.running is None else what_of(row.running.kind, None)


def _process_list_copies(visit: Visit, query: ProcessChoice, fault: object) -> tuple[Copy, ...]:
    """Return the list as a link, an API call and a command."""
    if visit.part is not None or fault is not None:
        return ()
    wanted = query.wanted()
    metadata = None if wanted.metadata is None else json.dumps(wanted.metadata)
    asked = {
        "type": query.type, "status": query.status, "process_id": query.id, "metadata": metadata,
        "error_group": query.error_group,
    }  # fmt: skip
    given = {name: value for name, value in asked.items() if value is not None}
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    return copies(visit, "/api/v1/processes", given, ["process", "list", *options])


@pages.show("/processes/errors", query=ProcessErrorsQuery)
async def show_process_errors(visit: Visit, query: ProcessErrorsQuery) -> PageAnswer:
    """Show the processes in error, counted by type and error; those with the most processes first."""
    page = await visit.processes.errors(process_type=query.type, limit=GROUPS, after=query.after)
    groups = [(one, masked(one)) for one in page.groups]
    values = {"groups": groups, "next": page.next, "query": query}
    return HtmlPage("process_errors.html", "Process errors", values, refresh_s=GROUPS_REFRESH_S)
