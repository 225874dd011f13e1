"""How a body becomes records: JSON, lines of JSON, CSV.

Nothing is lost on the way, and nothing is guessed: numbers of JSON with a fraction become `Decimal`, cells of CSV stay
text, and a row that does not fit is named as broken while the rest goes on. XML is in markup.py, archives are in
packed.py. Formats are values without state, so that a source can be used by many threads at once.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import IO, Any, Final

import attrs
import msgspec

from dataloader.flows.etl.sources import checks
from dataloader.flows.etl.sources.base import SAMPLE, Record, SourceError
from dataloader.flows.etl.sources.content import MISSING, Content, describe, look_up, parts_of, refuse_html
from dataloader.flows.etl.sources.json_items import items_at
from dataloader.jobs.secrets.masking import mask_text

MOST_BLANK: Final = 100
"""Lines of a CSV file that are looked at, and kept meanwhile, for one that is not blank."""
_BOM: Final = b"\xef\xbb\xbf"
# Bytes that can't be decoded come as half surrogates (PEP 383), which no decoded text has.
_UNDECODED: Final = re.compile("[\udc80-\udcff]")
_DECODER: Final = msgspec.json.Decoder(float_hook=Decimal)


def _check_path(_instance: Any, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or (value and not all(value.split("."))):
        raise checks.refuse(attribute.name, value, "names with dots between them, such as data.items, or nothing")


@attrs.frozen
class Json:
    """A JSON document.

    Args:
        path: where in it the records are, names with dots between them (`data.items`); empty if the document is the
            list. One object in its place is one record, null is none.
        errors: takes the document, and gives a text if it says that the request failed, though its HTTP status does
            not; None if all is well. That is a `SourceError` that passes.

    A part of the list that is no object, or no JSON, is broken; the others are read. Numbers with a fraction or an
    exponent are `Decimal`, others `int`.
    """

    path: str = attrs.field(default="", validator=_check_path)
    errors: Callable[[Any], str | None] | None = None

    @property
    def reports_errors(self) -> bool:
        """True if there is a function that finds errors in documents."""
        return self.errors is not None

    @property
    def has_end(self) -> bool:
        """True: a document that was cut is none."""
        return True

    def parse(self, stream: IO[bytes], charset: str | None) -> Content:
        """The records at `path`. Raises `SourceError` for what is no JSON, has no such path, or reports an error."""
        document = _decode(_as_utf8(stream.read(), charset), parts_of(self.path))
        if self.errors is not None and (error := self.errors(document)) is not None:
            raise SourceError(f"the answer says that it failed: {mask_text(str(error))[:SAMPLE]}", is_passing=True)
        found = look_up(document, self.path)
        if found is MISSING:
            raise SourceError(f"path: there is no {self.path} in {describe(document)}", is_passing=False)
        content = Content(document=document)
        if isinstance(found, dict):
            content.records.append(found)
        elif isinstance(found, list):
            for position, item in enumerate(found, 1):
                if isinstance(item, dict):
                    content.records.append(item)
                elif isinstance(item, _Unreadable):
                    content.add_broken(f"item {position}", item.error, item.sample)
                else:
                    content.add_broken(f"item {position}", *_no_object(item))
        elif found is not None:
            where = self.path or "the document"
            raise SourceError(f"path: {where} is {describe(found)}, not a list or an object", is_passing=False)
        return content


@attrs.frozen
class JsonLines:
    """One JSON object on each line; empty lines count for nothing, a line that is no object is broken.

    If the last one is no JSON and has no line's end, the body was cut: that is a `SourceError` that passes.
    """

    @property
    def reports_errors(self) -> bool:
        """Never."""
        return False

    @property
    def has_end(self) -> bool:
        """False: nobody misses lines behind the last one."""
        return False

    def parse(self, stream: IO[bytes], charset: str | None) -> Content:
        """The records of all lines. Raises `SourceError` for a body that was cut, or a page of HTML."""
        content = Content()
        body = _as_utf8(stream.read(), charset)
        refuse_html(body[:SAMPLE].decode("utf-8", "replace"))
        _check_last_line(body)
        content.rest = _of_lines(content, body)
        return content


@attrs.frozen
class Csv:
    """Rows of cells; every cell is text, an empty one the empty text.

    Args:
        delimiter: one character between cells.
        encoding: None takes the one that the source names, else UTF-8. A byte order mark is no part of the text.
        columns: names of the columns in a file without a header line; None takes them from its first line. A column
            without a name must be empty, and is left out.
        quote: one character around cells that have delimiters or line breaks.

    A row with more or fewer cells than there are columns is broken, as is one that can't be decoded. Blank lines count
    for nothing. A quote that is never closed breaks what follows it, up to 131,072 characters, then reading goes on.
    """

    delimiter: str = attrs.field(default=",", validator=checks.one_character)
    encoding: str | None = attrs.field(default=None, validator=checks.charset_or_none)
    columns: Sequence[str] | None = attrs.field(default=None)
    quote: str = attrs.field(default='"', validator=checks.one_character)

    @columns.validator
    def _check_columns(self, attribute: attrs.Attribute[Any], value: Sequence[str] | None) -> None:
        allowed = "a list of names, each once, or None for a file that has them in its first line"
        if value is None:
            return
        if isinstance(value, str) or not value or not all(isinstance(name, str) for name in value):
            raise checks.refuse(attribute.name, value, allowed)
        if _repeated(value):
            raise checks.refuse(attribute.name, value, allowed)

    @property
    def reports_errors(self) -> bool:
        """Never."""
        return False

    @property
    def has_end(self) -> bool:
        """False: nobody misses rows behind the last one, nor half a cell."""
        return False

    def parse(self, stream: IO[bytes], charset: str | None) -> Content:
        """The records of all rows.

        Raises `SourceError` if there is no header line, or it names a column twice; also for a page of HTML.
        """
        encoding = self.encoding or charset or "utf-8"
        if encoding.lower().replace("_", "-") in {"utf-8", "utf8"}:
            encoding = "utf-8-sig"
        lines = _Lines(io.TextIOWrapper(stream, encoding, errors="surrogateescape", newline=""))
        with _decoding(encoding):
            lines.check_first()
        rows = csv.reader(iter(lines), delimiter=self.delimiter, quotechar=self.quote, strict=True)
        content = Content()
        with _decoding(encoding):
            columns = _header(rows) if self.columns is None else self.columns
        content.rest = self._records(content, columns, rows, lines, encoding)
        return content

    def _records(
        self, content: Content, columns: Sequence[str], rows: Any, lines: _Lines, encoding: str
    ) -> Iterator[Record]:
        with _decoding(encoding):
            yield from self._rows(content, columns, rows, lines)

    def _rows(self, content: Content, columns: Sequence[str], rows: Any, lines: _Lines) -> Iterator[Record]:
        lines.is_undecoded = False
        nameless = [place for place, name in enumerate(columns) if not name]
        width = len(columns)
        while True:
            first = rows.line_num + 1
            try:
                row = next(rows)
            except StopIteration:
                break
            except csv.Error as error:
                content.add_broken(f"line {first}", str(error), _printable(lines.last))
                lines.is_undecoded = False
                continue
            if lines.is_undecoded:
                text = _printable(self.delimiter.join(row))
                content.add_broken(f"line {first}", "bytes that are not text in the file's encoding", text)
                lines.is_undecoded = False
            elif len(row) != width:
                if row:
                    content.add_broken(f"line {first}", f"{len(row)} cells, not {width}", self.delimiter.join(row))
            elif nameless and any(row[place] for place in nameless):
                content.add_broken(f"line {first}", "a cell in a column without a name", self.delimiter.join(row))
            elif nameless:
                yield {name: cell for name, cell in zip(columns, row, strict=True) if name}
            else:
                yield dict(zip(columns, row))  # noqa: B905 - of one length, and this loop is what large files wait for


def _check_last_line(body: bytes) -> None:
    last = body[body.rfind(b"\n") + 1 :].strip()
    if last:
        try:
            _DECODER.decode(last)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            told = f"the last line has no end and is no JSON ({error}): the body was cut; it is {_sample(last)!r}"
            raise SourceError(told, is_passing=True) from error


def _of_lines(content: Content, body: bytes) -> Iterator[Record]:
    for number, raw in enumerate(io.BytesIO(body), 1):
        if not (line := raw.strip()):
            continue
        item = _read(line)
        if isinstance(item, dict):
            yield item
        elif isinstance(item, _Unreadable):
            content.add_broken(f"line {number}", item.error, item.sample)
        else:
            content.add_broken(f"line {number}", *_no_object(item))


@contextmanager
def _decoding(encoding: str) -> Iterator[None]:
    """Encodings of more than one byte can fail in ways that can't be put off to the row."""
    try:
        yield
    except UnicodeError as error:
        raise SourceError(f"the text is not {encoding}: {error}", is_passing=True) from error


class _Lines:
    """The lines of a text; remembers the last one, and whether one since the flag was last cleared is undecoded."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self.last = ""
        self.is_undecoded = False
        self._text = text
        self._first: list[str] = []

    def check_first(self) -> None:
        """Raise `SourceError` if the first line that is not blank, of the first hundred, is that of a page of HTML."""
        for line in itertools.islice(self._text, MOST_BLANK):
            self._first.append(line)
            if line.strip():
                break
        refuse_html("".join(self._first))

    def __iter__(self) -> Iterator[str]:
        for line in itertools.chain(self._first, self._text):
            self.last = line
            if not line.isascii() and _UNDECODED.search(line):
                self.is_undecoded = True
            yield line


def _header(rows: Iterator[list[str]]) -> list[str]:
    try:
        columns = next(rows, None)
    except csv.Error as error:
        raise SourceError(f"the header line can't be read: {error}", is_passing=True) from error
    if not columns or not any(columns):
        raise SourceError("there is no header line, and no columns are declared", is_passing=True)
    if repeated := _repeated(columns):
        raise SourceError(f"the header line names {repeated!r} more than once", is_passing=False)
    return columns


def _repeated(names: Sequence[str]) -> str | None:
    """The first name that comes twice; empty ones may."""
    seen: set[str] = set()
    for name in names:
        if name and name in seen:
            return name
        seen.add(name)
    return None


def _as_utf8(body: bytes, charset: str | None) -> bytes:
    """The body in the encoding of JSON, without a byte order mark."""
    if charset and charset.lower().replace("_", "-") not in {"utf-8", "utf8", "us-ascii", "ascii"}:
        try:
            body = body.decode(charset).encode()
        except UnicodeError as error:
            raise SourceError(f"the text is not {charset}: {error}", is_passing=True) from error
    return body.removeprefix(_BOM)


@attrs.frozen
class _Unreadable:
    """An item of a list that is no JSON."""

    error: str
    sample: str


def _decode(body: bytes, path: Sequence[str]) -> Any:
    """The document; if it can't be read, and that is because of items of the list at `path`, those are `_Unreadable`.

    Raises `SourceError` for any other.
    """
    document = _read(body)
    if not isinstance(document, _Unreadable):
        return document
    if (items := items_at(body, path)) is not None and not isinstance(around := _read(items.around), _Unreadable):
        found = [_read(text) for text in items.texts]
        if not path:
            return found
        look_up(around, ".".join(path[:-1]))[path[-1]] = found
        return around
    raise SourceError(f"this is not JSON: {document.error}; it begins {document.sample!r}", is_passing=True)


def _read(text: bytes) -> Any:
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ArithmeticError) as error:
        return _Unreadable(str(error) or type(error).__name__, _sample(text))


def _no_object(item: Any) -> tuple[str, str]:
    """What is wrong with it, and how it begins."""
    return f"{describe(item)}, not an object", _sample(msgspec.json.encode(item))


def _sample(data: bytes) -> str:
    return mask_text(data[:SAMPLE].decode("utf-8", "replace"))


def _printable(text: str) -> str:
    return _UNDECODED.sub("�", text)
