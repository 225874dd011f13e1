"""The one scheme of pages, for all lists over HTTP.

A list's query has `limit` and `after`; its answer has the list under its own name, and `next`, which a client sends as
`after` for the next page, and which is null at the end. The header `Link`, `rel="next"`, says the same. Its reference
is relative to the address that was asked for, so that it holds behind a proxy.
"""

from __future__ import annotations

from typing import Final, Protocol
from urllib.parse import urlencode

from msgspec import Struct

from dataloader.jobs.operations.fields import AfterPage, Limit
from dataloader.web.routes import Answer, Call


class Page(Protocol):
    """A page of any list."""

    @property
    def next(self) -> str | None:
        """The cursor of the next page."""


class PageQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Which page of a list."""

    limit: Limit = 50
    after: AfterPage | None = None


LINK: Final = {
    "Link": {
        "description": 'The next page, `<?…>; rel="next"`, where there is one: relative to this address.',
        "schema": {"type": "string"},
    }
}
"""The header of a page, as OpenAPI has it."""


def page_answer(call: Call, page: Page) -> Answer:
    """The answer that is a page."""
    if page.next is None:
        return Answer(value=page)
    following = urlencode({**call.arguments, "after": [page.next]}, doseq=True)
    return Answer(value=page, headers={"Link": f'<?{following}>; rel="next"'})
