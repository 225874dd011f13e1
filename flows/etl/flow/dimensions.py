"""Dimension and fact tables made from tables of the same database, several at a time.

    stars = Dimensions(
        name="dwd",
        tables=(
            Dimension(
                table="dim_country",
                query="SELECT code, region, document->>'name' AS name FROM country JOIN profile USING (code)",
                key=("code",),
                history=History(tracked=("region", "name")),
            ),
            Dimension(table="fact_rate", query="SELECT day, currency, rate FROM ecb_rate", key=("day", "currency")),
        ),
    )

Each table is merged in a separate transaction. If one fails, the others are still merged, and the run fails. A retry
merges only the tables that failed.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

import attrs
import trio

from dataloader.flows.etl.declare.pipeline_config import PipelineSettings
from dataloader.flows.etl.declare.task_options import QUEUE, check_task_options
from dataloader.flows.etl.parse.transform import masked_beginning
from dataloader.flows.etl.run.etl_run import EtlRun
from dataloader.flows.etl.run.load_log import LoadLog
from dataloader.jobs.errors import DataloaderError, LeaseLost, StoreError, StoreUnavailable
from dataloader.jobs.model import MAX_NAME, check_name
from dataloader.store.etl.dimension_load import DimensionLoad, aio_load_dimension
from dataloader.store.etl.history import History
from dataloader.store.etl.run_journal import staging_name
from dataloader.store.etl.target_table import as_columns


class TablesFailed(DataloaderError):  # noqa: N818 - the name says what failed
    """Some tables of a set of dimensions could not be merged. The others were merged."""


@attrs.frozen(kw_only=True)
class Dimension:
    """Table, and the query that returns its rows.

    Args:
        table: name of the table, with its schema if needed.
        query: SELECT whose columns are written to the table's columns of the same names. `$1`, if present, is the as-of
            date.
        key: column, or columns, of the table's key. Rows are updated by it; rows that the query does not return stay
            unchanged.
        history: keeps each version of a row.
        allow_empty: with `history`, a query that returns no row closes every version. Without `allow_empty`, it fails.
    """

    table: str
    query: str
    key: tuple[str, ...] = attrs.field(converter=as_columns)
    history: History | None = None
    allow_empty: bool = False

    def __attrs_post_init__(self) -> None:
        if not self.key:
            raise ValueError(f"table {self.table}: key: is required: a column, or columns, such as ('day', 'currency')")


@attrs.frozen(kw_only=True)
class Dimensions:
    """Tables that are merged together.

    Args:
        name: name of the set, of its task, and of its schedule.
        tables: the tables, each once.
        parallel: number of tables that are merged concurrently, each on a connection of the transactions' pool; by
            default the setting DL_DWD__PARALLEL_WORKERS.
        description: text that `dataloader tasks` shows.
        queue: queue of its jobs.
        schedule: fields of `Tasks.schedule`.

    Raises `ValueError` with the field, its value and the allowed values.
    """

    name: str
    tables: tuple[Dimension, ...]
    parallel: int | None = None
    description: str = ""
    queue: str = QUEUE
    schedule: Mapping[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        check_name("name", self.name, MAX_NAME)
        check_task_options(self.queue, self.schedule)
        if self.parallel is not None and (type(self.parallel) is not int or not 1 <= self.parallel <= 100):
            raise ValueError(f"parallel: must be an integer from 1 to 100, not {self.parallel!r}")
        names = [dimension.table for dimension in self.tables]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"tables: must have at least one table, each only once, not {', '.join(names) or 'none'}")


async def run_dimensions(run: EtlRun, dimensions: Dimensions, as_of: dt.date, done: Mapping[str, Any]) -> None:
    """Merge the tables as of a date, except those that an earlier attempt has merged. `done` is that attempt's summary.

    Raises `TablesFailed` at the end if any table could not be merged.
    """
    tables: dict[str, dict[str, Any]] = {
        name: table for name, table in done.get("tables", {}).items() if table["status"] == "succeeded"
    }
    parallel = dimensions.parallel or run.job.resource(PipelineSettings).tables_at_once
    async with run.task(dimensions.name) as noted:
        merging = _Merging(run, dimensions, as_of, tables, trio.CapacityLimiter(parallel))
        try:
            async with trio.open_nursery() as nursery:
                for dimension in dimensions.tables:
                    if dimension.table not in tables:
                        nursery.start_soon(merging.merge, dimension)
        finally:
            failed = sorted(name for name, table in tables.items() if table["status"] == "failed")
            if len(tables) == len(dimensions.tables):
                noted.status = "failed" if failed else "succeeded"
            noted.summary = {
                "status": noted.status or run.status_of_stop(),
                "tables_succeeded": len(tables) - len(failed),
                "tables_failed": len(failed),
                "tables": tables,
            }
            run.job.end_log_of(dimensions.name)
    if failed:
        first = tables[failed[0]]["error"]
        raise TablesFailed(
            f"{len(failed)} of {len(dimensions.tables)} tables failed: {', '.join(failed)}; {failed[0]}: {first}"
        )


@attrs.frozen(eq=False)
class _Merging:
    """Running merge of a set of dimensions. `tables` has the results of the finished tables, by name."""

    run: EtlRun
    dimensions: Dimensions
    as_of: dt.date
    tables: dict[str, dict[str, Any]]
    limiter: trio.CapacityLimiter

    async def merge(self, dimension: Dimension) -> None:
        """Merge one table when a place is free. A failure is recorded and does not stop the others."""
        run, log = self.run, LoadLog.of(self.run.job, self.dimensions.name)
        load = DimensionLoad(
            name=self.dimensions.name,
            table=dimension.table,
            query=dimension.query,
            key=dimension.key,
            as_of=self.as_of,
            staging=staging_name(run.claimed.job_id, run.claimed.token, self.dimensions.tables.index(dimension)),
            run_id=run.claimed.job_id,
            token=run.claimed.token,
            history=dimension.history,
            allow_empty=dimension.allow_empty,
        )
        async with self.limiter:
            began = dt.datetime.now(dt.UTC)
            counts: Mapping[str, int] = {}
            error = None
            try:
                counts = await run.transactions.run(aio_load_dimension, load)
            except (StoreUnavailable, LeaseLost):
                raise
            except StoreError as refused:
                error = masked_beginning(str(refused))
                log.warning("a table could not be merged", phase="writing", table=dimension.table, error=error)
            else:
                log.info("merged", phase="writing", table=dimension.table, **counts)
            self.tables[dimension.table] = {
                "status": "succeeded" if error is None else "failed",
                "began_at": began.isoformat(),
                "ended_at": dt.datetime.now(dt.UTC).isoformat(),
                "counts": dict(counts),
                **({} if error is None else {"error": error}),
            }
            run.job.progress_nowait({"tables_done": len(self.tables), "tables": len(self.dimensions.tables)})
