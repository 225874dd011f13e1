"""Rows as lines of COPY's text format, so that the database's own input functions read the values.

ETL workers call this for every row, in threads or processes: it is pure, and fast for short texts and numbers, which
are the content of most rows. A text is valid for any type that the database reads from text, such as dates and numbers.
In a column of JSON a text stays a text: otherwise "5" would become a number.

Rejected alternative: binary records, which asyncpg encodes value by value on the event loop, and for which each value
needs the exact Python type of its column.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import attrs
import msgspec

from dataloader.jobs.errors import Unstorable
from dataloader.jobs.text import text_of
from dataloader.store.etl.target_table import as_names

_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
_escaped_nul = re.compile(r"(?<!\\)(?:\\\\)*\\u0000").search
_json = msgspec.json.Encoder(decimal_format="number").encode


def _as_set(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@attrs.frozen
class LineEncoder:
    """Encodes rows, whose cells are in the order of `columns`, as lines.

    `arrays` are the columns whose type is an array, `documents` those of JSON or of arrays of it.

    Text, numbers, `None`, dates, times, durations, UUIDs and bytes become PostgreSQL's text input for these types.
    Dictionaries and lists become JSON; lists for `arrays` become array literals. For `documents` all values except
    `None` become JSON; values that are JSON already are given as `msgspec.Raw`. A timestamp without a zone is in the
    session's zone, which is UTC in our sessions.
    """

    columns: Sequence[str] = attrs.field(converter=as_names)
    arrays: Collection[str] = attrs.field(converter=_as_set, default=())
    documents: Collection[str] = attrs.field(converter=_as_set, default=())
    _special: tuple[int, ...] = attrs.field(init=False, repr=False)

    @_special.default
    def _places_of_arrays_and_documents(self) -> tuple[int, ...]:
        return tuple(place for place, name in enumerate(self.columns) if name in self.arrays or name in self.documents)

    def of(self, columns: Sequence[str]) -> LineEncoder:
        """Return the encoder for other columns of the same table."""
        return LineEncoder(columns, self.arrays, self.documents)

    def encode(self, cells: Sequence[object]) -> bytes:
        """Return one row as a line, with its end.

        Raises:
            Unstorable: a cell's value cannot be stored (a NUL character, a lone surrogate, an object of another type),
                or the row has a wrong number of cells. The text names the column.
        """
        if len(cells) != len(self.columns):
            raise Unstorable(
                f"a row of {len(cells)} cells for the {len(self.columns)} columns {', '.join(self.columns)}"
            )
        given = cells
        try:
            if self._special:
                cells = list(cells)
                for place in self._special:
                    cells[place] = self._literal(self.columns[place], cells[place])
            line = "\t".join([cell if type(cell) is str else _CELLS[type(cell)](cell) for cell in cells])
            if not self._is_plain(line, cells):
                line = "\t".join([_CELLS[type(cell)](cell) for cell in cells])
            if "\0" not in line:
                return (line + "\n").encode()
        except Exception:  # noqa: BLE001, S110 - raised below, with the column of the cell
            pass
        return "\t".join(map(self._told, self.columns, given)).encode() + b"\n"

    def _is_plain(self, line: str, cells: Sequence[object]) -> bool:
        """Return whether no cell has a special character. Searching the whole line is faster than each cell."""
        return (
            "\n" not in line
            and "\r" not in line
            and line.count("\t") == len(self.columns) - 1
            and ("\\" not in line or line.count("\\") == cells.count(None))
        )

    def _literal(self, name: str, cell: object) -> object:
        if name in self.arrays:
            item = _item_of_documents if name in self.documents else _item
            return _array(cell, item) if isinstance(cell, (list, tuple)) else cell
        return _document(cell) if name in self.documents and cell is not None else cell

    def _told(self, name: str, cell: object) -> str:
        """Return the cell as text; subtypes of known types are allowed. Raises `Unstorable` with the column's name."""
        try:
            cell = self._literal(name, cell)
            text = _cell_of(cell)(cell)
            text.encode()
        except UnicodeEncodeError as error:
            raise Unstorable(f"column {name}: contains an unpaired surrogate") from error
        except Exception as error:
            raise Unstorable(f"column {name}: {text_of(error)}") from error
        if "\0" in text:
            raise Unstorable(f"column {name}: contains a NUL character, which PostgreSQL does not support")
        return text


def _escape(text: str) -> str:
    # Four searches are faster than a regular expression, and both are faster than a translation that changes nothing.
    if "\\" in text or "\t" in text or "\n" in text or "\r" in text:
        return text.translate(_ESCAPES)
    return text


def _duration(value: dt.timedelta) -> str:
    # Each part has its sign: otherwise some IntervalStyles apply the first sign to all parts.
    return f"{value.days:+d} days {value.seconds:+d}.{value.microseconds:06d} seconds"


def _document(value: object) -> str:
    text = _json(value).decode()
    if "\\u0000" in text and _escaped_nul(text):
        raise ValueError("contains a NUL character, which PostgreSQL does not support")
    return text


def _array(items: Sequence[object], item: Callable[[object], str]) -> str:
    return "{" + ",".join(map(item, items)) + "}"


def _item(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, (list, tuple)):
        return _array(value, _item)
    return _quoted(_text_of(value)(value))


def _item_of_documents(value: object) -> str:
    return "NULL" if value is None else _quoted(_document(value))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _refuse_value(value: object) -> str:
    raise TypeError(f"a value of type {type(value).__name__} cannot be stored in a row")


# Texts as the types' input functions read them. For subtypes, such as numpy's, not their own repr.
_TEXTS: Final[dict[type, Callable[[Any], str]]] = {
    str: str.__str__,
    bool: lambda value: "true" if value else "false",
    int: int.__repr__,
    float: float.__repr__,
    Decimal: str,
    dt.datetime: lambda value: value.isoformat(),
    dt.date: lambda value: value.isoformat(),
    dt.time: lambda value: value.isoformat(),
    dt.timedelta: _duration,
    UUID: str,
    bytes: lambda value: "\\x" + value.hex(),
    bytearray: lambda value: "\\x" + value.hex(),
    memoryview: lambda value: "\\x" + value.hex(),
    dict: _document,
    list: _document,
    tuple: _document,
}


def _escaped(text_of: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: _escape(text_of(value))


# Cells of a line. Only types that may contain a special character are searched for one: not numbers and dates.
_CELLS: Final[dict[type, Callable[[Any], str]]] = {
    **_TEXTS,
    **{kind: _escaped(_TEXTS[kind]) for kind in (bytes, bytearray, memoryview, dict, list, tuple)},
    str: _escape,
    type(None): lambda _: "\\N",
}


def _text_of(value: object) -> Callable[[Any], str]:
    return _nearest(_TEXTS, value)


def _cell_of(value: object) -> Callable[[Any], str]:
    return _nearest(_CELLS, value)


def _nearest(table: dict[type, Callable[[Any], str]], value: object) -> Callable[[Any], str]:
    return next((table[kind] for kind in type(value).__mro__ if kind in table), _refuse_value)
