"""Takes the items that a function yields: encodes their rows in pieces, and decides where a segment ends.

A row is encoded before its function continues. Otherwise a function that yields the same dictionary repeatedly would be
read wrongly. Runs in the function's thread, or in a worker thread for a list of an async function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Final

import attrs
import msgspec

from dataloader.flows.etl.declare.rows import Checkpoint, Rows
from dataloader.flows.etl.parse.database_reader import Reader
from dataloader.flows.etl.parse.transform import MAX_REFUSED, Processed, Recipe, RowMaker
from dataloader.flows.etl.sources.source import Record
from dataloader.jobs.errors import BadRequest

NOTHING: Final = object()
"""State of a cut without a new checkpoint."""


@attrs.frozen
class Cut:
    """End of a segment. `state` is that of the last checkpoint since the cut before it, or `NOTHING`.

    `is_last`: the function has yielded all of its rows.
    """

    state: Any = NOTHING
    is_last: bool = False


@attrs.define(eq=False, kw_only=True)
class RowTaker:
    """Takes the items of one call of a function.

    `is_cut_anywhere`: a segment may end at any row until there is a checkpoint. `is_cut_at_checkpoints`: it may end at
    a checkpoint. `has_state`: the function continues at the state of an earlier run. `no_checkpoints` is the option of
    the table because of which each run must load all rows, if any. `piece` are the maximum rows, bytes and seconds of a
    piece. `after_checkpoint` is the number of rows that the function has yielded after its last checkpoint, if it has
    yielded any, known at its end.
    """

    source: Rows
    recipe: Recipe
    piece: tuple[int, int, float]
    is_cut_anywhere: bool
    is_cut_at_checkpoints: bool
    has_state: bool = False
    no_checkpoints: str | None = None
    reader: Reader | None = None
    after_checkpoint: int = attrs.field(init=False, default=0)
    _at_checkpoint: int | None = attrs.field(init=False)
    _maker: RowMaker = attrs.field(init=False)
    _piece_ends_at: float = attrs.field(init=False, default=0.0)
    _segment_ends_at: float = attrs.field(init=False, default=0.0)
    _in_segment: int = attrs.field(init=False, default=0)
    _refused: int = attrs.field(init=False, default=0)
    _state: Any = attrs.field(init=False, default=NOTHING)
    _is_empty: bool = attrs.field(init=False, default=True)

    @_at_checkpoint.default
    def _at_state(self) -> int | None:
        return 0 if self.has_state else None

    def __attrs_post_init__(self) -> None:
        self._begin_piece()

    def take(self, item: object) -> Iterator[Processed | Cut]:
        """Encode the rows of an item. Yield each piece that is complete, and a `Cut` where the segment ends.

        Raises `BadRequest` for an item that is neither a row, a list of rows nor a checkpoint, and for a checkpoint of
        a load whose runs must load all rows.
        """
        if isinstance(item, Checkpoint):
            if self.no_checkpoints is not None:
                raise BadRequest(
                    "Checkpoint",
                    f"is not allowed with {self.no_checkpoints}: a row that a run does not load counts as deleted at"
                    " the source; yield all rows without a Checkpoint",
                )
            self._state, self.is_cut_anywhere = item.state, False
            self._at_checkpoint = self._in_segment
            if self.is_cut_at_checkpoints and self._is_due(monotonic()):
                yield from self._cut()
            return
        most_rows, most_bytes, _ = self.piece
        for row in item if isinstance(item, list) else (item,):
            record, error = self._as_record(row)
            if error is None:
                self._maker.add(record)
            else:
                self._maker.refuse(record, error)
            self._in_segment += 1
            now = monotonic()
            if self._maker.records >= most_rows or self._maker.size >= most_bytes or now >= self._piece_ends_at:
                yield self._end_piece()
            if self.is_cut_anywhere and self._is_due(now):
                yield from self._cut()

    def end(self) -> Iterator[Processed | Cut]:
        """Yield the rest at the end of the function. It is a segment, also without rows, unless the last cut was it."""
        if self._at_checkpoint is not None:
            self.after_checkpoint = self._in_segment - self._at_checkpoint
        if self._in_segment or self._state is not NOTHING or self._is_empty:
            yield from self._cut(is_last=True)

    def _is_due(self, now: float) -> bool:
        return self._in_segment >= self.source.every_rows or (self._in_segment > 0 and now >= self._segment_ends_at)

    def _cut(self, *, is_last: bool = False) -> Iterator[Processed | Cut]:
        if self._maker.records:
            yield self._end_piece()
        yield Cut(self._state, is_last)
        self._state, self._in_segment, self._refused, self._is_empty = NOTHING, 0, 0, False
        self._at_checkpoint = None if self._at_checkpoint is None else 0
        self._begin_piece()

    def _begin_piece(self) -> None:
        now = monotonic()
        if not self._in_segment:
            self._segment_ends_at = now + self.source.every_s
        self._piece_ends_at = now + self.piece[2]
        self._maker = RowMaker(
            self.recipe,
            {"source_file": None, "source_endpoint": None, "fetched_at": datetime.now(UTC)},
            reader=self.reader,
            most_refused=max(0, MAX_REFUSED - self._refused),
        )

    def _end_piece(self) -> Processed:
        made = self._maker.made()
        self._refused += len(made.refused)
        self._begin_piece()
        return made

    def _as_record(self, row: object) -> tuple[Record, Exception | None]:
        """Return a row as a mapping of its fields, and an error if a field has no value."""
        if isinstance(row, Mapping):
            return row, None
        kind: type[Any] = type(row)
        if attrs.has(kind):
            return _record_of_fields(row, [field.name for field in attrs.fields(kind)])
        if dataclasses.is_dataclass(row):
            return _record_of_fields(row, [field.name for field in dataclasses.fields(row)])
        if isinstance(row, msgspec.Struct):
            return _record_of_fields(row, row.__struct_fields__)
        raise BadRequest(
            f"row {self._in_segment + 1}",
            "must be a mapping, an attrs, dataclass or msgspec object, a list of these, or a Checkpoint,"
            f" not {type(row).__name__}",
        )


def _record_of_fields(row: object, names: Iterable[str]) -> tuple[Record, Exception | None]:
    record: dict[str, Any] = {}
    error: Exception | None = None
    for name in names:
        try:
            record[name] = getattr(row, name)
        except Exception as raised:  # noqa: BLE001 - a field without a value, or an error of a property
            error = error or raised
    return record, error
