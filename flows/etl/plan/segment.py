"""What a run is going to do: its segments, the tables they go to, and how each record becomes a row.

A segment is what is committed together: a window, or a file. It has a part for each table: the list's, then the
details'.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import Any

import attrs
import trio

from dataloader.flows.etl.declare.load import Detail, Target
from dataloader.flows.etl.parse.transform import Recipe
from dataloader.flows.etl.plan.completed_details import CompletedDetails
from dataloader.flows.etl.sources.source import Request, Source, Window
from dataloader.jobs.logger import get_logger
from dataloader.store.etl.history import History
from dataloader.store.etl.history_merge import HistoryMerge
from dataloader.store.etl.merge import Merge, Mode, Scope
from dataloader.store.etl.staging import StagedSegment
from dataloader.store.etl.target_table import TableInfo

log = get_logger(__name__)


@attrs.frozen(kw_only=True, eq=False)
class Table:
    """Where rows of one kind come from and go to. `detail` is None for the list."""

    info: TableInfo
    staging: str
    target: Target
    source: Source
    recipe: Recipe
    scope_column: str | None
    detail: Detail | None = None

    @property
    def name(self) -> str:
        """The target's name."""
        return self.target.table


@attrs.define(eq=False, kw_only=True)
class Segment:
    """Something that is loaded whole or not at all. `is_whole` until something of it fails for good.

    `is_refused` when its table refused rows of it. `planned` segments are in the run, if that is known before.
    `retries` are the failures that it tries again: then it is made of single requests, `details` those for details.
    `done` are details that are in already; `counts` are what was done for it so far, and is on record.
    """

    name: str
    window: Window
    tables: list[Table]
    requests: Callable[[], AsyncGenerator[Request, None]]
    details: Sequence[Request] = ()
    retries: Sequence[int] = ()
    moves_watermark: bool = False
    planned: int | None = None
    number: int = 0
    is_whole: bool = True
    is_refused: bool = False
    done: Collection[str] = frozenset()
    counts: Counter[str] = attrs.field(factory=Counter)

    @property
    def is_retry(self) -> bool:
        """It is made of single requests that had failed."""
        return bool(self.retries)

    @property
    def span(self) -> tuple[dt.datetime, dt.datetime] | None:
        """The two ends of a window; None of what is no window, such as a file, or is open."""
        window = self.window
        if self.name != str(window) or window.start is None or window.end is None:
            return None
        return window.start, window.end


@attrs.define(eq=False, kw_only=True)
class Part:
    """The rows of a segment for one table, as far as they have come.

    `lacks_records` when some could not be made rows. `sent` requests are not among the `counts` yet. `answers` have
    come, which gives each its number.
    `open` responses are under way; `is_asked` when no more requests will come, `is_closed` when all of its rows are on
    their way to the writer, `is_ready` when they are there. `ids` are what details are asked for, each with the segment
    of its request, `completed` which of them have come in; `counts` are what was done and is not on record, `kept_at`
    is when details were merged last.
    """

    segment: Segment
    table: Table
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
        """True of details that are merged as they come: what is gone, or a version, shows only in all of them."""
        target = self.table.target
        is_plain = target.history is None and target.delete_missing is None
        return self.table.detail is not None and bool(target.key) and is_plain and not self.segment.is_retry

    def kept(self, request: Request) -> dict[str, Any]:
        """A request as it is kept with a failure: all that is needed to make it again, and who has tried it again."""
        fields = attrs.asdict(request, filter=lambda field, _: field.name != "segment")
        tried = {"tried_by": self.segment.name} if self.segment.is_retry else {}
        return {"of": "list" if self.table.detail is None else "detail", **tried, **fields}

    def count_sent(self) -> None:
        """Have the requests that were sent by now among the counts."""
        self.counts["requests"] += self.sent
        self.sent = 0

    def staged_as(self, token: int) -> StagedSegment:
        """How the part's rows are known in the staging table."""
        return StagedSegment(self.table.staging, token, self.segment.number)

    def merges(self, token: int, *, is_complete: bool) -> list[Merge | HistoryMerge]:
        """What becomes of the rows, if there are any. `is_complete`: what is not among them is gone from the source.

        A source that has nothing at all is taken for a broken one: nothing is marked as gone, or closed.
        """
        is_complete &= not self.segment.is_retry
        target, info, window = self.table.target, self.table.info, self.segment.window
        brought = {name for shape in self.shapes for name in shape}
        columns = [name for name in self.table.recipe.encoder.columns if name in brought]
        if not self.staged and (not is_complete or target.delete_missing is None or window.start is None):
            if is_complete and (target.delete_missing is not None or target.history is not None):
                log.warning("the source has no record at all: no row is marked as deleted", table=target.table)
            return []
        if target.history is not None:
            return [self._history_merge(target.history, columns, token, is_complete=is_complete)]
        scope = None
        if target.delete_missing is not None and is_complete:
            scope = self._scope()
        return [
            Merge(
                table=info,
                segment=self.staged_as(token),
                rows=self.staged,
                columns=columns if self.staged else target.key,
                shapes=self.shapes,
                key=target.key,
                mode=Mode(target.mode),
                deleted=target.delete_missing,
                scope=scope,
            )
        ]

    def _scope(self) -> Scope | None:
        """The rows of the target that a complete segment speaks for."""
        window, column = self.segment.window, self.table.scope_column
        if window.start is None:
            return Scope()
        is_of_days = column is not None and self.table.info.column(column).type == "date"
        if is_of_days and any(
            moment is not None and moment.time() != dt.time() for moment in (window.start, window.end)
        ):
            return None  # of a day that is loaded in part it can't be told which rows are gone
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
            key=self.table.target.key,
            columns=columns,
            shapes=self.shapes,
            as_of=history.instant(self.segment, info),
            is_complete=is_complete,
        )
