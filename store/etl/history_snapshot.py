"""Declaration of one merge into a table of versions: the staged snapshot, its key, its columns and its time."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Sequence

import attrs

from dataloader.jobs.errors import TargetError
from dataloader.store.etl.history import History
from dataloader.store.etl.staging import StagedSegment
from dataloader.store.etl.target_table import TableInfo, as_names


@attrs.frozen(kw_only=True)
class HistoryMerge:
    """Snapshot to merge into a table of versions.

    Attributes:
        table: the target.
        history: the declaration of its versions.
        segment: the staged segment whose rows are the snapshot.
        rows: the number of staged rows; another number is an error.
        key: the columns that identify a thing over time.
        columns: the columns that the snapshot has, including the key's. Those that are not tracked are updated on the
            current version.
        shapes: as in `Merge`; a column that a row lacks has the value of the current version.
        as_of: the snapshot's date, or timestamp with a zone, from which its values are valid. A date is midnight in
            UTC. None if each row has its own time.
        is_marked: the rows have `is_current`, which says whether their key is gone.
        is_complete: the snapshot has all keys; keys that it lacks may be closed.

    Raises `TargetError` if the target does not fit, `ValueError` for a timestamp without a zone.
    """

    table: TableInfo
    history: History
    segment: StagedSegment
    rows: int
    key: Sequence[str] = attrs.field(converter=as_names)
    columns: Sequence[str] = attrs.field(converter=as_names)
    shapes: Collection[tuple[str, ...]] = ()
    as_of: dt.date | None = None
    is_complete: bool = True
    is_marked: bool = False

    def __attrs_post_init__(self) -> None:
        valid_from, valid_to, _ = self.history.columns
        self.table.check_loadable([*self.columns, *self.history.columns])
        if not self.key:
            raise TargetError(f"table {self.table.sql}: a history needs a key")
        kind = self.table.column(valid_from).type
        if kind not in {"date", "timestamp with time zone"} or self.table.column(valid_to).type != kind:
            raise TargetError(
                f"table {self.table.sql}: {valid_from} and {valid_to} must both have the type date or timestamptz"
            )
        self.history.check_table(self.table)
        if self.as_of is None and not self.history.is_of_changes:
            raise TargetError(f"table {self.table.sql}: a snapshot needs a timestamp")
        if isinstance(self.as_of, dt.datetime):
            if self.as_of.utcoffset() is None:
                raise ValueError(f"as_of: {self.as_of} has no time zone")
            if kind == "date":
                raise TargetError(f"table {self.table.sql}: {valid_from} is a date, so as_of must be a date")

    @property
    def tracked(self) -> tuple[str, ...]:
        """Columns of the snapshot in which a change makes a new version."""
        return tuple(name for name in self.history.tracked if name in self.columns)

    @property
    def others(self) -> tuple[str, ...]:
        """Columns that are updated on the current version."""
        return tuple(name for name in self.columns if name not in {*self.key, *self.history.tracked})

    @property
    def closes_missing(self) -> bool:
        """Return True if a key that the snapshot lacks is closed."""
        return self.history.complete and self.is_complete

    @property
    def instant(self) -> str:
        """`as_of` with a zone, as text."""
        assert self.as_of is not None  # noqa: S101 - a snapshot has one
        return instant_of_snapshot(self.as_of).isoformat()


def instant_of_snapshot(as_of: dt.date) -> dt.datetime:
    """Return a snapshot's time as a timestamp: of a date, midnight in UTC."""
    return as_of if isinstance(as_of, dt.datetime) else dt.datetime.combine(as_of, dt.time(), dt.UTC)
