"""The operators' log over HTTP: who did what, and when. Every action writes it in its own transaction."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from dataloader.jobs.listings import AuditPage
from dataloader.web import shown
from dataloader.web.auth import Role
from dataloader.web.paging import AfterPage, PageQuery, page_answer
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()


class AuditQuery(PageQuery, kw_only=True):
    """A page of the operators' actions, newest first."""

    before: Annotated[AfterPage, Meta(description="The older name of `after`; an `audit_id`.")] | None = None

    def __post_init__(self) -> None:
        """Refuse both names at once."""
        if self.before is not None and self.after is not None:
            raise ValueError("before: is the older name of after; send one of them")


@routes.add("GET", "/api/v1/audit", role=Role.ADMIN, query=AuditQuery, answers={200: AuditPage}, pages=True)
async def list_audit(call: Call, query: AuditQuery) -> Answer:
    """List what operators did, newest first."""
    after = query.before if query.after is None else query.after
    page = await call.jobs.audit(limit=query.limit, after=after)
    return page_answer(call, AuditPage(await call.masked(shown.audit, page.audit), page.next))
