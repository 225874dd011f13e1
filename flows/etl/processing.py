"""What a worker makes of a page: rows as lines for the database, and the failures of single records (E2, E10).

Runs in a thread, or in another process: all it is given is in a `Recipe`, and it touches nothing else, but for a
transform that reads the database.
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

from dataloader.flows.etl.load import Made, Row
from dataloader.flows.etl.reader import Reader
from dataloader.flows.etl.rows import DEFAULT, LineEncoder
from dataloader.flows.etl.sources.base import Page, Record
from dataloader.jobs.errors import StoreUnavailable
from dataloader.jobs.masking import mask_text
from dataloader.jobs.text import storable_text
from dataloader.store.etl_merge import CONTENT_HASH

HASH_VERSION: Final = "1"
PAYLOAD: Final = "payload"
MAX_SAMPLE: Final = 1_000
MAX_KEY: Final = 200
MAX_DIGITS: Final = 1_000
MAX_REFUSED: Final = 1_000
"""Records of a page that are refused one by one; of the others the number is kept. All have the page's request."""
PIECE: Final = 10_000
"""Lines that are joined: by themselves they take as much again."""


@attrs.frozen(kw_only=True)
class Recipe:
    """How records become rows of one table: `encoder` has the columns that may be written, in order.

    `defaulted` are those that the database has a default for, where a row has no value. `takes_id`: the transform is a
    detail's, and gets what was asked for as well; it gets a `Reader` if it `reads`.
    """

    transform: Callable[..., Made]
    encoder: LineEncoder
    key: tuple[str, ...]
    hash_without: frozenset[str]
    defaulted: frozenset[str]
    takes_id: bool = False
    reads: bool = False
    identify: Callable[[Record], str | int | None] | None = None


@attrs.frozen
class Refused:
    """A record that became no row: its place in the page, its key or what stands for it, why, and its beginning."""

    index: int
    key: str
    error: str
    sample: str


@attrs.frozen(kw_only=True)
class Processed:
    """What became of a page of `records` records: the lines of `rows` rows, the `columns` that any of them brings.

    `dropped` are the fields of rows that the table has no columns for, nor for a payload. `left_out` records gave no
    row; besides `refused`, `more_refused` were. `ids` are what details are to be asked for, `without_id` had none.
    """

    records: int
    rows: int
    lines: bytes = attrs.field(repr=False)
    columns: frozenset[str]
    dropped: frozenset[str]
    left_out: int
    refused: list[Refused]
    more_refused: int
    ids: list[str | int]
    without_id: int


def process(
    recipe: Recipe, page: Page, key: str, metadata: Mapping[str, Any], reader: Reader | None = None
) -> Processed:
    """Make rows of the page's records; `key` is the request's, `metadata` are columns that are the same for all.

    Raises `SourceError` if the records are read as one goes and can't be; `StoreUnavailable` if the transform reads the
    database and can't: that is no record's failure.
    """
    before = [key] if recipe.takes_id else []
    after = [reader] if recipe.reads else []
    table = _Table(recipe, metadata)
    lines: list[bytes] = []
    pieces: list[bytes] = []
    refused: list[Refused] = []
    ids: list[str | int] = []
    left_out = without_id = records = rows = more_refused = 0
    for index, record in enumerate(page.records):
        records = index + 1
        try:
            made = recipe.transform(*before, record, *after)
            if type(made) is dict:
                encoded = [table.encode(made)]
            else:
                several = [made] if made is None or isinstance(made, Mapping) else made
                encoded = [table.encode(row) for row in several if row is not None]
                left_out += not encoded
            if recipe.identify is not None:
                found = _ids_of(recipe.identify(record))
                ids += found
                without_id += not found
        except StoreUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a transform raises is this record's failure
            if len(refused) < MAX_REFUSED:
                refused.append(_refusal(recipe, index, record, error))
            else:
                more_refused += 1
        else:
            lines += encoded
            if len(lines) >= PIECE:
                rows += len(lines)
                pieces.append(b"".join(lines))
                lines.clear()
    return Processed(
        records=records,
        rows=rows + len(lines),
        lines=b"".join([*pieces, *lines]),
        columns=frozenset(table.brought & table.known),
        dropped=frozenset(table.brought - table.known),
        left_out=left_out,
        refused=refused,
        more_refused=more_refused,
        ids=ids,
        without_id=without_id,
    )


def _ids_of(detail: str | int | None) -> list[str | int]:
    if detail is None or isinstance(detail, (str, int)):
        return [] if detail is None else [detail]
    raise TypeError(f"the id of its details is {detail!r:.80}; a text or a number is needed")


class _Table:
    """The table as rows of one page are written into it; `brought` are the names of what any of them brings."""

    def __init__(self, recipe: Recipe, metadata: Mapping[str, Any]) -> None:
        self.known = frozenset(recipe.encoder.columns)
        # COPY refuses to be asked for a default where there is none.
        absent = {name: DEFAULT if name in recipe.defaulted else None for name in recipe.encoder.columns}
        same = {name: value for name, value in metadata.items() if name in absent}
        self.brought: set[str] = {*same}
        self._recipe = recipe
        self._absent = {**absent, **same}
        self._in_order = itemgetter(*absent) if len(absent) > 1 else lambda cells: tuple(map(cells.get, absent))
        self._has_hash = CONTENT_HASH in absent
        self._has_payload = PAYLOAD in absent

    def encode(self, row: Row) -> bytes:
        """The row's line, with its payload, hash and metadata, as far as the table has columns for them."""
        if self._has_payload and PAYLOAD not in row and not row.keys() <= self.known:
            rest = {name: row[name] for name in sorted(row.keys() - self.known)}
            row = {**{name: value for name, value in row.items() if name in self.known}, PAYLOAD: rest}
        # This is what large files wait for: nothing below is done by hand for a row that can be done in one call.
        cells = {**self._absent, **row}
        for name in self._recipe.key:
            if row.get(name) is None:
                raise ValueError(f"column {name} of the key has no value")
        if self._has_hash and CONTENT_HASH not in row:
            known = {name: value for name, value in row.items() if name in self.known}
            cells[CONTENT_HASH] = content_hash(known, self._recipe.hash_without)
            self.brought.add(CONTENT_HASH)
        line = self._recipe.encoder.encode(self._in_order(cells))
        if not row.keys() <= self.brought:
            self.brought |= row.keys()
        return line


def content_hash(row: Mapping[str, Any], without: frozenset[str] = frozenset()) -> str:
    """A digest of a row's values but for those `without`, behind the version of the way it is made.

    The same for the same contents: keys in any order, 1.10 and 1.1, composed and decomposed letters.
    """
    canonical = _canonical({name: value for name, value in row.items() if name not in without})
    text = msgspec.json.encode(canonical, order="sorted")
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.decode()).encode()
    return f"{HASH_VERSION}:{hashlib.sha256(text).hexdigest()}"


def _canonical(value: Any) -> Any:
    if isinstance(value, Decimal):
        if not value.is_finite() or abs(value.adjusted()) > MAX_DIGITS:
            return str(value)
        digits = format(value, "f")
        digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
        return "0" if digits == "-0" else digits
    if isinstance(value, Mapping):
        return {unicodedata.normalize("NFC", str(name)): _canonical(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return value


def _refusal(recipe: Recipe, index: int, record: Record, error: Exception) -> Refused:
    values: Sequence[object] = [record[name] for name in recipe.key if name in record] or list(record.values())[:3]
    key = ", ".join(map(str, values))
    return Refused(index, brief(key, MAX_KEY), brief(f"{type(error).__name__}: {error}"), sample_of(record))


def sample_of(value: object) -> str:
    """The beginning of a value as JSON, masked, for people."""
    try:
        return brief(msgspec.json.encode(value, enc_hook=str).decode())
    except Exception:  # noqa: BLE001 - a record that is no JSON is shown all the same
        return brief(repr(value))


def brief(text: str, limit: int = MAX_SAMPLE) -> str:
    """The beginning of a text, masked before it is cut: of a secret that a cut goes through a part would stay."""
    return storable_text(mask_text(mask_text(text[:20_000])[:limit]))


def metadata_of(*, endpoint: str, url: str, is_file: bool, fetched_at: datetime) -> dict[str, Any]:
    """The columns that say where a row came from."""
    return {"source_file": endpoint if is_file else None, "source_endpoint": url, "fetched_at": fetched_at}
