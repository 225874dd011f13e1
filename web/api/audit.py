"""The operators' log over HTTP: who did what, and when. Every action writes it in its own transaction."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from dataloader.jobs.listings import MAX_PAGE, AuditRecord
from dataloader.store.queue import reads
from dataloader.web import shown
from dataloader.web.api.jobs import MAX_ID
from dataloader.web.auth import Role
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()


class AuditQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """A page of the operators' actions, newest first."""

    before: Annotated[int, Meta(ge=0, le=MAX_ID, description="The smallest `audit_id` seen.")] | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 50


class AuditList(Struct, frozen=True):
    """A page of the operators' actions."""

    audit: list[AuditRecord]


@routes.add("GET", "/api/v1/audit", role=Role.ADMIN, query=AuditQuery, answers={200: AuditList})
async def list_audit(call: Call, query: AuditQuery) -> Answer:
    """List what operators did, newest first: send the smallest `audit_id` as `before` to read on."""
    page = await reads.list_audit(call.services.database, limit=query.limit, after=query.before)
    return Answer(value=AuditList(list(map(shown.audit, page.audit))))
