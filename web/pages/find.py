"""Search box of all pages: a job's ID, terms of the jobs' filter, or a part of a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.queue.find_names import FoundName, find_names
from dataloader.web.pages.addresses import PublicAddress
from dataloader.web.pages.job_query import id_of, parse_terms
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer, Redirect
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

_KINDS: Final[Mapping[str, tuple[str, str, str]]] = {
    "queue": ("Queues", "/ui/queue", "queues"),
    "task": ("Tasks", "/ui/task", "limits"),
    "schedule": ("Schedules", "/ui/schedule", "sched"),
    "supplier": ("Suppliers", "/ui/supplier", "supply"),
    "load": ("Loads", "/ui/load", "loads"),
    "process": ("Processes", "/ui/process", "proc"),
    "key": ("Lock keys", "/ui/key", "lock"),
}
"""Headings, addresses and icons of what is found."""


class FindQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Searched text."""

    q: Annotated[str, Meta(max_length=600)] = ""


@pages.show("/find", query=FindQuery)
async def find(visit: Visit, query: FindQuery) -> PageAnswer:
    """Lead to the only result, or show the results by kind."""
    text = query.q.strip()
    if not text:
        return Redirect("/ui/jobs")
    if (job_id := id_of(text)) is not None:
        return Redirect(f"/ui/jobs/{job_id}")
    try:
        if parse_terms(text, visit.preferences.tz).values:
            return Redirect(PublicAddress().url("/ui/jobs", {"q": text}))
    except BadRequest:  # a name such as `order:48211`
        pass
    if "\0" in text:
        raise BadRequest("q", "must have no NUL")
    found = await find_names(visit.services.database, text)
    if len(found) == 1:
        path, given = _target(found[0])
        if not visit.conceals(*given.values()):
            return Redirect(PublicAddress().url(path, given))
    values: dict[str, Any] = {
        "text": text,
        "groups": [
            (
                heading,
                icon,
                [(visit.link(*_target(one)), mask_text(one.name), one.type) for one in found if one.kind == kind],
            )
            for kind, (heading, _, icon) in _KINDS.items()
            if any(one.kind == kind for one in found)
        ],
    }
    return HtmlPage("find.html", "Search", values)


def _target(found: FoundName) -> tuple[str, dict[str, str]]:
    _, path, _ = _KINDS[found.kind]
    match found.kind:
        case "key":
            return path, {"k": found.name}
        case "process":
            return path, {"type": found.type or "", "id": found.name}
        case _:
            return path, {"name": found.name}
