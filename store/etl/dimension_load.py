"""Loads a dimension or a fact table from tables of the same database: one query, one merge, one transaction (E8).

The rows never leave the server: what the query gives is put into a staging table by INSERT … SELECT and merged as a
load's rows are. Two may run at once, each with a staging table and a transaction of its own.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import attrs

from dataloader.jobs.errors import StoreError, TargetError
from dataloader.store.etl.history import History
from dataloader.store.etl.history_merge import HistoryMerge, aio_merge_any
from dataloader.store.etl.merge import Merge, affected
from dataloader.store.etl.run_journal import aio_fence
from dataloader.store.etl.staging import (
    REQUEST,
    SEGMENT,
    SEQUENCE,
    TOKEN,
    StagedSegment,
    aio_create_staging,
    aio_drop_staging,
)
from dataloader.store.etl.target_table import aio_describe, listed, quote, told_of_targets


@attrs.frozen(kw_only=True)
class DimensionLoad:
    """A user's SELECT, and the table that its rows are merged into: as versions where there is a `history`.

    `$1` in the query is `as_of`, a date. `run_id` and `token` are the job's. With `history` a query that gives no row
    is refused, unless `allow_empty`.
    """

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
    """Query, merge and fence (asyncio-flavoured), inside the caller's transaction; the merge's counts come back.

    Raises:
        TargetError: the query's columns are not the table's, or there is no such table.
        LeaseLost: the job is not this worker's any more.
        StoreError: the database refuses the query or its rows.
    """
    info = await aio_describe(connection, load.table)
    with told_of_targets():
        statement = await connection.prepare(load.query)
        columns = [attribute.name for attribute in statement.get_attributes()]
        takes_date = bool(statement.get_parameters())
    for name in (*load.key, *(load.history.tracked if load.history else ())):
        if name not in columns:
            what = "of its key" if name in load.key else "that is tracked"
            raise TargetError(f"table {info.sql}: the query does not give the column {name} {what}")
    segment = StagedSegment(load.staging, load.token, 1)
    await aio_create_staging(connection, info, load.staging, columns, load.key)
    arguments = [load.as_of] if takes_date else []
    # The query's own $1 is the date, so the staging table's marks come as numbers.
    with told_of_targets():
        tag = await connection.execute(
            f"INSERT INTO {quote(load.staging)} ({TOKEN}, {SEGMENT}, {REQUEST}, {SEQUENCE}, {listed(columns)})"
            f" SELECT {load.token:d}, 1, 1, row_number() OVER (), {listed(columns, 'q.')} FROM ({load.query}) AS q",
            *arguments,
        )
    if load.history is not None and not affected(tag) and not load.allow_empty:
        raise StoreError("the query gives no row, by which every current version would be closed; see allow_empty")
    staged: dict[str, Any] = {
        "table": info,
        "segment": segment,
        "rows": affected(tag),
        "key": load.key,
        "columns": columns,
    }
    merge: Merge | HistoryMerge
    if load.history is None:
        merge = Merge(**staged)
    else:
        merge = HistoryMerge(**staged, history=load.history, as_of=load.history.fitting(load.as_of, info))
    counts = await aio_merge_any(connection, merge)
    await aio_drop_staging(connection, load.staging)
    await aio_fence(connection, load.run_id, load.token)
    return {**counts, "rows": affected(tag)}
