"""Loads a dimension or a fact table from tables of the same database: one query, one merge, one transaction (E8).

The rows never leave the server: what the query gives is put into a stage by INSERT … SELECT and merged as a load's rows
are. Two may run at once, each with a stage and a transaction of its own.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import attrs

from dataloader.jobs.errors import StoreError, TargetError
from dataloader.store.etl.history_merge import HistoryMerge, aio_merge_any
from dataloader.store.etl.merge import Merge, affected
from dataloader.store.etl.run_journal import aio_fence
from dataloader.store.etl.tables import (
    REQUEST,
    SEGMENT,
    SEQUENCE,
    TOKEN,
    Segment,
    TableInfo,
    aio_describe,
    aio_drop,
    aio_prepare,
    listed,
    quote,
    told_of_targets,
)

MergeOf = Callable[[TableInfo, Segment, int, Sequence[str]], Merge | HistoryMerge]
"""The merge for a table, what is staged of it, the number of its rows, and the query's columns."""


@attrs.frozen(kw_only=True)
class DimensionLoad:
    """What is to be merged into `table`: what the user's SELECT gives, by the merge that `merge_of` makes.

    `$1` in the query is `as_of`, a date. `run_id` and `token` are the job's. A query that gives no row is refused,
    unless `allow_empty`.
    """

    table: str
    query: str
    key: Sequence[str]
    as_of: dt.date
    stage: str
    run_id: UUID
    token: int
    merge_of: MergeOf
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
    for name in load.key:
        if name not in columns:
            raise TargetError(f"table {info.sql}: the query does not give the column {name} of its key")
    segment = Segment(load.stage, load.token, 1)
    await aio_prepare(connection, info, load.stage, columns, load.key)
    arguments = [load.as_of] if takes_date else []
    # The query's own $1 is the date, so the stage's marks come as numbers.
    with told_of_targets():
        tag = await connection.execute(
            f"INSERT INTO {quote(load.stage)} ({TOKEN}, {SEGMENT}, {REQUEST}, {SEQUENCE}, {listed(columns)})"
            f" SELECT {load.token:d}, 1, 1, row_number() OVER (), {listed(columns, 'q.')} FROM ({load.query}) AS q",
            *arguments,
        )
    if not affected(tag) and not load.allow_empty:
        raise StoreError("the query gives no row, by which every current version would be closed; see allow_empty")
    merge = load.merge_of(info, segment, affected(tag), columns)
    counts = await aio_merge_any(connection, merge)
    await aio_drop(connection, load.stage)
    await aio_fence(connection, load.run_id, load.token)
    return {**counts, "rows": affected(tag)}
