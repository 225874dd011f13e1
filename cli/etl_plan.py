"""Command `etl plan`: the requests of a run, and the duration of its pauses.

It uses the source only to list windows and first requests, which for files and buckets means to list these. It uses a
database only if one is configured, for the load's watermark.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlencode

import attrs
import click

from dataloader.cli.cells import Column, cell
from dataloader.cli.etl_start import check_known, windows_options
from dataloader.cli.output import print_fields, print_json, print_table
from dataloader.cli.pipeline_options import pipeline_options
from dataloader.cli.target import (
    command_options,
    data_dir_option,
    json_option,
    open_client_of,
    provide_database,
    run_trio,
)
from dataloader.cli.task_module import load_tasks, path_option
from dataloader.jobs.errors import ConfigError, DataloaderError, SchemaError, TargetError
from dataloader.jobs.load_listings import LoadNotFound
from dataloader.supervisor.settings import Settings
from dataloader.supervisor.settings_layers import load_settings

if TYPE_CHECKING:
    from dataloader.flows.etl.declare.load import Load
    from dataloader.flows.etl.declare.pipeline_config import PipelineConfig
    from dataloader.flows.etl.plan.known_history import KnownHistory
    from dataloader.flows.etl.run.load_task import LoadArgs
    from dataloader.flows.etl.sources.source import Request, Window

MAX_SHOWN: Final = 50
"""Maximum windows in the table."""


@click.command("plan")
@click.argument("load")
@click.option(
    "--tasks",
    "where",
    metavar="MODULE:ATTR",
    required=True,
    help="Module that defines the load, such as my_module:tasks.",
)
@path_option
@windows_options
@pipeline_options
@data_dir_option
@json_option
def etl_plan_command(
    load: str,
    *,
    where: str,
    windows: Mapping[str, str],
    pipeline: Mapping[str, Any],
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """Show the requests that a run of LOAD would send, without sending them.

    Prints the windows, their first requests, and the total of the pauses. Windows begin at the load's watermark, if a
    database (DL_DB_DSN or the embedded one) has it; otherwise the plan is for a first run. Lists buckets and folders.
    """
    from dataloader.flows.etl.run.load_task import read_args, refuse_span  # noqa: PLC0415 - not for --help
    from dataloader.store.embedded.data_dir import versions_in  # noqa: PLC0415

    declared = _declared(load, where)
    settings = load_settings(overrides={"data_dir": data_dir})
    try:
        asked = read_args(windows)
        refuse_span(declared, asked)
        config = settings.pipeline.config(load, declared.pipeline, pipeline)
        is_asked = (declared.windows is not None and asked.since is None) or declared.table.history is not None
        is_there = settings.db_dsn is not None or data_dir is not None or versions_in(settings.data_dir)
        with provide_database(settings, create=False) if is_asked and is_there else nullcontext(settings) as provided:
            found = run_trio(_make_plan, declared, config, asked, provided)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if as_json:
        print_json(found.as_json())
    else:
        _print_plan(found)


def _declared(name: str, where: str) -> Load:
    from dataloader.flows.etl.run.load_task import load_of  # noqa: PLC0415 - not for --help

    tasks = load_tasks(where)
    check_known(name, "load", tasks, where)
    return cast("Load", load_of(tasks[name]))


@attrs.frozen(kw_only=True)
class LoadPlan:
    """Windows of a run with the first request of each walk, and the pauses between them in seconds.

    `left_out`: number of files that are snapshots which the table has already merged. `idle`: reason why the run would
    send no request.
    """

    load: Load
    config: PipelineConfig
    watermark: datetime | None
    is_first: bool
    windows: list[tuple[Window, list[Request]]]
    left_out: int = 0
    idle: str = ""

    @property
    def requests(self) -> int:
        """Return the minimum number of requests."""
        return sum(len(requests) for _, requests in self.windows)

    @property
    def pauses(self) -> dict[str, float]:
        """Return the minimum, mean and maximum duration of the pauses; 0 for sources without a rate limit."""
        pauses = max(self.requests - 1, 0) if self.load.source.name is not None else 0
        least, most = self.config.rate_min, self.config.rate_max
        return {"least_s": pauses * least, "mean_s": pauses * (least + most) / 2, "most_s": pauses * most}

    @property
    def more(self) -> list[str]:
        """Return other causes of duration, in words."""
        source = self.load.source
        found = ["further pages"] if source.needs_answer else []
        if self.load.detail is not None:
            found.append("the details, one request each")
        return [*found, *(f"the rate limit of {one.requests} in {one.per_s:g} s" for one in self.load.rate_limits)]

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return {
            "load": self.load.name,
            "watermark": self.watermark,
            "upto": self.watermark,
            "windows": [
                {
                    "start": window.start,
                    "end": window.end,
                    "requests": [
                        {"method": one.method, "endpoint": one.endpoint, "params": one.params, "item": one.key}
                        for one in requests
                    ],
                }
                for window, requests in self.windows
            ],
            "requests": self.requests,
            "left_out": self.left_out,
            "pauses": self.pauses,
            "more": self.more,
            "pipeline": attrs.asdict(self.config),
        }


async def _make_plan(load: Load, config: PipelineConfig, asked: LoadArgs, settings: Settings) -> LoadPlan:
    from dataloader.flows.etl.declare.rows import Rows  # noqa: PLC0415 - not for --help
    from dataloader.flows.etl.plan.planner import why_idle, windows_of  # noqa: PLC0415 - not for --help
    from dataloader.flows.etl.sources.source import SourceError  # noqa: PLC0415 - not for --help

    watermark = await _watermark(load.name, settings) if load.windows is not None and asked.since is None else None
    known = await _known(load, settings)
    windows = windows_of(load, asked, watermark=watermark, now=datetime.now(UTC))
    if isinstance(load.source, Rows):
        windows = []
    try:
        found, left_out = await _planned_requests(load, asked, windows, known)
    except SourceError as error:
        raise DataloaderError(f"{load.name}: {error}") from error
    return LoadPlan(
        load=load,
        config=config,
        watermark=watermark,
        is_first=load.windows is not None and watermark is None and asked.since is None,
        windows=found,
        left_out=left_out,
        idle=why_idle(load, asked, windows, watermark),
    )


async def _planned_requests(
    load: Load, asked: LoadArgs, windows: Sequence[Window], known: KnownHistory | None
) -> tuple[list[tuple[Window, list[Request]]], int]:
    """Return the requests by windows, and the number of files that are left out."""
    from dataloader.flows.etl.plan.known_history import KnownSnapshot  # noqa: PLC0415 - not for --help
    from dataloader.flows.etl.plan.planner import name_of_walk, single_walks  # noqa: PLC0415 - not for --help

    if not load.source.walks_are_segments:
        if known is not None and load.windows is not None:
            known.check_windows(windows)
        return [(window, [request async for request in load.source.requests(window)]) for window in windows], 0
    walks = [walk async for walk in single_walks(load, windows, known=known)]
    merged = [
        known is not None
        and (load.windows is None or asked.since is None)
        and known.has_merged(KnownSnapshot(name_of_walk(request), window))
        for window, request in walks
    ]
    wanted = [walk for walk, is_merged in zip(walks, merged, strict=True) if not is_merged]
    grouped = itertools.groupby(wanted, key=itemgetter(0))
    return [(window, [request for _, request in of]) for window, of in grouped], sum(merged)


async def _watermark(load: str, settings: Settings) -> datetime | None:
    """Return the load's watermark; None without a database, or if the load has never run in it."""
    if settings.db_dsn is None:
        return None
    async with open_client_of(settings) as client:
        try:
            return (await client.loads.get(load)).watermark
        except (LoadNotFound, SchemaError):
            return None


async def _known(load: Load, settings: Settings) -> KnownHistory | None:
    """Return the snapshots of the load's table of versions; None without a database, or if it has no such table."""
    from dataloader.flows.etl.plan.known_history import aio_known_history  # noqa: PLC0415 - not for --help
    from dataloader.store.connection.bridge import open_database  # noqa: PLC0415 - not for --help

    table = load.table
    if table.history is None or settings.db_dsn is None:
        return None
    async with open_database(command_options(settings)) as database:
        try:
            return await database.run(aio_known_history, load.name, table)
        except (TargetError, SchemaError):
            return None


def _print_plan(found: LoadPlan) -> None:
    print_table(
        (Column("FROM"), Column("TO"), Column("REQUESTS"), Column("FIRST", folds=True)),
        (
            (*_ends(window), len(requests), requests and _request_text(requests[0]))
            for window, requests in found.windows[:MAX_SHOWN]
        ),
        nothing=found.idle,
    )
    if len(found.windows) > MAX_SHOWN:
        click.echo(f"and {len(found.windows) - MAX_SHOWN:,} more windows; --json prints all", err=True)
    least, mean, most = (timedelta(seconds=round(seconds)) for seconds in found.pauses.values())
    pauses = f"mean {mean}, minimum {least}, maximum {most}"
    click.echo()
    print_fields(
        {
            **(
                {"watermark": "never loaded"}
                if found.is_first
                else {"watermark": found.watermark}
                if found.watermark
                else {}
            ),
            "windows": len(found.windows),
            "requests": found.requests,
            **(
                {"left out": f"{found.left_out:,} snapshots that the table has already merged"}
                if found.left_out
                else {}
            ),
            "pauses": pauses if found.load.source.name is not None else "none (this source has no rate limit)",
            **({"more": f"plus {' and '.join(found.more)}"} if found.more else {}),
        }
    )


def _ends(window: Window) -> tuple[object, object]:
    """Return the beginning and the end, for two columns. A window without them is everything."""
    return ("everything", None) if window.start is None and window.end is None else (window.start, window.end)


def _request_text(request: Request) -> str:
    query = f"?{urlencode(request.params, doseq=True)}" if request.params else ""
    return cell(f"{request.method} {request.endpoint}{query}" + (f" {request.key}" if request.key else ""))
