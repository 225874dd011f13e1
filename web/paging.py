"""Pagination scheme of all lists over HTTP.

A list's query has `limit` and `after`. Its answer has the list under its own name, and `next`, which a client sends as
`after` for the next page, and which is null at the end. The header `Link` with `rel="next"` has the same cursor. Its
reference is relative to the requested address, so that it is valid behind a proxy.
"""

from __future__ import annotations

from typing import Final, Protocol
from urllib.parse import urlencode

from msgspec import Struct

from dataloader.jobs.operations.fields import AfterPage, Limit
from dataloader.web.routes import Answer, Call


class AnswerPage(Protocol):
    """Page of any list."""

    @property
    def next(self) -> str | None:
        """Cursor of the next page."""


class PageQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Query with a page of a list."""

    limit: Limit = 50
    after: AfterPage | None = None


LINK: Final = {
    "Link": {
        "description": 'Next page, if there is one, as `<?…>; rel="next"`, relative to this address.',
        "schema": {"type": "string"},
    }
}
"""Header of a page, for OpenAPI."""


def page_answer(call: Call, page: AnswerPage) -> Answer:
    """Return the answer for a page."""
    if page.next is None:
        return Answer(value=page)
    following = urlencode({**call.arguments, "after": [page.next]}, doseq=True)
    return Answer(value=page, headers={"Link": f'<?{following}>; rel="next"'})
