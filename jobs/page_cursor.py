"""Cursor: the end of a page of a list as text. It is a page's `next`, which a client sends as `after`.

Every list is ordered by a unique key. A page begins after the key of the last row of the previous page. That is an
index scan, and rows added meanwhile do not shift other rows between pages. A list has one `PageCursor`, which knows the
type of its key; it is used over the database and over HTTP.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Generic, TypeVar
from uuid import UUID

import attrs
import msgspec
from msgspec import Meta

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import Instant, check_text
from dataloader.jobs.secrets.record_masks import Public

K = TypeVar("K")
R = TypeVar("R")

MAX_CURSOR: Final = 2_000
"""Maximum length of a cursor, in characters."""

After = str | int | None
"""Start of a page: the `next` of the previous page, or None for the first page. Rows with numbers (`event_id`,
`failure_id`, `audit_id`) also accept a number: the page begins after it, for example after the last row of a list.
"""
Next = Annotated[
    str | None,
    Meta(description="Pass it as `after` for the next page; null after the last page."),
    Public("a cursor has the place of a row"),
]
"""Field of a page with the cursor of the next one."""


def cursor_text(after: After) -> str | None:
    """Return `after` as the text that a request has."""
    return None if after is None else str(after)


_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]


@attrs.frozen
class PageCursor(Generic[K]):
    """Cursor of a list whose key is a `kind`: a number, a text, or a tuple such as `tuple[datetime, UUID]`."""

    kind: type[K]

    def text(self, key: K) -> str:
        """Return the cursor after the row with this key. It has only letters, digits, `-` and `_`."""
        return base64.urlsafe_b64encode(msgspec.json.encode(key)).rstrip(b"=").decode()

    def page(self, rows: Sequence[R], limit: int, key: Callable[[R], K]) -> tuple[list[R], str | None]:
        """Return the rows of a page and its `next`, from at most `limit` + 1 rows that were read for it."""
        if len(rows) <= limit:
            return list(rows), None
        return list(rows[:limit]), self.text(key(rows[limit - 1]))

    def key(self, after: str | int) -> K:
        """Return the key of a cursor. Raises `BadRequest` for field `after`."""
        text = str(after)
        try:
            if self.kind is int and text.isascii() and text.isdigit():
                return msgspec.convert(int(text), _Number)  # type: ignore[return-value]
            check_text("after", text, MAX_CURSOR)
            encoded = text.encode() + b"=" * (-len(text) % 4)
            wanted: Any = _Number if self.kind is int else self.kind
            key: K = msgspec.json.decode(base64.b64decode(encoded, altchars=b"-_", validate=True), type=wanted)
            for part in key if isinstance(key, tuple) else (key,):
                _check_part(part)
        except (ValueError, OverflowError, msgspec.DecodeError) as error:
            raise BadRequest("after", f"must be the `next` of the previous page, not {text!r:.60}") from error
        return key


def _check_part(part: object) -> None:
    """Raise `ValueError` or `OverflowError` for a value that no row can have."""
    if isinstance(part, str):
        check_text("after", part, MAX_CURSOR, empty=True)
    elif isinstance(part, datetime):
        part.astimezone(UTC)


BY_NUMBER: Final = PageCursor(int)
"""For numbered rows, in the order of their numbers."""
BY_NAME: Final = PageCursor(str)
BY_INSTANT: Final = PageCursor(tuple[Instant, UUID])
"""For rows with a timestamp and an ID."""
