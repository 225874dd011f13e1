"""Makes rows of a page's records, as lines for the database, and records the failures of single records.

Runs in a thread or in another process, so everything that it needs is in a `Recipe`, except the reader of a transform
that reads the database.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from operator import itemgetter
from typing import Any, Final

import attrs
import msgspec

from dataloader.flows.etl.declare.load import Made, Row
from dataloader.flows.etl.parse.copy_lines import LineEncoder
from dataloader.flows.etl.parse.database_reader import Reader
from dataloader.flows.etl.sources.source import Page, Record
from dataloader.jobs.error_groups import first_error, is_outage
from dataloader.jobs.errors import StoreUnavailable
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.text import said_by, storable_json, storable_text, text_of
from dataloader.store.etl.merge import CONTENT_HASH
from dataloader.store.etl.staging import SEQUENCE, StagedLines

HASH_VERSION: Final = "2"
PAYLOAD: Final = "payload"
MAX_SAMPLE: Final = 1_000
MAX_KEY: Final = 200
MAX_DIGITS: Final = 1_000
_sorted_json = msgspec.json.Encoder(order="sorted", decimal_format="number").encode
MAX_REFUSED: Final = 1_000
"""Maximum refused records of a page that are kept one by one, each with the page's request. Others are only counted."""
PIECE: Final = 10_000
"""Number of lines that are joined into one: single lines take twice the memory."""


@attrs.frozen(kw_only=True)
class Recipe:
    """Conversion of records to rows of one table. `encoder` has the columns that may be written, in order.

    `changed_at` is the column with the time of a row, if a row must have one.

    `takes_id`: the transform is that of a detail and also gets the detail's ID. It gets a `Reader` if it `reads`.
    """

    transform: Callable[..., Made]
    encoder: LineEncoder
    key: tuple[str, ...]
    hash_without: frozenset[str]
    takes_id: bool = False
    reads: bool = False
    changed_at: str | None = None
    identify: Callable[[Record], str | int | None] | None = None


@attrs.frozen
class RefusedRecord:
    """Record that became no row: its place in the page, its key or a substitute, the error, and its beginning."""

    index: int
    key: str
    error: str
    sample: str


@attrs.frozen(kw_only=True)
class Processed:
    """Result of a page with `records` records: the lines of `rows` rows, for each set of columns.

    `dropped` are fields of rows for which the table has neither columns nor a payload. `left_out` is the number of
    records without a row. `more_refused` is the number of refused records that are not in `refused`. `ids` are the IDs
    of details to request; `without_id` is the number of records without one.
    """

    records: int
    rows: int
    lines: list[StagedLines] = attrs.field(repr=False)
    dropped: frozenset[str]
    left_out: int
    refused: list[RefusedRecord]
    more_refused: int
    ids: list[str | int]
    without_id: int

    @property
    def shapes(self) -> frozenset[tuple[str, ...]]:
        """Return the columns of each kind of row."""
        return frozenset(lines.columns for lines in self.lines)


def process_page(
    recipe: Recipe, page: Page, key: str, metadata: Mapping[str, Any], reader: Reader | None = None
) -> Processed:
    """Make rows of the page's records. `key` is the request's; all rows share the columns of `metadata`.

    Raises `SourceError` if the records are read during the iteration and are unreadable, and `StoreUnavailable` if the
    transform cannot read the database, which is not a failure of the record.
    """
    maker = RowMaker(recipe, metadata, key=key, reader=reader)
    for record in page.records:
        maker.add(record)
    return maker.made()


class RowMaker:
    """Makes rows of records, one after the other. `records` is their number until now, `size` the bytes of the lines.

    After `most_refused` refused records, further ones are only counted.
    """

    def __init__(
        self,
        recipe: Recipe,
        metadata: Mapping[str, Any],
        *,
        key: str = "",
        reader: Reader | None = None,
        most_refused: int = MAX_REFUSED,
    ) -> None:
        self.records = self.size = 0
        self._recipe = recipe
        self._before = [key] if recipe.takes_id else []
        self._after = [reader] if recipe.reads else []
        self._table = _Table(recipe, metadata)
        self._most_refused = most_refused
        self._refused: list[RefusedRecord] = []
        self._more_refused = 0
        self._ids: list[str | int] = []
        self._left_out = self._without_id = 0

    @property
    def rows(self) -> int:
        """Number of lines."""
        return sum(group.number for group in self._table.groups.values())

    def add(self, record: Record) -> None:
        """Make the rows of a record, or note why it became none. Raises `StoreUnavailable` as `process_page` does."""
        recipe, table = self._recipe, self._table
        self.records += 1
        try:
            made = recipe.transform(*self._before, record, *self._after)
            if type(made) is dict:
                encoded = [table.encode(made)]
            else:
                several = [made] if made is None or isinstance(made, Mapping) else made
                encoded = [table.encode(row) for row in several if row is not None]
                self._left_out += not encoded
            if recipe.identify is not None:
                found = _ids_of(recipe.identify(record))
                self._ids += found
                self._without_id += not found
        except Exception as error:
            if is_outage(error):  # also an error that the transform has wrapped: it is not a failure of the record
                raise StoreUnavailable(str(first_error(error))) from error
            self._refuse(record, error)
        else:
            for shape, line in encoded:
                table.add(shape, line)
                self.size += len(line)

    def refuse(self, record: Record, error: Exception) -> None:
        """Note a record that cannot be read, with the fields that can."""
        self.records += 1
        self._refuse(record, error)

    def _refuse(self, record: Record, error: Exception) -> None:
        if len(self._refused) < self._most_refused:
            self._refused.append(_refused_record(self._recipe, self.records - 1, record, error))
        else:
            self._more_refused += 1

    def made(self) -> Processed:
        """Return the rows of all records."""
        lines = [group.joined() for group in self._table.groups.values() if group.number]
        return Processed(
            records=self.records,
            rows=self.rows,
            lines=lines,
            dropped=frozenset(self._table.dropped),
            left_out=self._left_out,
            refused=self._refused,
            more_refused=self._more_refused,
            ids=self._ids,
            without_id=self._without_id,
        )


def _ids_of(detail: str | int | None) -> list[str | int]:
    if isinstance(detail, str):
        detail.encode()  # raises an error for a lone surrogate, which is invalid in a request
    if detail is None or isinstance(detail, (str, int)):
        return [] if detail is None else [detail]
    raise TypeError(f"the ID of its details must be a string or a number, not {detail!r:.80}")


class _LineGroup:
    """Lines of rows with the same columns."""

    def __init__(self, columns: tuple[str, ...], encoder: LineEncoder) -> None:
        self.columns = columns
        self.number = 0
        self.encode = encoder.of((SEQUENCE, *columns)).encode
        self._lines: list[bytes] = []
        self._pieces: list[bytes] = []

    def add(self, line: bytes) -> None:
        self.number += 1
        self._lines.append(line)
        if len(self._lines) >= PIECE:
            self._pieces.append(b"".join(self._lines))
            self._lines.clear()

    def joined(self) -> StagedLines:
        return StagedLines(self.columns, self.number, b"".join([*self._pieces, *self._lines]))


@attrs.frozen
class _Shape:
    """Properties of rows with the same names: the fields for the `payload`, those that are `hashed`, and so on."""

    group: _LineGroup
    payload: Sequence[str] | None
    hashed: Sequence[str] | None
    dropped: frozenset[str]
    in_order: Callable[[Mapping[str, Any]], tuple[Any, ...]]


class _Table:
    """Table into which the rows of one page are written. `dropped` are fields without a column."""

    def __init__(self, recipe: Recipe, metadata: Mapping[str, Any]) -> None:
        self.groups: dict[tuple[str, ...], _LineGroup] = {}
        self.dropped: set[str] = set()
        self._recipe = recipe
        self._known = frozenset(recipe.encoder.columns)
        self._metadata = {name: value for name, value in metadata.items() if name in self._known}
        self._shapes: dict[tuple[str, ...], _Shape] = {}
        self._place = 0

    def encode(self, row: Row) -> tuple[_Shape, bytes]:
        """Return the row's line, with its payload, hash and metadata, if the table has columns for them."""
        # This dominates the time for large files, so it uses single calls where possible.
        names = tuple(row)
        shape = self._shapes.get(names)
        if shape is None:
            shape = self._shapes[names] = self._shape(names)
        for name in self._recipe.key:
            if row.get(name) is None:
                raise ValueError(f"column {name} of the key has no value")
        changed_at = self._recipe.changed_at
        if changed_at is not None and row.get(changed_at) is None:
            raise ValueError(f"column {changed_at}, the change time of the row, has no value")
        self._place += 1
        cells = {**self._metadata, **row, SEQUENCE: self._place}
        if shape.payload is not None:
            cells[PAYLOAD] = {name: row[name] for name in shape.payload}
        if shape.hashed is not None:
            cells[CONTENT_HASH] = content_hash({name: cells[name] for name in shape.hashed}, self._recipe.hash_without)
        return shape, shape.group.encode(shape.in_order(cells))

    def add(self, shape: _Shape, line: bytes) -> None:
        """Add a line that `encode` has made."""
        shape.group.add(line)
        if shape.dropped:
            self.dropped |= shape.dropped

    def _shape(self, names: tuple[str, ...]) -> _Shape:
        rest = [name for name in names if name not in self._known]
        has_payload = bool(rest) and PAYLOAD in self._known and PAYLOAD not in names
        given = [name for name in names if name in self._known] + [PAYLOAD] * has_payload
        has_hash = CONTENT_HASH in self._known and CONTENT_HASH not in given
        brought = {*self._metadata, *given} | ({CONTENT_HASH} if has_hash else set())
        columns = tuple(name for name in self._recipe.encoder.columns if name in brought)
        if columns not in self.groups:
            self.groups[columns] = _LineGroup(columns, self._recipe.encoder)
        return _Shape(
            group=self.groups[columns],
            payload=sorted(rest) if has_payload else None,
            hashed=given if has_hash else None,
            dropped=frozenset() if has_payload else frozenset(rest),
            in_order=itemgetter(SEQUENCE, *columns) if columns else lambda cells: (cells[SEQUENCE],),
        )


def content_hash(row: Mapping[str, Any], without: frozenset[str] = frozenset()) -> str:
    """Return a digest of a row's values except those in `without`, prefixed by the version of the algorithm.

    Equal contents have equal digests: keys in any order; 10, 10.0 and Decimal("10.00"); composed and decomposed
    letters.
    """
    canonical = _canonical({name: value for name, value in row.items() if name not in without})
    text = _sorted_json(canonical)
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.decode()).encode()
    return f"{HASH_VERSION}:{hashlib.sha256(text).hexdigest()}"


def _canonical(value: Any) -> Any:
    if isinstance(value, float):
        # Use the decimal text, not the binary value: 0.1 is 0.1.
        value = Decimal(repr(float(value)))
    if isinstance(value, Decimal):
        return _canonical_number(value)
    if isinstance(value, Mapping):
        return {unicodedata.normalize("NFC", str(name)): _canonical(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return value


def _canonical_number(value: Decimal) -> int | Decimal | str:
    """Return the same value for equal numbers: an integer if whole, otherwise a decimal without trailing zeros."""
    if not value.is_finite() or abs(value.adjusted()) > MAX_DIGITS:
        return str(value)
    digits = format(value, "f")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return Decimal(digits) if "." in digits else int(digits)


def _refused_record(recipe: Recipe, index: int, record: Record, error: Exception) -> RefusedRecord:
    values: Sequence[object] = [record[name] for name in recipe.key if name in record] or list(record.values())[:3]
    key = ", ".join(map(text_of, values))
    return RefusedRecord(index, masked_beginning(key, MAX_KEY), masked_beginning(said_by(error)), sample_of(record))


def sample_of(value: object) -> str:
    """Return the beginning of a value as JSON, masked, for display."""
    return masked_beginning(storable_json(value))


def masked_beginning(text: str, limit: int = MAX_SAMPLE) -> str:
    """Return the beginning of a text, masked before it is cut: a cut could leave a part of a secret unmasked."""
    return storable_text(mask_text(mask_text(text[:20_000])[:limit]))


def metadata_of(*, endpoint: str, url: str, is_file: bool, fetched_at: datetime) -> dict[str, Any]:
    """Return the columns with the origin of a row."""
    return {"source_file": endpoint if is_file else None, "source_endpoint": url, "fetched_at": fetched_at}
