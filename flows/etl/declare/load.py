"""What a data engineer declares: a `Load` says where records come from and which table they go to.

    rates = Load(
        name="ecb.rates",
        source=Http("https://api.example.org", "/rates", params=days, pages=PageNumber(size=500), format=Json("items")),
        windows=Windows(start=date(1999, 1, 4), column="day"),
        transform=to_row,
        target=Target("ecb_rate", key=("day", "currency")),
    )
    add_loads(tasks, rates)

Nothing here runs: run/load_task.py makes a task of a load.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, date, datetime, time
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol

import attrs

from dataloader.flows.etl.declare.pipeline_config import LONGEST_S, Given, PipelineConfig, check_names
from dataloader.flows.etl.declare.windows import Windows
from dataloader.flows.etl.parse.database_reader import Reader
from dataloader.flows.etl.sources.source import Record, Request, Source, Window
from dataloader.jobs.model import MAX_NAME
from dataloader.store.etl.history_merge import HistoryMerge
from dataloader.store.etl.suppliers import Budget
from dataloader.store.etl.tables import Segment, TableInfo, as_names

Row = Mapping[str, Any]
"""A row by its columns' names; what is no column goes into the column `payload`, where the table has one."""

Made = Row | Sequence[Row] | None
"""What a transform makes of a record."""

_NOTHING: Final[Given] = MappingProxyType({})


class Snapshot(Protocol):
    """What is known of a segment: its `name` (of a file its path, of an archive's member both) and its `window`."""

    name: str
    window: Window


@attrs.frozen(kw_only=True)
class History:
    """Keep each version of a row (SCD2): a change of a `tracked` column closes the row and opens a new one.

    Each segment is a snapshot, as of the beginning of its window, or of what `as_of` makes of the segment's name and
    window. `complete`: a key that is not in the snapshot is closed.
    """

    tracked: tuple[str, ...] = attrs.field(converter=as_names)
    complete: bool = True
    as_of: Callable[[Snapshot], date] | None = None
    valid_from: str = "valid_from"
    valid_to: str = "valid_to"
    is_current: str = "is_current"

    def instant(self, snapshot: Snapshot, table: TableInfo) -> date:
        """As of when a snapshot holds, as the table has it: as a day or as an instant.

        Raises `ValueError` for one that has no beginning.
        """
        as_of = snapshot.window.start if self.as_of is None else self.as_of(snapshot)
        if as_of is None:
            raise ValueError(f"table {table.sql}: the snapshot {snapshot.name} has no instant")
        return self._fitting(as_of, table)

    def _fitting(self, as_of: date, table: TableInfo) -> date:
        """Where the table has days, an instant is its day in its own zone; where it has instants, a day is midnight."""
        has_days = table.column(self.valid_from).type == "date"
        if isinstance(as_of, datetime):
            return as_of.date() if has_days else as_of
        return as_of if has_days else datetime.combine(as_of, time(), UTC)

    def merge(
        self,
        table: TableInfo,
        segment: Segment,
        *,
        rows: int,
        key: Sequence[str],
        tracked: Sequence[str],
        columns: Sequence[str],
        as_of: date,
        shapes: Collection[tuple[str, ...]] = (),
        complete: bool,
    ) -> HistoryMerge:
        """What the staged rows do to the table: of their `columns` those neither of the key nor tracked are others."""
        known = {*key, *self.tracked}
        return HistoryMerge(
            table=table,
            segment=segment,
            rows=rows,
            key=key,
            tracked=tracked,
            others=[name for name in columns if name not in known],
            shapes=shapes,
            as_of=self._fitting(as_of, table),
            complete=self.complete and complete,
            valid_from=self.valid_from,
            valid_to=self.valid_to,
            is_current=self.is_current,
        )


@attrs.frozen(kw_only=True)
class Target:
    """The table that rows go to; its columns are read from the database.

    `key` are the columns of a unique index. `mode`: `upsert` inserts and updates by the key and leaves unchanged rows
    alone; `insert` only adds. Rows are unchanged by their `content_hash`, where the table has such a column, which is
    made of all values but those of `hash_without`; else by comparing the columns. `delete_missing` names the column
    (`deleted_at` or a boolean) that marks rows which the source no longer has, within the window or, without windows,
    in the whole table. The columns `source_file`, `source_endpoint` and `fetched_at` are filled where the table has
    them.
    """

    table: str
    key: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    mode: Literal["upsert", "insert"] = "upsert"
    delete_missing: str | None = None
    hash_without: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    history: History | None = None

    def __attrs_post_init__(self) -> None:
        if self.mode not in {"upsert", "insert"}:
            raise ValueError(f"mode: must be upsert or insert, not {self.mode!r}")
        for name, needed in (
            ("mode", self.mode == "upsert"),
            ("delete_missing", self.delete_missing),
            ("history", self.history),
        ):
            if needed and not self.key:
                raise ValueError(f"key: is missing; {name} of table {self.table} needs it")
        if self.history is not None and self.delete_missing is not None:
            raise ValueError(
                "delete_missing: is not allowed with history; a key that is gone has its last version closed"
            )


@attrs.frozen(kw_only=True)
class Detail:
    """For each record of a list a request of its own, after the list is written (E7).

    `id` gives what is asked for, or None for a record that has no details; `request` makes the request of it. `source`
    reads the answers: another one than the list's when the format is another. `transform` makes a row of the id, as
    text, and a record of the answer, or None to leave it out; with `reads` it is given a `Reader` as well.
    """

    id: Callable[[Record], str | int | None]
    request: Callable[[str | int], Request]
    source: Source
    target: Target
    transform: Callable[[str, Record], Made] | Callable[[str, Record, Reader], Made]
    reads: bool = False

    def of(self, detail: str | int) -> Request:
        """The request for what has this id, known by it."""
        return attrs.evolve(self.request(detail), key=str(detail))


@attrs.frozen(kw_only=True)
class Load:
    """One table's load (E6). Its `name` is the task's.

    `transform` makes a row of a raw record, a list of rows, or None to leave it out; it runs in threads, or in
    `processes` if it takes much time and is a function of a module. With `reads` it is given a `Reader` as well, for
    what it looks up in the database (E2). `pipeline` are settings of `PipelineConfig` for this load. `budgets` limit
    the requests to its source on top of the pause. `timeout_s` stops a run.

    Raises `ValueError`, which names the field, its value and what is allowed.
    """

    name: str
    source: Source
    target: Target
    transform: Callable[[Record], Made] | Callable[[Record, Reader], Made] = dict
    windows: Windows | None = None
    detail: Detail | None = None
    budgets: tuple[Budget, ...] = ()
    pipeline: Given = _NOTHING
    processes: bool = False
    reads: bool = False
    timeout_s: float | None = None
    description: str = ""

    def __attrs_post_init__(self) -> None:
        if not self.name or len(self.name) > MAX_NAME:
            raise ValueError(f"name: must be 1 to {MAX_NAME} characters, not {self.name!r:.80}")
        check_names(self.pipeline, f"load {self.name}: pipeline")
        # Of a pause with one end the other is known when the run begins.
        PipelineConfig(**{"rate_min": 0, "rate_max": LONGEST_S, **self.pipeline})
        if self.detail is not None and not self.target.key:
            raise ValueError(f"load {self.name}: target.key: is missing; a list whose details are asked for needs it")
        if self.target.history is not None and self.windows is None and self.target.history.as_of is None:
            raise ValueError(f"load {self.name}: windows: is missing; history needs an instant for each snapshot")
        if self.target.delete_missing is not None and self.windows is not None and self.windows.column is None:
            raise ValueError(
                f"load {self.name}: windows.column: is missing; by it rows of {self.target.table} that the source has "
                "no more in a window are found"
            )
        if self.processes and (self.reads or (self.detail is not None and self.detail.reads)):
            raise ValueError(f"load {self.name}: reads: is not allowed with processes, which have no connection")
        for function in self._functions() if self.processes else ():
            try:
                pickle.dumps(function)
            except Exception:  # noqa: BLE001 - whatever pickle says of it
                raise ValueError(
                    f"load {self.name}: {function!r} can't be sent to another process; a function of a module can"
                ) from None

    def _functions(self) -> list[Callable[..., Any]]:
        return [self.transform] if self.detail is None else [self.transform, self.detail.transform, self.detail.id]
