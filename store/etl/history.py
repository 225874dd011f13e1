"""The declaration of a table that keeps each version of a row; its merge follows it (E8)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, time
from typing import Protocol

import attrs

from dataloader.store.etl.target_table import TableInfo, as_names


class Span(Protocol):
    """A window: from `start` to `end`; None where it is open."""

    @property
    def start(self) -> datetime | None:
        """The first instant inside."""

    @property
    def end(self) -> datetime | None:
        """The first instant after it."""


class Snapshot(Protocol):
    """A segment, for `as_of`: its `name` (a file's path; for a member the archive's and its own) and its window."""

    @property
    def name(self) -> str:
        """The segment's name."""

    @property
    def window(self) -> Span:
        """The window that it belongs to."""


@attrs.frozen(kw_only=True)
class History:
    """Keep each version of a row (SCD2): a change of a `tracked` column closes the row and opens a new one.

    Each segment is a snapshot as of the start of its window, or as of the day or instant that `as_of` returns for the
    segment. `complete`: a key that is not in the snapshot is closed. `valid_from` and `valid_to` are columns of type
    date or timestamptz, `is_current` is a boolean column.
    """

    tracked: tuple[str, ...] = attrs.field(converter=as_names)
    complete: bool = True
    as_of: Callable[[Snapshot], date] | None = None
    valid_from: str = "valid_from"
    valid_to: str = "valid_to"
    is_current: str = "is_current"

    @property
    def columns(self) -> tuple[str, str, str]:
        """The columns that only the merge writes, and no load."""
        return self.valid_from, self.valid_to, self.is_current

    def instant(self, snapshot: Snapshot, table: TableInfo) -> date:
        """As of when a snapshot holds: a day or an instant, whichever the table's columns have.

        Raises `ValueError` for a snapshot whose window has no start.
        """
        as_of = snapshot.window.start if self.as_of is None else self.as_of(snapshot)
        if as_of is None:
            raise ValueError(f"table {table.sql}: the snapshot {snapshot.name} has no instant")
        return self.fitting(as_of, table)

    def fitting(self, as_of: date, table: TableInfo) -> date:
        """In a table of days, an instant's day in its own zone; in a table of instants, a day's midnight in UTC."""
        has_days = table.column(self.valid_from).type == "date"
        if isinstance(as_of, datetime):
            return as_of.date() if has_days else as_of
        return as_of if has_days else datetime.combine(as_of, time(), UTC)
