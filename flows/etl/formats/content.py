"""Contract of formats, the content that a format reads from a body, and shared code: limits, document paths.

A source gives a format a stream instead of bytes, so that an archive is unpacked in pieces and never in memory as a
whole beside its records.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final, Protocol

import attrs

from dataloader.flows.etl.sources.source import SAMPLE, Broken, Record, SourceError

GIB: Final = 2**30
MAX_BROKEN: Final = 10_000
"""Maximum broken parts of a body. More mean that the body has another format; keeping them would fill the memory."""


@attrs.define
class Content:
    """Content of a body. `document` is the whole body as plain values, in which a walk over pages finds the next page.

    The `records` are followed by those of `rest`, which are read during the iteration and may raise `SourceError`. All
    records of a large file would take twenty times its size in memory. The broken parts among them are known after the
    iteration. `unsure` is the number of broken parts that may be records or pieces of one.
    """

    records: list[Record] = attrs.field(factory=list, repr=False)
    broken: list[Broken] = attrs.field(factory=list)
    unsure: int = 0
    document: Any = attrs.field(default=None, repr=False)
    rest: Iterator[Record] = attrs.field(factory=lambda: iter(()), repr=False)

    def all(self) -> Iterator[Record]:
        """Iterate over all records. The iteration may raise `SourceError`."""
        return itertools.chain(self.records, self.rest)

    def whole(self) -> Content:
        """Return this content with all records read. Raises `SourceError`."""
        self.records += self.rest
        return self

    def add_broken(self, key: str, error: str, sample: str) -> None:
        """Add a broken part. Raises `SourceError` if there are too many to trust the rest."""
        self.broken.append(Broken(key, error, sample))
        if len(self.broken) > MAX_BROKEN:
            raise SourceError(
                f"more than {MAX_BROKEN:,} parts are broken, the last one at {key}: {error}; check the format",
                is_retryable=False,
            )


class Format(Protocol):
    """Makes records of a body."""

    @property
    def reports_errors(self) -> bool:
        """Return True if a body can report that the request failed, so that it must be read before the next request."""

    @property
    def has_end(self) -> bool:
        """Return True if the format detects any truncation of a body."""

    def parse(self, stream: IO[bytes], charset: str | None) -> Content:
        """Read a body.

        Args:
            stream: the body, read from the current position.
            charset: the encoding that the source declares, or None.

        Raises:
            SourceError: the body does not have this format. `is_retryable` if the whole body is broken, for example
                truncated or replaced by a proxy's error page. Not retryable if it is well formed but has other content.
        """


class Bounded(io.RawIOBase):
    """Stream that reads at most `limit` bytes of another one, for data that grows when it is unpacked."""

    def __init__(self, inner: IO[bytes], limit: int, what: str) -> None:
        """Wrap `inner`. `what` names the stream in the error."""
        super().__init__()
        self.left = limit
        self._inner = inner
        self._limit = limit
        self._what = what

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with the available data. Raises `SourceError` beyond the limit."""
        data = self._inner.read(len(buffer))
        self.left -= len(data)
        if self.left < 0:
            raise SourceError(
                f"{self._what} unpacks to more than the limit of {self._limit:,} bytes", is_retryable=False
            )
        buffer[: len(data)] = data
        return len(data)


def bounded(inner: IO[bytes], limit: int, what: str) -> tuple[io.BufferedReader, Bounded]:
    """Return a buffered stream over `inner` that raises `SourceError` beyond `limit` bytes, and its `Bounded`."""
    counter = Bounded(inner, limit, what)
    return io.BufferedReader(counter, 256 * 1024), counter


def names_in_path(path: str) -> tuple[str, ...]:
    """Return the names in a dotted path; none for the empty path."""
    return tuple(path.split(".")) if path else ()


def refuse_html(beginning: str) -> None:
    """Raise `SourceError` for a text that begins like an HTML page, which a proxy may send instead of the response."""
    if _HTML.match(beginning):
        raise SourceError(f"this is an HTML page, beginning with {beginning[:SAMPLE]!r}", is_retryable=True)


_HTML: Final = re.compile(r"\s*<(!doctype\s+html|html|head|body)\b", re.IGNORECASE)

MISSING: Final = object()


def look_up(document: Any, path: str) -> Any:
    """Return the value at a dotted path in a document of objects; `MISSING` if there is none."""
    for name in names_in_path(path):
        if not isinstance(document, Mapping) or name not in document:
            return MISSING
        document = document[name]
    return document


_KINDS: Final[Mapping[type, str]] = {str: "a string", list: "a list", bool: "a boolean"}


def describe_document(document: Any) -> str:
    """Describe a document in a few words, for errors that show the found value."""
    if isinstance(document, Mapping):
        names = ", ".join(map(str, list(document)[:10]))
        return f"an object with {names}{', …' if len(document) > 10 else ''}" if names else "an empty object"
    return "null" if document is None else _KINDS.get(type(document), "a number")
