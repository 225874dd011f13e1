"""The contract of a format, the content that it reads from a body, and what formats share: limits, document paths.

A source gives a format a stream rather than bytes, so that an archive is unpacked piece by piece and never held in
memory as a whole beside its records.
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
"""A body with more broken parts is taken to have another format; keeping all of them would fill the memory."""


@attrs.define
class Content:
    """What a body holds. `document` is the whole of it as plain values, where a walk over pages finds its way in it.

    Behind the `records` come those of `rest`, which are read as one goes, and may raise `SourceError`: all of a large
    file's would take twenty times its length. What is broken among them is known then. `unsure` counts broken
    parts that are records or pieces of one.
    """

    records: list[Record] = attrs.field(factory=list, repr=False)
    broken: list[Broken] = attrs.field(factory=list)
    unsure: int = 0
    document: Any = attrs.field(default=None, repr=False)
    rest: Iterator[Record] = attrs.field(factory=lambda: iter(()), repr=False)

    def all(self) -> Iterator[Record]:
        """All records, as one goes. Raises `SourceError` meanwhile."""
        return itertools.chain(self.records, self.rest)

    def whole(self) -> Content:
        """The same with all records read. Raises `SourceError`."""
        self.records += self.rest
        return self

    def add_broken(self, key: str, error: str, sample: str) -> None:
        """Keep a broken part. Raises `SourceError` when there are too many to believe in the rest."""
        self.broken.append(Broken(key, error, sample))
        if len(self.broken) > MAX_BROKEN:
            raise SourceError(
                f"more than {MAX_BROKEN:,} parts are broken, the last one at {key}: {error}; is the format right?",
                is_retryable=False,
            )


class Format(Protocol):
    """How a body becomes records."""

    @property
    def reports_errors(self) -> bool:
        """True if a body can say that the request failed, so that it must be read before the next request."""

    @property
    def has_end(self) -> bool:
        """True if it shows when the end of a body is missing, whatever the place where it was cut."""

    def parse(self, stream: IO[bytes], charset: str | None) -> Content:
        """Read a body.

        Args:
            stream: the body, to be read from where it stands.
            charset: the encoding that the source names, None if it names none.

        Raises:
            SourceError: it is not what the format expects. `is_retryable` if it is broken as a whole, as when it was
                cut off or a proxy has replaced it by a page of its own; not if it is well formed but something else.
        """


class Bounded(io.RawIOBase):
    """A stream that reads at most `limit` bytes of another one, for data that grows when it is unpacked."""

    def __init__(self, inner: IO[bytes], limit: int, what: str) -> None:
        """`what` names the stream in the error."""
        super().__init__()
        self.left = limit
        self._inner = inner
        self._limit = limit
        self._what = what

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as there is data. Raises `SourceError` beyond the limit."""
        data = self._inner.read(len(buffer))
        self.left -= len(data)
        if self.left < 0:
            raise SourceError(
                f"{self._what} unpacks to more than the {self._limit:,} bytes allowed", is_retryable=False
            )
        buffer[: len(data)] = data
        return len(data)


def bounded(inner: IO[bytes], limit: int, what: str) -> tuple[io.BufferedReader, Bounded]:
    """A buffered stream over `inner` that raises `SourceError` beyond `limit` bytes, and the `Bounded` that counts."""
    counter = Bounded(inner, limit, what)
    return io.BufferedReader(counter, 256 * 1024), counter


def parts_of(path: str) -> tuple[str, ...]:
    """The names in a dotted path, none for the empty one."""
    return tuple(path.split(".")) if path else ()


def refuse_html(beginning: str) -> None:
    """Raise `SourceError` for a text that begins like a page of HTML, by which a proxy may replace an answer."""
    if _HTML.match(beginning):
        raise SourceError(f"this is a page of HTML: it begins {beginning[:SAMPLE]!r}", is_retryable=True)


_HTML: Final = re.compile(r"\s*<(!doctype\s+html|html|head|body)\b", re.IGNORECASE)

MISSING: Final = object()


def look_up(document: Any, path: str) -> Any:
    """The value at a dotted path in a document of objects; `MISSING` if there is none."""
    for name in parts_of(path):
        if not isinstance(document, Mapping) or name not in document:
            return MISSING
        document = document[name]
    return document


_KINDS: Final[Mapping[type, str]] = {str: "a text", list: "a list", bool: "a truth value"}


def describe(document: Any) -> str:
    """A few words that describe a document, for errors that say what was found instead of the expected value."""
    if isinstance(document, Mapping):
        names = ", ".join(map(str, list(document)[:10]))
        return f"an object with {names}{', …' if len(document) > 10 else ''}" if names else "an empty object"
    return "null" if document is None else _KINDS.get(type(document), "a number")
