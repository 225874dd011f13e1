"""CSV: rows of cells, which stay text.

Nothing is guessed. A row that does not fit is recorded as broken, and reading continues.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Final

import attrs

from dataloader.flows.etl.declare import option_checks
from dataloader.flows.etl.formats.content import Content, refuse_html
from dataloader.flows.etl.sources.source import SAMPLE, Record, SourceError

MOST_BLANK: Final = 100
"""Maximum lines at the beginning of a CSV file that are searched for one that is not blank."""
# Bytes that cannot be decoded become lone surrogates (PEP 383), which no decoded text has.
_UNDECODED: Final = re.compile("[\udc80-\udcff]")
_MARK: Final = "\ufeff"
"""Byte order mark, decoded."""


@attrs.frozen
class Csv:
    """CSV rows. Every cell is text, an empty cell the empty string.

    Args:
        delimiter: character between cells.
        encoding: encoding of the file; None uses the one that the source declares, otherwise UTF-8. A byte order mark
            is skipped.
        columns: names of the columns in a file without a header line; None reads them from its first line. A column
            without a name must be empty, and is left out.
        quote: character around cells that contain delimiters or line breaks.

    A row with a wrong number of cells is broken, as is one that cannot be decoded. A header line that cannot be decoded
    is an error, because all values of its columns would be lost. Blank lines are ignored. A quote that is never closed
    breaks up to 131,072 characters after it; then reading continues. Each line among them counts as a broken record,
    because it may have been one.
    """

    delimiter: str = attrs.field(default=",", validator=option_checks.one_character)
    encoding: str | None = attrs.field(default=None, validator=option_checks.charset_or_none)
    columns: Sequence[str] | None = attrs.field(default=None)
    quote: str = attrs.field(default='"', validator=option_checks.one_character)

    @columns.validator
    def _check_columns(self, attribute: attrs.Attribute[Any], value: Sequence[str] | None) -> None:
        allowed = "a list of unique names, or None for a file with a header line"
        if value is None:
            return
        if isinstance(value, str) or not value or not all(isinstance(name, str) for name in value):
            raise option_checks.refuse(attribute.name, value, allowed)
        if _repeated(value):
            raise option_checks.refuse(attribute.name, value, allowed)

    @property
    def reports_errors(self) -> bool:
        """Return False: a CSV body reports no errors."""
        return False

    @property
    def has_end(self) -> bool:
        """Return False: a truncated file looks complete."""
        return False

    def parse(self, stream: IO[bytes], charset: str | None) -> Content:
        """Return the records of all rows.

        Raises `SourceError` if there is no header line, it cannot be decoded, or it names a column twice; also for an
        HTML page, and for the byte order mark of another encoding.
        """
        encoding = self.encoding or charset or "utf-8"
        if encoding.lower().replace("_", "-") in {"utf-8", "utf8"}:
            encoding = "utf-8-sig"
        lines = _CsvLines(io.TextIOWrapper(stream, encoding, errors="surrogateescape", newline=""))
        with _decoding(encoding):
            lines.check_first(encoding)
        rows = csv.reader(iter(lines), delimiter=self.delimiter, quotechar=self.quote, strict=True)
        content = Content()
        with _decoding(encoding):
            columns = _header(rows, lines, encoding) if self.columns is None else self.columns
        content.rest = self._records(content, columns, rows, lines, encoding)
        return content

    def _records(
        self, content: Content, columns: Sequence[str], rows: Any, lines: _CsvLines, encoding: str
    ) -> Iterator[Record]:
        with _decoding(encoding):
            yield from self._rows(content, columns, rows, lines)

    def _rows(self, content: Content, columns: Sequence[str], rows: Any, lines: _CsvLines) -> Iterator[Record]:
        lines.is_undecoded = False
        nameless = [place for place, name in enumerate(columns) if not name]
        width = len(columns)
        of_row = lines.of_row
        while True:
            first = rows.line_num + 1
            of_row.clear()
            try:
                row = next(rows)
            except StopIteration:
                break
            except csv.Error as error:
                _add_broken_lines(content, first, str(error), of_row)
                lines.is_undecoded = False
                continue
            if lines.is_undecoded:
                undecoded = "bytes that are invalid in the file's encoding"
                if len(row) == width:
                    content.add_broken(f"line {first}", undecoded, _printable(self.delimiter.join(row)))
                else:
                    _add_broken_lines(content, first, undecoded, of_row)
                lines.is_undecoded = False
            elif len(row) != width:
                if row:
                    _add_broken_lines(content, first, f"{len(row)} cells, not {width}", of_row)
            elif nameless and any(row[place] for place in nameless):
                content.add_broken(f"line {first}", "a cell in a column without a name", self.delimiter.join(row))
            elif nameless:
                yield {name: cell for name, cell in zip(columns, row, strict=True) if name}
            else:
                yield dict(zip(columns, row))  # noqa: B905 - of equal length, and this loop dominates the time for large files


@contextmanager
def _decoding(encoding: str) -> Iterator[None]:
    """Convert decoding errors that cannot be assigned to a row to `SourceError`."""
    try:
        yield
    except UnicodeError as error:
        raise SourceError(f"the text is not {encoding}: {error}", is_retryable=True) from error


class _CsvLines:
    """Lines of a text. Keeps the lines of the current row, until cleared, and whether one of them is undecoded."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self.of_row: list[str] = []
        self.is_undecoded = False
        self._text = text
        self._first: list[str] = []

    def check_first(self, encoding: str) -> None:
        """Check the first line that is not blank, among the first hundred, and remove a byte order mark.

        Raises `SourceError` if the line begins an HTML page, or has the byte order mark of UTF-8 in another encoding.
        """
        for line in itertools.islice(self._text, MOST_BLANK):
            self._first.append(line)
            if line.strip():
                break
        refuse_html("".join(self._first))
        if not self._first:
            return
        other = ""
        with suppress(UnicodeError):  # most multi-byte encodings cannot decode the mark
            other = codecs.BOM_UTF8.decode(encoding)
        if other and self._first[0].startswith(other):
            raise SourceError(
                f"the text begins with the byte order mark of UTF-8, but its declared encoding is {encoding}",
                is_retryable=False,
            )
        self._first[0] = self._first[0].removeprefix(_MARK)

    def __iter__(self) -> Iterator[str]:
        for line in itertools.chain(self._first, self._text):
            self.of_row.append(line)
            if not line.isascii() and _UNDECODED.search(line):
                self.is_undecoded = True
            yield line


def _header(rows: Iterator[list[str]], lines: _CsvLines, encoding: str) -> list[str]:
    """Return the names of the columns. A broken header line is an error, because all rows need it."""
    try:
        columns = next(rows, None)
    except csv.Error as error:
        raise SourceError(f"the header line cannot be read: {error}", is_retryable=True) from error
    if not columns or not any(columns):
        raise SourceError("there is no header line, and no columns are declared", is_retryable=True)
    told = _printable(", ".join(columns))[:SAMPLE]
    if lines.is_undecoded:
        name = encoding.removesuffix("-sig")
        raise SourceError(f"the header line is not {name}: {told}; set Csv(encoding=…)", is_retryable=True)
    if any("\0" in name for name in columns):
        raise SourceError(
            f"the header line has NUL characters: {told!r}; check whether the file is {encoding}", is_retryable=True
        )
    if repeated := _repeated(columns):
        raise SourceError(f"the header line names {repeated!r} more than once", is_retryable=False)
    return columns


def _add_broken_lines(content: Content, first: int, error: str, of_row: Sequence[str]) -> None:
    """Add each line of a broken row, except blank ones: a wrong quote joins the lines after it to its row."""
    content.add_broken(f"line {first}", error, _printable(of_row[0].rstrip("\r\n")))
    for number, line in enumerate(of_row[1:], first + 1):
        if text := line.strip():
            content.add_broken(f"line {number}", f"part of the broken row of line {first}: {error}", _printable(text))
            content.unsure += 1


def _repeated(names: Sequence[str]) -> str | None:
    """Return the first name that occurs twice. Empty names may repeat."""
    seen: set[str] = set()
    for name in names:
        if name and name in seen:
            return name
        seen.add(name)
    return None


def _printable(text: str) -> str:
    return _UNDECODED.sub("�", text)
