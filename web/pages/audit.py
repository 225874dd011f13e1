"""Audit log: each operator's actions, with their time and subject."""

from __future__ import annotations

from typing import Annotated, Any, Final
from uuid import UUID

from msgspec import Meta, Struct

from dataloader.jobs.listings import AuditRecord
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.queue.look_back import search_audit
from dataloader.web.pages.formats import NOTHING
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit
from dataloader.web.pages.wall_times import field_of_instant, instant_of_field

pages: Final = PageRoutes()

PAGE: Final = 50
REFRESH_S: Final = 5.0
_SUBJECTS: Final = {
    "queue": ("/ui/jobs", "queue"),
    "task": ("/ui/task", "name"),
    "schedule": ("/ui/schedule", "name"),
    "supplier": ("/ui/supplier", "name"),
}
"""Subjects of an action besides a job: the path of each one's page, and the name in that page's query."""


class AuditQuery(Struct, forbid_unknown_fields=True, kw_only=True, rename={"begin": "from", "end": "to"}):
    """Filter of actions. `begin` and `end` are by the clock of the displayed zone."""

    actor: str | None = None
    action: str | None = None
    job_id: Annotated[UUID | None, Meta(description="ID of a job.")] = None
    begin: str | None = None
    end: str | None = None
    after: str | None = None


def _subject(record: AuditRecord) -> dict[str, Any] | None:
    for name, (path, field) in _SUBJECTS.items():
        value = record.detail.get(name)
        if isinstance(value, str):
            return {"kind": name, "path": path, "query": {field: value}, "shown": mask_text(value)}
    kind, process = record.detail.get("type"), record.detail.get("process_id")
    if isinstance(kind, str) and isinstance(process, str):
        name = f"{mask_text(kind)} {mask_text(process)}"
        return {"kind": "process", "path": "/ui/process", "query": {"type": kind, "id": process}, "shown": name}
    group = record.detail.get("group")
    if isinstance(group, str):
        return {"kind": "errors", "path": "/ui/errors/log", "query": {"group": group.split(".")[0]}, "shown": group}
    return None


def _unnamed_subject(action: str) -> str:
    """Return the subject of an action on many things, which has no link."""
    if action.endswith("_processes"):
        return "many processes"
    return "many jobs" if action.endswith(("_many", "_bulk", "_duplicates")) else NOTHING


@pages.show("/audit", role=Role.ADMIN, query=AuditQuery)
async def show_audit(visit: Visit, query: AuditQuery) -> PageAnswer:
    """Show the operators' actions, latest first."""
    tz = visit.preferences.tz
    begin, end = instant_of_field("from", query.begin, tz), instant_of_field("to", query.end, tz)
    found = await search_audit(
        visit.services.database,
        actor=query.actor,
        action=query.action,
        job_id=query.job_id,
        begin=begin,
        end=end,
        limit=PAGE,
        after=query.after,
    )
    shown = await visit.masked(found.rows)
    values = {
        "audit": [
            (one, without, _subject(one) or _unnamed_subject(one.action))
            for one, without in zip(found.rows, shown, strict=True)
        ],
        "found": found,
        "query": query,
        "from_text": field_of_instant(begin, tz),
        "to_text": field_of_instant(end, tz),
    }
    return HtmlPage("audit.html", "Audit", values, refresh_s=REFRESH_S if query.after is None else None)
