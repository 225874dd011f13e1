"""Makes tasks of loads. A job of a load is a run of one task."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from dataloader.flows.etl.declare.load import Load, Table
from dataloader.flows.etl.declare.pipeline_config import PipelineSettings
from dataloader.flows.etl.declare.pipeline_limits import LIMITS, PipelineLimits
from dataloader.flows.etl.declare.rows import Rows
from dataloader.flows.etl.plan.planner import LoadArgs, read_args, refuse_span
from dataloader.flows.etl.run.cancellation_token import CancellationToken
from dataloader.flows.etl.run.etl_run import EtlRun, wait_for
from dataloader.flows.etl.run.etl_task import add_etl_task, declared_by
from dataloader.flows.etl.run.load_run import run_one
from dataloader.jobs.errors import BadRequest, TargetError
from dataloader.jobs.job import Job
from dataloader.jobs.limits import Supplier
from dataloader.jobs.outcomes import Canceled, GiveUp
from dataloader.jobs.task import Task
from dataloader.jobs.tasks import Tasks
from dataloader.store.etl.load_holders import LoadIsHeld

__all__ = ["LoadArgs", "add_load_of_rows", "add_loads", "load_of", "read_args", "refuse_span", "run_load"]


def add_loads(tasks: Tasks, *loads: Load) -> None:
    """Register each load as a task of its name, with its schedule. Raises `ValueError` if the name is taken."""
    for load in loads:
        text = f"Load {load.table.name}."
        add_etl_task(
            tasks,
            run_load,
            load,
            text,
            kind="load",
            read_args=read_args,
            timeout_s=load.timeout_s,
            calls_asyncio=load.calls_asyncio,
        )


def add_load_of_rows(
    tasks: Tasks, name: str, function: Callable[..., Any], table: Table, options: Mapping[str, Any]
) -> Load:
    """Register a load whose rows a function yields; return it. `options` are fields of `Load` and of `Rows`."""
    options = dict(options)
    supplier = options.get("supplier")
    if isinstance(supplier, Supplier):
        tasks.supplier(supplier)
        options["supplier"] = supplier.name
    of_rows = {field.name for field in attrs.fields(Rows) if field.name != "function"}
    rows = Rows(function, **{name: value for name, value in options.items() if name in of_rows})
    described = {"description": (inspect.getdoc(function) or "").partition("\n")[0]}
    load = Load(name, rows, table, **described | {key: value for key, value in options.items() if key not in of_rows})
    add_loads(tasks, load)
    return load


def load_of(task: Task) -> Load | None:
    """Return the load that a task runs; None for any other task."""
    return declared_by(task, Load)


def _check_retry(load: Load, asked: LoadArgs) -> None:
    history = load.table.history
    if asked.failures is not None and history is not None and not history.is_of_changes:
        raise ValueError(
            f"failures of {load.name} cannot be retried alone, because its table keeps versions; use from and to"
        )


async def run_load(
    load: Load, job: Job, cancel: CancellationToken | None = None, *, limits: PipelineLimits = LIMITS
) -> object:
    """Run a load as a job: the handler of its task. `cancel` stops it like a cancel of the job.

    Tests pass `limits`. The defaults suit all loads.
    """
    try:
        asked = read_args(job.args, limits)
        refuse_span(load, asked)
        config = job.resource(PipelineSettings).config(load.name, load.pipeline, asked.pipeline)
        _check_retry(load, asked)
    except ValueError as error:
        return GiveUp(str(error))
    run = EtlRun(job=job, name=load.name, cancel=cancel or CancellationToken(), limits=limits)
    try:
        state = await run.begin("load", [("", load.name)])
        async with run.noted():
            loaded = await run_one(run, load, config, asked, state)
    except LoadIsHeld as held:
        return wait_for(held, limits)
    except (TargetError, BadRequest) as error:
        return GiveUp(str(error))
    match loaded.end:
        case "canceled":
            return Canceled(loaded.reason)
        case "failed":
            return GiveUp(loaded.reason)
        case _:
            return run.summary()
