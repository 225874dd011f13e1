"""The place where a page of a list ends, as text: a page's `next`, which a client sends as `after` for the next page.

Every list is ordered by a key that no two of its rows share. A page begins behind the key of the last row of the page
before: that is a walk of an index, and what is added meanwhile moves nothing from one page to another. A list has one
`PageCursor`, which knows of what kind its key is; all use it, over the database and over HTTP.
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

K = TypeVar("K")
R = TypeVar("R")

MAX_CURSOR: Final = 2_000
"""The longest text of a cursor, in characters."""

After = str | int | None
"""Where a page begins: the `next` of the page before, None for the first page. Where rows have numbers (`event_id`,
`failure_id`, `audit_id`), also the number behind which to go on, so that one can go on behind the last row of a list.
"""
Next = Annotated[str | None, Meta(description="Send it as `after` for the next page; null after the last.")]
"""What a page says of the next one."""

_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]


@attrs.frozen
class PageCursor(Generic[K]):
    """The cursor of a list whose key is a `kind`: a number, a text, or a tuple such as `tuple[datetime, UUID]`."""

    kind: type[K]

    def text(self, key: K) -> str:
        """The cursor behind the row with this key. Nothing but letters, digits, `-` and `_`."""
        return base64.urlsafe_b64encode(msgspec.json.encode(key)).rstrip(b"=").decode()

    def page(self, rows: Sequence[R], limit: int, key: Callable[[R], K]) -> tuple[list[R], str | None]:
        """The rows of a page and its `next`, out of the `limit` + 1 rows at most that were read for it."""
        if len(rows) <= limit:
            return list(rows), None
        return list(rows[:limit]), self.text(key(rows[limit - 1]))

    def key(self, after: str | int) -> K:
        """The key that a cursor stands for. Raises `BadRequest` for field `after`."""
        text = str(after)
        try:
            if self.kind is int and text.isascii() and text.isdigit():
                return msgspec.convert(int(text), _Number)  # type: ignore[return-value]
            check_text("after", text, MAX_CURSOR)
            encoded = text.encode() + b"=" * (-len(text) % 4)
            wanted: Any = _Number if self.kind is int else self.kind
            key: K = msgspec.json.decode(base64.b64decode(encoded, altchars=b"-_", validate=True), type=wanted)
            for part in key if isinstance(key, tuple) else (key,):
                _check(part)
        except (ValueError, OverflowError, msgspec.DecodeError) as error:
            raise BadRequest("after", f"must be the `next` of the page before, not {text!r:.60}") from error
        return key


def _check(part: object) -> None:
    """Raise `ValueError` or `OverflowError` for what no row can have."""
    if isinstance(part, str):
        check_text("after", part, MAX_CURSOR, empty=True)
    elif isinstance(part, datetime):
        part.astimezone(UTC)


BY_NUMBER: Final = PageCursor(int)
"""For rows that are numbered, in the order of their numbers."""
BY_NAME: Final = PageCursor(str)
BY_INSTANT: Final = PageCursor(tuple[Instant, UUID])
"""For what began or was made at an instant, and has an id."""
