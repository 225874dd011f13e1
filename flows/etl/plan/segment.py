"""Plan of a run: its segments, their target tables, and the conversion of records to rows.

A segment is a window or a file, and is committed as a whole. It has a part for each table: the list's, then the
details'.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import trio

from dataloader.flows.etl.declare.load import Detail, Table
from dataloader.flows.etl.declare.windows import is_begin_of_day
from dataloader.flows.etl.parse.transform import Recipe
from dataloader.flows.etl.plan.completed_details import CompletedDetails
from dataloader.flows.etl.sources.source import Request, Source, Window
from dataloader.store.etl.history import History
from dataloader.store.etl.history_snapshot import HistoryMerge
from dataloader.store.etl.merge import Merge, Mode, Scope
from dataloader.store.etl.staging import StagedSegment
from dataloader.store.etl.target_table import TableInfo


@attrs.frozen(kw_only=True, eq=False)
class OpenTable:
    """Table of a running load, with the source of its rows. `detail` is None for the list."""

    info: TableInfo
    staging: str
    declared: Table
    source: Source
    recipe: Recipe
    scope_column: str | None
    detail: Detail | None = None

    @property
    def name(self) -> str:
        """Return the table's name."""
        return self.declared.name


@attrs.define(eq=False, kw_only=True)
class Segment:
    """Time span or file that is loaded as a whole or not at all. `is_whole` until a request of it fails for good.

    `is_refused` is true if its table refused rows of it. `state` is the load's state after this segment, or None if it
    stays. `planned` is the number of segments of the run, if known in advance. `retries` are the failures that it
    retries: in this case it consists of single requests, and `details` are those for details. `has_same_data`: a
    segment of this name in another run has the same data, and resolves its failures. `is_last_of_all`: with this
    segment the run has loaded all data of the source, which resolves all failures. `done` are the details that are
    already complete. `counts` are its recorded counts. `is_dated` is false for a file without its own window in a load
    with windows.
    """

    name: str
    window: Window
    tables: list[OpenTable]
    requests: Callable[[], AsyncGenerator[Request, None]]
    details: Sequence[Request] = ()
    retries: Sequence[int] = ()
    has_same_data: bool = True
    is_last_of_all: bool = False
    state: Mapping[str, Any] | None = None
    planned: int | None = None
    number: int = 0
    is_whole: bool = True
    is_refused: bool = False
    is_dated: bool = True
    done: Collection[str] = frozenset()
    counts: Counter[str] = attrs.field(factory=Counter)

    @property
    def is_retry(self) -> bool:
        """Return whether the segment consists of single requests that failed before."""
        return bool(self.retries)

    @property
    def span(self) -> tuple[dt.datetime, dt.datetime] | None:
        """Return the two ends of the window; None if the segment is a file or the window is open."""
        window = self.window
        if self.name != str(window) or window.start is None or window.end is None:
            return None
        return window.start, window.end


@attrs.define(eq=False, kw_only=True)
class Part:
    """Rows of a segment for one table that have arrived until now.

    Attributes:
        sent: requests that are not in `counts` yet.
        answers: number of responses that have arrived, which numbers each of them.
        open: responses that are not completely processed.
        is_asked: true if no further requests will be sent.
        is_closed: true if all rows are sent to the writer.
        is_ready: true if the writer has all rows.
        lacks_records: true if some records could not be converted to rows.
        ids: IDs whose details will be requested, each with the segment of its request.
        completed: complete details among them.
        counts: counts that are not recorded yet.
        kept_at: time of the last merge of details.
    """

    segment: Segment
    table: OpenTable
    ends_segment: bool
    sent: int = 0
    answers: int = 0
    open: int = 0
    is_asked: bool = False
    is_closed: bool = False
    is_ready: bool = False
    is_whole: bool = True
    lacks_records: bool = False
    staged: int = 0
    shapes: frozenset[tuple[str, ...]] = frozenset()
    ids: list[tuple[str | int, str]] = attrs.field(factory=list)
    completed: CompletedDetails = attrs.field(factory=CompletedDetails)
    counts: Counter[str] = attrs.field(factory=Counter)
    keeps_details: bool = attrs.field(init=False)
    kept_at: float = attrs.field(factory=trio.current_time)
    committed: trio.Event = attrs.field(factory=trio.Event)

    @keeps_details.default
    def _can_be_merged_in_pieces(self) -> bool:
        """Return whether details are merged as they arrive. Marks of deleted rows, and versions, need all details."""
        declared = self.table.declared
        is_plain = declared.history is None and declared.delete_missing is None
        return self.table.detail is not None and bool(declared.key) and is_plain and not self.segment.is_retry

    def kept(self, request: Request) -> dict[str, Any]:
        """Return a request as stored with a failure: the fields to send it again, and the segment that retried it."""
        fields = attrs.asdict(request, filter=lambda field, _: field.name != "segment")
        tried = {"tried_by": self.segment.name} if self.segment.is_retry else {}
        return {"of": "list" if self.table.detail is None else "detail", **tried, **fields}

    def count_sent(self) -> None:
        """Add the requests that were sent until now to the counts."""
        self.counts["requests"] += self.sent
        self.sent = 0

    def staged_as(self, token: int) -> StagedSegment:
        """Return the identity of the part's rows in the staging table."""
        return StagedSegment(self.table.staging, token, self.segment.number)

    def merges(self, token: int, *, is_complete: bool) -> list[Merge | HistoryMerge]:
        """Return the merges of the rows, if any. `is_complete`: rows that the part lacks are gone from the source.

        A source without any record is considered broken: no row is marked as deleted or closed.
        """
        is_complete &= not self.segment.is_retry
        declared, info, window = self.table.declared, self.table.info, self.segment.window
        brought = {name for shape in self.shapes for name in shape}
        columns = [name for name in self.table.recipe.encoder.columns if name in brought]
        if not self.staged and (not is_complete or declared.delete_missing is None or window.start is None):
            return []
        if declared.history is not None:
            return [self._history_merge(declared.history, columns, token, is_complete=is_complete)]
        scope = None
        if declared.delete_missing is not None and is_complete:
            scope = self._scope()
        return [
            Merge(
                table=info,
                segment=self.staged_as(token),
                rows=self.staged,
                columns=columns if self.staged else declared.key,
                shapes=self.shapes,
                key=declared.key,
                mode=Mode(declared.mode),
                deleted=declared.delete_missing,
                scope=scope,
            )
        ]

    def keeps_missing(self, *, is_complete: bool) -> bool:
        """Return whether all rows of the table would be closed or marked as deleted if an empty source were valid."""
        if self.staged or not is_complete or self.segment.is_retry:
            return False
        declared = self.table.declared
        if declared.history is not None:
            return declared.history.complete
        return declared.delete_missing is not None and self.segment.window.start is None

    def _scope(self) -> Scope | None:
        """Return the rows of the target that are deleted if a complete segment lacks them."""
        window, column = self.segment.window, self.table.scope_column
        if window.start is None:
            return Scope()
        is_of_days = column is not None and self.table.info.column(column).type == "date"
        if is_of_days and any(
            moment is not None and not is_begin_of_day(moment) for moment in (window.start, window.end)
        ):
            return None  # if only a part of a day is loaded, missing rows of that day are not deleted
        return Scope(column, window.start, window.end)

    def _history_merge(
        self, history: History, columns: Sequence[str], token: int, *, is_complete: bool
    ) -> HistoryMerge:
        info = self.table.info
        return HistoryMerge(
            table=info,
            history=history,
            segment=self.staged_as(token),
            rows=self.staged,
            key=self.table.declared.key,
            columns=[name for name in columns if name not in history.columns],
            shapes=self.shapes,
            as_of=None if history.is_of_changes else history.instant(self.segment, info),
            is_complete=is_complete,
            is_marked=history.is_of_changes and history.is_current in columns,
        )
