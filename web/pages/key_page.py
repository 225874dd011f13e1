"""Queue of a lock_key: its holder, the waiting jobs, and the jobs that ended recently."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.queue.job_rows import MOST_COUNTED
from dataloader.store.queue.key_lines import MOST_WAITING, key_line
from dataloader.store.queue.why import described
from dataloader.web.pages.formats import at_least
from dataloader.web.pages.job_list import shown_job_row
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

REFRESH_S: Final = 2.0


class KeyQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Query with a key."""

    k: Annotated[str, Meta(min_length=1)]


@pages.show("/key", query=KeyQuery)
async def show_key(visit: Visit, query: KeyQuery) -> PageAnswer:
    """Show the queue of a key."""
    line = await key_line(visit.services.database, query.k)
    session = None
    if line.session is not None:
        session = described(masked(line.session))
    values = {
        "own": query.k,
        "key": mask_text(query.k),
        "holders": list(map(shown_job_row, line.holders)),
        "session": session,
        "waiting": list(map(shown_job_row, line.waiting)),
        "count": at_least(line.count, MOST_COUNTED),
        "is_cut": line.count > MOST_WAITING,
        "ended": list(map(shown_job_row, line.ended)),
    }
    return HtmlPage("key.html", f"Key {mask_text(query.k)}", values, refresh_s=REFRESH_S)
