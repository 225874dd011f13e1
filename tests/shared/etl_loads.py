"""Load for tests: a table `target`, a stage, and rows that pass through them."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterator
from typing import Any, Final

import attrs

from dataloader.flows.etl.parse.copy_lines import LineEncoder
from dataloader.store.etl.history import History
from dataloader.store.etl.history_merge import HistoryCounts, aio_merge_history
from dataloader.store.etl.history_snapshot import HistoryMerge
from dataloader.store.etl.merge import Counts, Merge, aio_merge
from dataloader.store.etl.staging import StagedLines, StagedSegment, aio_create_staging, aio_stage
from dataloader.store.etl.target_table import TableInfo, aio_describe
from dataloader.store.queue.transaction import Transactions

STAGE: Final = 'dl "stage" of target'


@attrs.define
class Load:
    """Load whose rows are tuples in the order of `columns`."""

    transactions: Transactions
    table: TableInfo
    columns: tuple[str, ...]
    key: tuple[str, ...]
    encoder: LineEncoder
    segment: StagedSegment = attrs.field(factory=lambda: StagedSegment(STAGE, 7, 1))
    _places: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))

    async def stage(
        self, rows: list[tuple[object, ...]], segment: StagedSegment | None = None, *, request: int = 1
    ) -> int:
        text = b"".join(b"%d\t%b" % (next(self._places), self.encoder.encode(row)) for row in rows)
        lines = StagedLines(self.columns, len(rows), text)
        return await self.transactions.run(aio_stage, segment or self.segment, [(request, lines)])

    async def merge(self, rows: list[tuple[object, ...]], **options: Any) -> Counts:
        return await self.merge_staged(await self.stage(rows), **options)

    async def merge_staged(self, rows: int, **options: Any) -> Counts:
        fields = {"table": self.table, "segment": self.segment, "columns": self.columns, "key": self.key} | options
        return await self.transactions.run(aio_merge, Merge(rows=rows, **fields))


async def open_load(
    transactions: Transactions, raw: Any, definition: str, columns: str = "", *, key: str = "", suffix: str = ""
) -> Load:
    """Create a table `target`, and return a load of its `columns`: all, if none are named."""
    await raw.execute(f"CREATE TABLE target ({definition}) {suffix}")
    table = await transactions.run(aio_describe, "target")
    names = tuple(columns.split()) or tuple(column.name for column in table.columns)
    await transactions.run(aio_create_staging, table, STAGE, names, key.split())
    arrays = [column.name for column in table.columns if column.is_array]
    documents = [column.name for column in table.columns if column.is_document]
    return Load(transactions, table, names, tuple(key.split()), LineEncoder(names, arrays, documents))


HISTORY_FIELDS = [field.name for field in attrs.fields(History) if field.name != "as_of"]


@attrs.define
class Dimension:
    """Table of versions, and snapshots that are merged into it."""

    load: Load
    fields: dict[str, Any]

    async def stage(self, rows: list[tuple[object, ...]], segment: StagedSegment | None = None) -> int:
        return await self.load.stage(rows, segment)

    async def merge(self, as_of: dt.date, rows: list[tuple[object, ...]], **fields: Any) -> HistoryCounts:
        return await self.merge_staged(await self.stage(rows), as_of=as_of, **fields)

    async def merge_staged(self, rows: int, **fields: Any) -> HistoryCounts:
        given = {"table": self.load.table, "segment": self.load.segment} | self.fields | fields
        declared = {name: given.pop(name) for name in HISTORY_FIELDS if name in given}
        columns = (*given["key"], *declared["tracked"], *given.pop("others", ()))
        merge = HistoryMerge(rows=rows, history=History(**declared), columns=columns, **given)
        return await self.load.transactions.run(aio_merge_history, merge)

    async def bring(self, columns: str, **fields: Any) -> None:
        """Change the columns of the load from now on."""
        run, names = self.load.transactions.run, tuple(columns.split())
        table = await run(aio_describe, "target")
        await run(aio_create_staging, table, STAGE, names, self.load.key)
        self.load = attrs.evolve(self.load, table=table, columns=names, encoder=LineEncoder(names))
        self.fields |= fields


async def open_dimension(
    transactions: Transactions, raw: Any, tracked: str = "a b", others: str = "", **fields: Any
) -> Dimension:
    """Create a dimension `target` of texts, with a number for references by facts; `tracked` columns and others."""
    columns = f"key {tracked} {others}"
    definition = (
        ", ".join(f"{name} text" for name in columns.split())
        + ", id bigserial, valid_from date NOT NULL, valid_to date, is_current boolean NOT NULL,"
        + " CHECK (valid_from < valid_to), CHECK (is_current = (valid_to IS NULL)), PRIMARY KEY (key, valid_from)"
    )
    load = await open_load(transactions, raw, definition, columns, key="key")
    await raw.execute("CREATE UNIQUE INDEX ON target (key) WHERE is_current")
    return Dimension(load, {"key": ["key"], "tracked": tracked.split(), "others": others.split()} | fields)
