"""Loads a dimension or a fact table from tables of the same database: one query, one merge, one transaction.

The rows never leave the server. INSERT … SELECT puts the query's rows into a staging table, which is merged like a
load's rows. Two such loads may run concurrently, each with a separate staging table and transaction.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import attrs

from dataloader.jobs.errors import StoreError, TargetError
from dataloader.store.etl.history import History
from dataloader.store.etl.history_merge import aio_merge_any
from dataloader.store.etl.history_observed import aio_history_state
from dataloader.store.etl.history_snapshot import HistoryMerge, instant_of_snapshot
from dataloader.store.etl.load_holders import aio_fence_load
from dataloader.store.etl.merge import Merge, affected
from dataloader.store.etl.staging import (
    REQUEST,
    SEGMENT,
    SEQUENCE,
    TOKEN,
    StagedSegment,
    aio_create_staging,
    aio_drop_staging,
)
from dataloader.store.etl.target_table import TableInfo, aio_describe, listed, quote, told_of_targets


@attrs.frozen(kw_only=True)
class DimensionLoad:
    """A user's SELECT, and the table that its rows are merged into: as versions if there is a `history`.

    `name` is the name of the set of dimensions. `$1` in the query is `as_of`, a date. `run_id` and `token` are the
    job's. With `history` a query that returns no row is refused, unless `allow_empty`.
    """

    name: str
    table: str
    query: str
    key: Sequence[str]
    as_of: dt.date
    staging: str
    run_id: UUID
    token: int
    history: History | None
    allow_empty: bool


async def aio_load_dimension(connection: Any, load: DimensionLoad) -> dict[str, int]:
    """Query, merge and fence (asyncio-flavored) in the caller's transaction; return the merge's counts.

    Raises:
        TargetError: the query's columns are not the table's, or there is no such table; or the query has no `$1`, and
            the table has a newer snapshot.
        LeaseLost: the job is no longer this worker's, or another run holds the set of dimensions.
        StoreError: the database refuses the query or its rows.
    """
    info = await aio_describe(connection, load.table)
    with told_of_targets():
        statement = await connection.prepare(load.query)
        columns = [attribute.name for attribute in statement.get_attributes()]
        takes_date = bool(statement.get_parameters())
    history = load.history
    changed_at = () if history is None or history.changed_at is None else (history.changed_at,)
    for name in (*load.key, *(history.tracked if history else ()), *changed_at):
        if name not in columns:
            what = "of its key" if name in load.key else "of tracked" if name not in changed_at else "of changed_at"
            raise TargetError(f"table {info.sql}: the query does not return the column {name} {what}")
    if history is not None:
        history.check_table(info)
        if not takes_date and not changed_at:
            await _aio_check_as_of(connection, info, history, load.as_of)
    segment = StagedSegment(load.staging, load.token, 1)
    await aio_create_staging(connection, info, load.staging, columns, load.key, history)
    arguments = [load.as_of] if takes_date else []
    # The query's own $1 is the date, so the staging table's marks are written as numbers.
    with told_of_targets():
        tag = await connection.execute(
            f"INSERT INTO {quote(load.staging)} ({TOKEN}, {SEGMENT}, {REQUEST}, {SEQUENCE}, {listed(columns)})"
            f" SELECT {load.token:d}, 1, 1, row_number() OVER (), {listed(columns, 'q.')} FROM ({load.query}) AS q",
            *arguments,
        )
    if history is not None and not changed_at and not affected(tag) and not load.allow_empty:
        raise StoreError("the query returned no rows, which would close all current versions; see allow_empty")
    staged: dict[str, Any] = {
        "table": info,
        "segment": segment,
        "rows": affected(tag),
        "key": load.key,
        "columns": columns,
    }
    merge: Merge | HistoryMerge
    if history is None:
        merge = Merge(**staged)
    else:
        staged["columns"] = [name for name in columns if not changed_at or name not in history.columns]
        as_of = None if changed_at else history.fitting(load.as_of, info)
        is_marked = bool(changed_at) and history.is_current in columns
        merge = HistoryMerge(**staged, history=history, as_of=as_of, is_marked=is_marked)
    counts = await aio_merge_any(connection, merge)
    await aio_drop_staging(connection, load.staging)
    await aio_fence_load(connection, load.name, load.run_id, load.token)
    return {**counts, "rows": affected(tag)}


async def _aio_check_as_of(connection: Any, table: TableInfo, history: History, as_of: dt.date) -> None:
    """Refuse to use what a query returns now for an earlier date (asyncio-flavored)."""
    newest = (await aio_history_state(connection, table)).newest
    if newest is not None and instant_of_snapshot(history.fitting(as_of, table)) < newest:
        raise TargetError(
            f"table {table.sql}: as_of {as_of} is before the newest snapshot, {newest.isoformat()}, but the query"
            " returns current data; use $1 (the value of as_of) in the query, or omit as_of"
        )
