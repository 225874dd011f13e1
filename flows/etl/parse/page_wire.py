"""What an ETL worker and its process say to each other of a page.

To the process go a load's own source and transform, pickled, once a table, then responses; functions are found there by
their modules and names. Nothing that the process says is unpickled: its answers are JSON, and the lines of rows as they
are.
"""

from __future__ import annotations

from typing import Final

import msgspec

from dataloader.flows.etl.parse.transform import Processed, RefusedRecord
from dataloader.flows.etl.sources.source import Broken, Page, Request, SourceError
from dataloader.jobs.text import storable_text
from dataloader.store.etl.staging import Lines


class Known(msgspec.Struct, tag="known"):
    """The table is known."""


class Read(msgspec.Struct, tag="read"):
    """The page is read, as far as the next request needs it: a `Request`, none of a class of one's own."""

    following: Request | None

    def page(self) -> Page:
        """The page, whose records are in the process."""
        return Page(records=(), following=self.following)


class Made(msgspec.Struct, tag="made"):
    """The page's rows. The body has their `lines`: columns, number and length of each group."""

    records: int
    lines: list[tuple[tuple[str, ...], int, int]]
    dropped: frozenset[str]
    left_out: int
    refused: list[RefusedRecord]
    more_refused: int
    ids: list[str | int]
    without_id: int
    broken: list[Broken]

    @classmethod
    def of(cls, made: Processed, page: Page) -> Made:
        """What crosses of rows beside their lines."""
        return cls(
            records=made.records,
            lines=[(lines.columns, lines.number, len(lines.text)) for lines in made.lines],
            # Names of fields go to a log line alone. JSON has no lone surrogates.
            dropped=frozenset(storable_text(str(name)) for name in made.dropped),
            left_out=made.left_out,
            refused=made.refused,
            more_refused=made.more_refused,
            ids=made.ids,
            without_id=made.without_id,
            broken=page.broken,
        )

    def processed(self, body: bytes) -> Processed:
        """The rows again."""
        lines, start = [], 0
        for columns, number, length in self.lines:
            # A single group, as most pages have, is not copied.
            text = body if length == len(body) else body[start : start + length]
            lines.append(Lines(columns, number, text))
            start += length
        return Processed(
            records=self.records,
            rows=sum(each.number for each in lines),
            lines=lines,
            dropped=self.dropped,
            left_out=self.left_out,
            refused=self.refused,
            more_refused=self.more_refused,
            ids=self.ids,
            without_id=self.without_id,
        )


class Unread(msgspec.Struct, tag="unread"):
    """The answer can't be read: a `SourceError`."""

    text: str
    is_retryable: bool
    retry_after_s: float | None
    status: int | None
    ends_walk: bool

    @classmethod
    def of(cls, error: SourceError) -> Unread:
        """What crosses of it."""
        return cls(storable_text(str(error)), error.is_retryable, error.retry_after_s, error.status, error.ends_walk)

    def error(self) -> SourceError:
        """The error again."""
        return SourceError(
            self.text,
            is_retryable=self.is_retryable,
            retry_after_s=self.retry_after_s,
            status=self.status,
            ends_walk=self.ends_walk,
        )


Answer = Known | Read | Made | Unread

encode: Final = msgspec.json.Encoder().encode
"""An answer as JSON."""
decode: Final = msgspec.json.Decoder(Answer).decode
"""An answer again. Raises `msgspec.DecodeError`."""
