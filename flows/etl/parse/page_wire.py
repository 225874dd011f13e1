"""Messages between an ETL worker and its process about a page.

The process receives a load's source and transform, pickled, once per table, and then responses. It finds functions by
their modules and names. No data from the process is unpickled: its answers are JSON, and the lines of rows are bytes.
"""

from __future__ import annotations

from typing import Final

import msgspec

from dataloader.flows.etl.parse.transform import Processed, RefusedRecord
from dataloader.flows.etl.sources.source import Broken, Page, Request, SourceError
from dataloader.jobs.text import storable_text
from dataloader.store.etl.staging import StagedLines


class Known(msgspec.Struct, tag="known"):
    """The process knows the table."""


class Read(msgspec.Struct, tag="read"):
    """The page has been read. The next request is a plain `Request`, not a user's subclass."""

    following: Request | None

    def page(self) -> Page:
        """Return the page without its records, which stay in the process."""
        return Page(records=(), following=self.following)


class Made(msgspec.Struct, tag="made"):
    """Rows of the page. The body has their `lines`: columns, number and length of each group."""

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
        """Make the message of the rows, without their lines."""
        return cls(
            records=made.records,
            lines=[(lines.columns, lines.number, len(lines.text)) for lines in made.lines],
            # Names of fields are only logged. JSON has no lone surrogates.
            dropped=frozenset(storable_text(str(name)) for name in made.dropped),
            left_out=made.left_out,
            refused=made.refused,
            more_refused=made.more_refused,
            ids=made.ids,
            without_id=made.without_id,
            broken=page.broken,
        )

    def processed(self, body: bytes) -> Processed:
        """Return the rows, with the lines in the body."""
        lines, start = [], 0
        for columns, number, length in self.lines:
            # A single group, the usual case, is not copied.
            text = body if length == len(body) else body[start : start + length]
            lines.append(StagedLines(columns, number, text))
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
    """The response cannot be read: the fields of a `SourceError`."""

    text: str
    is_retryable: bool
    retry_after_s: float | None
    status: int | None
    ends_walk: bool

    @classmethod
    def of(cls, error: SourceError) -> Unread:
        """Make the message of an error."""
        return cls(storable_text(str(error)), error.is_retryable, error.retry_after_s, error.status, error.ends_walk)

    def error(self) -> SourceError:
        """Return the error."""
        return SourceError(
            self.text,
            is_retryable=self.is_retryable,
            retry_after_s=self.retry_after_s,
            status=self.status,
            ends_walk=self.ends_walk,
        )


Answer = Known | Read | Made | Unread

encode: Final = msgspec.json.Encoder().encode
"""Encode an answer as JSON."""
decode: Final = msgspec.json.Decoder(Answer).decode
"""Decode an answer. Raises `msgspec.DecodeError`."""
