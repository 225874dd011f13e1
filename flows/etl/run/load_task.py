"""Makes tasks of loads: a job of a load is a run of one task (E6)."""

from __future__ import annotations

from dataloader.flows.etl.declare.load import Load
from dataloader.flows.etl.declare.pipeline_config import PipelineSettings
from dataloader.flows.etl.plan.planner import LoadArgs, read_args
from dataloader.flows.etl.run.cancellation_token import CancellationToken
from dataloader.flows.etl.run.etl_run import EtlRun
from dataloader.flows.etl.run.etl_task import add_etl_task, declared_by
from dataloader.flows.etl.run.load_run import run_one
from dataloader.jobs.errors import BadRequest, TargetError
from dataloader.jobs.job import Job
from dataloader.jobs.outcomes import Canceled, GiveUp
from dataloader.jobs.tasks import Task, Tasks

__all__ = ["LoadArgs", "add_loads", "load_of", "read_args", "run_load"]


def add_loads(tasks: Tasks, *loads: Load) -> None:
    """Register each load as a task of its name. Raises `ValueError` for a name that is taken."""
    for load in loads:
        add_etl_task(tasks, run_load, load, f"Load {load.target.table}.", timeout_s=load.timeout_s)


def load_of(task: Task) -> Load | None:
    """The load that a task runs, None for any other task."""
    return declared_by(task, Load)


async def run_load(load: Load, job: Job, cancel: CancellationToken | None = None) -> object:
    """Run a load as a job: the handler of its task. `cancel` stops it as a cancel of the job does."""
    try:
        asked = read_args(job.args)
        config = job.resource(PipelineSettings).config(load.name, load.pipeline, asked.pipeline)
    except ValueError as error:
        return GiveUp(str(error))
    if asked.failures is not None and load.target.history is not None:
        return GiveUp(f"failures of {load.name} can't be retried alone: its table keeps versions; use from and to")
    run = EtlRun(job=job, name=load.name, cancel=cancel or CancellationToken())
    state = await run.begin("load", [("", load.name)])
    try:
        async with run.noted():
            loaded = await run_one(run, load, config, asked, state)
    except (TargetError, BadRequest) as error:
        return GiveUp(str(error))
    match loaded.end:
        case "canceled":
            return Canceled(loaded.reason)
        case "failed":
            return GiveUp(loaded.reason)
        case _:
            return run.summary()
