"""Declaration of a load: the source of its records and the table that they are written to.

    rates = Load(
        "ecb.rates",
        Http("https://api.example.org", "/rates", params=days, pages=PageNumber(size=500), format=Json("items")),
        Table("ecb_rate", key=("day", "currency")),
        windows=Windows(start=date(1999, 1, 4), column="day"),
        transform=to_row,
    )
    add_loads(tasks, rates)

This module runs nothing. run/load_task.py makes a task of a load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

import attrs

from dataloader.flows.etl.declare.for_processes import why_not
from dataloader.flows.etl.declare.pipeline_config import LONGEST_S, Given, PipelineConfig, check_names
from dataloader.flows.etl.declare.rows import Rows
from dataloader.flows.etl.declare.task_options import QUEUE, check_task_options
from dataloader.flows.etl.declare.windows import Windows
from dataloader.flows.etl.parse.database_reader import Reader
from dataloader.flows.etl.sources.source import Record, Request, Source
from dataloader.jobs.dask_address import ALLOWED, refusal_of
from dataloader.jobs.former_names import former_arguments
from dataloader.jobs.limits import RateLimit
from dataloader.jobs.model import MAX_NAME, check_name
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.etl.history import History
from dataloader.store.etl.target_table import as_columns

Row = Mapping[str, Any]
"""Row by column names. Other names are written to the column `payload`, if the table has one."""

Made = Row | Sequence[Row] | None
"""Result of a transform for a record."""

_NOTHING: Final[Given] = MappingProxyType({})


@former_arguments(table="name")
@attrs.frozen
class Table:
    """Table that rows are merged into. Its columns are read from the database.

    Args:
        name: name of the table, with its schema if needed.
        key: column, or columns, of a unique index. Without a key, rows are only added.
        mode: `upsert` inserts and updates by the key, and does not write unchanged rows; `insert` only adds.
        delete_missing: column (a timestamp or a boolean) that marks rows that the source no longer has, within the
            window or, without windows, in the whole table. Not with `history`.
        hash_without: field, or fields, that do not count in `content_hash`. If the table has this column, a row is
            unchanged if the hash of its other values is equal; otherwise the columns are compared.
        history: keeps each version of a row.

    The columns `source_file`, `source_endpoint` and `fetched_at` are filled if the table has them.
    """

    name: str
    key: tuple[str, ...] = attrs.field(default=(), converter=as_columns, kw_only=True)
    mode: Literal["upsert", "insert"] = attrs.field(default="upsert", kw_only=True)
    delete_missing: str | None = attrs.field(default=None, kw_only=True)
    hash_without: tuple[str, ...] = attrs.field(default=(), converter=as_columns, kw_only=True)
    history: History | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.mode not in {"upsert", "insert"}:
            raise ValueError(f"mode: must be upsert or insert, not {self.mode!r}")
        for name, needed in (
            ("mode", self.mode == "upsert"),
            ("delete_missing", self.delete_missing),
            ("history", self.history),
        ):
            if needed and not self.key:
                raise ValueError(f"key: is required by {name} of table {self.name}")
        if self.history is not None and self.delete_missing is not None:
            raise ValueError(
                "delete_missing: cannot be combined with history, which closes the last version of a missing key"
            )


@former_arguments(target="table")
@attrs.frozen(kw_only=True)
class Detail:
    """Request for each record of a list, sent after the list is written.

    Args:
        id: function that takes a record of the list and returns the ID of its detail, or None if it has none.
        request: function that takes the ID and returns the request.
        source: sends the request and reads the response; it differs from the list's source if the format differs.
        table: table of the details.
        transform: function that takes the ID, as text, and a record of the response. It returns a row, a list of rows,
            or None to leave the record out.
        reads: `transform` also takes a `Reader`, for lookups in the database.
    """

    id: Callable[[Record], str | int | None]
    request: Callable[[str | int], Request]
    source: Source
    table: Table
    transform: Callable[[str, Record], Made] | Callable[[str, Record, Reader], Made]
    reads: bool = False

    def of(self, detail: str | int) -> Request:
        """Return the request for the detail with this ID, which becomes the request's key."""
        return attrs.evolve(self.request(detail), key=str(detail))


@former_arguments(budgets="rate_limits", target="table")
@attrs.frozen
class Load:
    """Load of one table. Its job is a run.

    Args:
        name: name of the load, of its task, and of its schedule.
        source: source of the records, or `Rows` that a function yields.
        table: table of the rows.
        transform: function that takes a raw record and returns a row, a list of rows, or None to leave the record out.
        windows: time spans that are loaded; None loads everything in each run.
        detail: request for each record of a list.
        rate_limits: rate limits of the requests to the source, in addition to the pause.
        pipeline: settings of `PipelineConfig` for this load, by name.
        processes: runs `transform` and reads the responses in processes of the load, for functions of a module that use
            much CPU time.
        dask: address of the scheduler of a Dask cluster beside whose workers these processes run; True uses DL_DASK.
        reads: `transform` also takes a `Reader`, for lookups in the database. Not with `processes` or `dask`.
        timeout_s: seconds after which a run is stopped; None never.
        description: text that `dataloader tasks` shows.
        queue: queue of its jobs.
        schedule: fields of `Tasks.schedule`, such as `{"cron": "30 3 * * *", "zone": "Europe/Berlin"}`.

    Raises `ValueError` with the field, its value and the allowed values.
    """

    name: str
    source: Source
    table: Table
    transform: Callable[[Record], Made] | Callable[[Record, Reader], Made] = attrs.field(default=dict, kw_only=True)
    windows: Windows | None = attrs.field(default=None, kw_only=True)
    detail: Detail | None = attrs.field(default=None, kw_only=True)
    rate_limits: tuple[RateLimit, ...] = attrs.field(default=(), kw_only=True)
    pipeline: Given = attrs.field(default=_NOTHING, kw_only=True)
    processes: bool = attrs.field(default=False, kw_only=True)
    dask: str | Literal[True] | None = attrs.field(default=None, kw_only=True)
    reads: bool = attrs.field(default=False, kw_only=True)
    timeout_s: float | None = attrs.field(default=None, kw_only=True)
    description: str = attrs.field(default="", kw_only=True)
    queue: str = attrs.field(default=QUEUE, kw_only=True)
    schedule: Mapping[str, Any] | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_name("name", self.name, MAX_NAME)
        check_task_options(self.queue, self.schedule)
        check_names(self.pipeline, f"load {self.name}: pipeline")
        # If only one end of the pause is declared, the other one is known when the run begins.
        PipelineConfig(**{"rate_min": 0, "rate_max": LONGEST_S, **self.pipeline})
        if self.detail is not None and not self.table.key:
            raise ValueError(f"load {self.name}: table.key: is required for details")
        for table in (self.table, *(() if self.detail is None else (self.detail.table,))):
            history = table.history
            if history is not None and self.windows is None and history.as_of is None and not history.is_of_changes:
                raise ValueError(
                    f"load {self.name}: windows: is required; history of table {table.name} needs a timestamp for"
                    " each snapshot: set windows, or History(as_of=…), such as as_of=lambda snapshot: datetime.now(UTC)"
                    " for current data, or History(changed_at=…), if rows have the time of their change"
                )
        if self.table.delete_missing is not None and self.windows is not None and self.windows.column is None:
            raise ValueError(
                f"load {self.name}: windows.column: is required by delete_missing, to find the rows of a window "
                f"in {self.table.name}"
            )
        if any(rate_limit.per is not None for rate_limit in self.rate_limits):
            raise ValueError(
                f"load {self.name}: rate_limits: must have per_s; a Supplier with the source's name may have per='day'"
            )
        if isinstance(self.source, Rows):
            self._check_rows()
        self._check_place()

    def _check_rows(self) -> None:
        refused = {
            "windows": self.windows is not None,
            "detail": self.detail is not None,
            "rate_limits": bool(self.rate_limits) and self.source.name is None,
            "processes": self.processes,
            "dask": self.dask is not None,
        }
        for name, is_given in refused.items():
            if is_given:
                raise ValueError(
                    f"load {self.name}: {name}: cannot be combined with rows that a function yields"
                    f"{' without supplier=' if name == 'rate_limits' else ''}"
                )

    @property
    def calls_asyncio(self) -> bool:
        """Return whether a function of it runs on asyncio."""
        return isinstance(self.source, Rows) and self.source.asyncio

    def hide(self, text: str) -> str:
        """Return a text without the secrets of the load's sources, for storage and display."""
        text = self.source.hide(text)
        return text if self.detail is None else self.detail.source.hide(text)

    def _check_place(self) -> None:
        if self.dask is None and not self.processes:
            return
        if self.dask is not None and self.processes:
            raise ValueError(f"load {self.name}: processes, dask: cannot be combined; use one of them")
        if self.dask is not None and self.dask is not True:
            refusal = refusal_of(self.dask) if isinstance(self.dask, str) else f"{ALLOWED}, or True for DL_DASK"
            if refusal is not None:
                raise ValueError(f"load {self.name}: dask: must be {refusal}, not {self.dask!r:.200}")
        if self.reads or (self.detail is not None and self.detail.reads):
            raise ValueError(f"load {self.name}: reads: cannot be combined with processes, which have no connection")
        self._check_for_processes()

    def _check_for_processes(self) -> None:
        needed: dict[str, object] = {"source": self.source.for_reading(), "transform": self.transform}
        if self.detail is not None:
            needed |= {
                "detail.source": self.detail.source.for_reading(),
                "detail.transform": self.detail.transform,
                "detail.id": self.detail.id,
            }
        for name, value in needed.items():
            if (why := why_not(value)) is not None:
                raise ValueError(
                    f"load {self.name}: {name}: must be usable in another process, like functions of a module,"
                    f" not {mask_text(repr(value))[:200]} ({why})"
                )
