"""Declaration of a table that keeps each version of a row, which its merge follows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, time
from typing import Protocol

import attrs

from dataloader.jobs.errors import TargetError
from dataloader.store.etl.target_table import TableInfo, as_columns


class WindowSpan(Protocol):
    """Window from `start` to `end`; None where it is open."""

    @property
    def start(self) -> datetime | None:
        """First timestamp in the window."""

    @property
    def end(self) -> datetime | None:
        """First timestamp after the window."""


class SegmentSnapshot(Protocol):
    """Segment, for `as_of`: its `name` (a file's path; for a member the archive's and its own) and its window."""

    @property
    def name(self) -> str:
        """The segment's name."""

    @property
    def window(self) -> WindowSpan:
        """Window that the segment belongs to."""


@attrs.frozen(kw_only=True)
class History:
    """Keep each version of a row (SCD2): a change of a `tracked` column closes the row and opens a new one.

    Args:
        tracked: column, or columns, whose changes make a new version.
        complete: each segment is a complete snapshot: a key that it lacks is closed.
        as_of: function that returns the day or timestamp of a snapshot from the segment's `name` and `window`. By
            default it is the start of the window. Required for a load without windows, unless it has `changed_at`.
        valid_from: column with the start of a version, of type date or timestamptz.
        valid_to: column with its end, of the same type; NULL while it is open.
        is_current: boolean column that marks the open version.
        changed_at: column of the rows with the time of their change, of the type of `valid_from`, which it may be
            itself. Then a segment is no snapshot: a version begins at its row's own time, and a row with false for
            `is_current` closes the version of its key. A missing key has no such time, so `complete` must be False.

    Raises `ValueError`, which names the field and the allowed values.
    """

    tracked: tuple[str, ...] = attrs.field(converter=as_columns)
    complete: bool = True
    as_of: Callable[[SegmentSnapshot], date] | None = None
    valid_from: str = "valid_from"
    valid_to: str = "valid_to"
    is_current: str = "is_current"
    changed_at: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.changed_at is None:
            return
        if self.complete:
            raise ValueError(
                "complete: must be False with changed_at, because a missing key has no change time; load a row for it"
                f" with {self.is_current} = false"
            )
        if self.as_of is not None:
            raise ValueError("as_of: cannot be combined with changed_at, which has the time of each row")
        if self.changed_at in {self.valid_to, self.is_current}:
            raise ValueError(f"changed_at: must be a column of the rows, or valid_from, not {self.changed_at!r}")

    @property
    def is_of_changes(self) -> bool:
        """Return whether each row has its own time, so that segments are no snapshots."""
        return self.changed_at is not None

    @property
    def columns(self) -> tuple[str, str, str]:
        """Columns that only the merge writes."""
        return self.valid_from, self.valid_to, self.is_current

    @property
    def not_loaded(self) -> frozenset[str]:
        """Columns of the history that rows lack. With `changed_at`, rows may have that column and `is_current`."""
        return frozenset(self.columns) - ({self.changed_at, self.is_current} if self.is_of_changes else set())

    def check_table(self, table: TableInfo) -> None:
        """Raise `TargetError` if the table lacks the column `changed_at`, or its type is not that of `valid_from`."""
        if self.changed_at is not None:
            kind, needed = (table.column(name).type for name in (self.changed_at, self.valid_from))
            if kind != needed:
                raise TargetError(
                    f"table {table.sql}: changed_at: column {self.changed_at} has the type {kind}, but must have that"
                    f" of {self.valid_from}, {needed}"
                )

    def instant(self, snapshot: SegmentSnapshot, table: TableInfo) -> date:
        """Return the time as of which a snapshot is valid: a day or a timestamp, as the table's columns require.

        Raises `ValueError` for a snapshot whose window has no start.
        """
        as_of = snapshot.window.start if self.as_of is None else self.as_of(snapshot)
        if as_of is None:
            raise ValueError(f"table {table.sql}: the snapshot {snapshot.name} has no timestamp")
        return self.fitting(as_of, table)

    def fitting(self, as_of: date, table: TableInfo) -> date:
        """Convert to the type of the table: a timestamp to the day in its own zone, a day to midnight in UTC."""
        has_days = table.column(self.valid_from).type == "date"
        if isinstance(as_of, datetime):
            return as_of.date() if has_days else as_of
        return as_of if has_days else datetime.combine(as_of, time(), UTC)
