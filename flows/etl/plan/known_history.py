"""Snapshots that a table of versions has merged before the first request of a run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import attrs

from dataloader.flows.etl.declare.load import Table
from dataloader.flows.etl.sources.source import Window
from dataloader.jobs.errors import BadRequest
from dataloader.store.etl.history import History, SegmentSnapshot
from dataloader.store.etl.history_merge import aio_snapshots_behind
from dataloader.store.etl.history_observed import HistoryState, aio_history_state
from dataloader.store.etl.history_snapshot import instant_of_snapshot
from dataloader.store.etl.target_table import TableInfo, aio_describe


@attrs.frozen
class KnownSnapshot:
    """Snapshot that is not a segment yet."""

    name: str
    window: Window


@attrs.frozen(kw_only=True)
class KnownHistory:
    """Table of versions before a run. `merged` are the load's snapshots that are older than the newest one."""

    history: History
    table: TableInfo
    state: HistoryState
    merged: frozenset[tuple[str, datetime]]

    def has_merged(self, snapshot: SegmentSnapshot) -> bool:
        """Return whether the table has this snapshot and a newer one."""
        return (snapshot.name, self._instant(snapshot)) in self.merged

    def check_windows(self, windows: Sequence[Window]) -> None:
        """Refuse windows whose snapshots cannot be merged into the past because earlier releases recorded too little.

        Raises `BadRequest`.
        """
        unrecorded = self.state.unrecorded
        if self.history.complete or unrecorded is None or not windows:
            return
        first, last = (self._instant(KnownSnapshot(str(window), window)) for window in (windows[0], windows[-1]))
        if first < unrecorded and last < unrecorded:
            raise BadRequest(
                "to",
                f"must be after {unrecorded.isoformat()}, not {_end_text(windows[-1].end)}: the snapshots of table"
                f" {self.table.sql} up to then were merged by an earlier release, which did not record unchanged rows;"
                " omit `to`, so that they are loaded again",
            )

    def check_undated(self, window: Window, name: str) -> None:
        """Refuse a file without its own window as a snapshot of the past, because its content is current.

        Raises `BadRequest`.
        """
        newest = self.state.newest
        if self.history.as_of is None and newest is not None and self._instant(KnownSnapshot(name, window)) < newest:
            raise BadRequest(
                "to",
                f"must be after {newest.isoformat()}, not {_end_text(window.end)}: {name} has no window, so"
                f" its current data would become a past snapshot of table {self.table.sql}; declare window_of or as_of",
            )

    def _instant(self, snapshot: SegmentSnapshot) -> datetime:
        return instant_of_snapshot(self.history.instant(snapshot, self.table))


async def aio_known_history(connection: Any, load: str, declared: Table) -> KnownHistory | None:
    """Read the recorded snapshots of the load's table of versions (asyncio-flavored); None if it merges no snapshots.

    Raises `TargetError` if there is no such table.
    """
    history = declared.history
    if history is None or history.is_of_changes:
        return None
    table = await aio_describe(connection, declared.name)
    state = await aio_history_state(connection, table)
    return KnownHistory(
        history=history, table=table, state=state, merged=await aio_snapshots_behind(connection, table, load)
    )


def _end_text(end: datetime | None) -> str:
    return "an open end" if end is None else end.isoformat()
