"""Several loads, in order and in layers, as one run: ODS → DWD → DWS → ….

    nightly = Flow(name="nightly", layers={"ods": [rates, countries], "dwd": [stars]})
    add_flows(tasks, nightly)

The tasks of a run run one after the other, in the order of their registration, so the run has only one request in
progress at a time. A layer begins when the one before it has succeeded, with or without recorded failures. A retry
continues with the tasks that have not succeeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date
from typing import Any

import attrs

from dataloader.flows.etl.declare.load import Load
from dataloader.flows.etl.declare.pipeline_config import PipelineConfig, PipelineSettings
from dataloader.flows.etl.declare.pipeline_limits import LIMITS, PipelineLimits
from dataloader.flows.etl.declare.task_options import QUEUE, check_task_options
from dataloader.flows.etl.flow.dimensions import Dimensions, TablesFailed, run_dimensions
from dataloader.flows.etl.plan.planner import LoadArgs, read_args
from dataloader.flows.etl.run.cancellation_token import CancellationToken
from dataloader.flows.etl.run.etl_run import EtlRun, TaskEnd, wait_for
from dataloader.flows.etl.run.etl_task import add_etl_task, declared_by, names_of
from dataloader.flows.etl.run.load_run import run_one
from dataloader.jobs.errors import BadRequest, TargetError
from dataloader.jobs.job import Job
from dataloader.jobs.model import MAX_NAME, check_name
from dataloader.jobs.outcomes import Canceled, GiveUp
from dataloader.jobs.task import Task
from dataloader.jobs.tasks import Tasks
from dataloader.store.etl.load_holders import LoadIsHeld
from dataloader.store.etl.run_journal import GONE_THROUGH, RunState


@attrs.frozen(kw_only=True)
class Flow:
    """Run of several tasks.

    Args:
        name: name of the flow, of its task, and of its schedule.
        layers: names of the layers with their loads and dimensions, in order. Each task occurs once.
        description: text that `dataloader tasks` shows.
        queue: queue of its jobs.
        schedule: fields of `Tasks.schedule`. The flow ignores the schedules of its loads.

    Raises `ValueError` with the field, its value and the allowed values.
    """

    name: str
    layers: Mapping[str, Sequence[Load | Dimensions]]
    description: str = ""
    queue: str = QUEUE
    schedule: Mapping[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        check_name("name", self.name, MAX_NAME)
        check_task_options(self.queue, self.schedule)
        names = [task.name for _, task in self.tasks]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"layers: must have at least one task, each name only once, not {', '.join(names) or 'none'}"
            )

    @property
    def tasks(self) -> list[tuple[str, Load | Dimensions]]:
        """Return all tasks with their layers, in order."""
        return [(layer, task) for layer, tasks in self.layers.items() for task in tasks]


def add_flows(tasks: Tasks, *flows: Flow) -> None:
    """Register each flow as a task of its name, with its schedule. Raises `ValueError` if the name is taken."""
    for flow in flows:
        text = f"Run {', '.join(flow.layers)}."
        calls_asyncio = any(
            isinstance(task, Load) and task.calls_asyncio for layer in flow.layers.values() for task in layer
        )
        add_etl_task(tasks, run_flow, flow, text, kind="flow", read_args=_read_args, calls_asyncio=calls_asyncio)


def add_dimensions(tasks: Tasks, *sets: Dimensions) -> None:
    """Register each set of dimensions as a task of its name. Raises `ValueError` if the name is taken."""
    for dimensions in sets:
        flow = Flow(
            name=dimensions.name,
            layers={"": [dimensions]},
            description=dimensions.description,
            queue=dimensions.queue,
            schedule=dimensions.schedule,
        )
        text = f"Merge {', '.join(d.table for d in dimensions.tables)}."
        add_etl_task(tasks, run_flow, flow, text, kind="flow", read_args=_read_args)


def loads_of(tasks: Mapping[str, Task]) -> set[str]:
    """Return the names of the loads among the tasks, including those of flows."""
    loads = set(names_of(tasks, Load))
    for task in tasks.values():
        flow = declared_by(task, Flow)
        loads |= {one.name for _, one in flow.tasks if isinstance(one, Load)} if flow else set()
    return loads


async def run_flow(
    flow: Flow, job: Job, cancel: CancellationToken | None = None, *, limits: PipelineLimits = LIMITS
) -> object:
    """Run a flow as a job: the handler of its task. Its args are those of a load, for all its loads, and `as_of`.

    Tests pass `limits`, as they do for `run_load`.
    """
    try:
        as_of, asked = _read_args(job.args, limits)
        settings = job.resource(PipelineSettings)
        configs = {
            task.name: settings.config(task.name, task.pipeline, asked.pipeline)
            for _, task in flow.tasks
            if isinstance(task, Load)
        }
    except ValueError as error:
        return GiveUp(str(error))
    run = EtlRun(job=job, name=flow.name, cancel=cancel or CancellationToken(), limits=limits)
    state = await run.begin("flow", [(layer, task.name) for layer, task in flow.tasks])
    day = as_of or state.started_at.astimezone(UTC).date()
    try:
        async with run.noted():
            reasons = await _Layers(run, configs, asked, state, day).run(flow)
    except LoadIsHeld as held:
        return wait_for(held, limits)
    if run.cancel.is_cancelled:
        return Canceled("the run's cancellation token was cancelled")
    return GiveUp("; ".join(reasons)) if reasons else run.summary()


@attrs.frozen(eq=False)
class _Layers:
    """Running flow. `configs` are those of its loads. Dimensions are merged as of the date `day`."""

    job_run: EtlRun
    configs: Mapping[str, PipelineConfig]
    asked: LoadArgs
    state: RunState
    day: date

    async def run(self, flow: Flow) -> list[str]:
        """Run the layers up to the first one with a failed task. Return the reason of each failed task."""
        reasons: list[str] = []
        for tasks in flow.layers.values():
            for task in tasks:
                if self.job_run.cancel.is_cancelled:
                    return reasons
                reasons += await self._task(task)
            if reasons:
                break
        return reasons

    async def _task(self, task: Load | Dimensions) -> list[str]:
        """Run a task unless an earlier attempt has completed it. Return the reason if it failed."""
        run, name = self.job_run, task.name
        status = self.state.statuses[name]
        if status in GONE_THROUGH:
            run.ended[name] = TaskEnd(status, self.state.summaries[name])
            return []
        try:
            if isinstance(task, Load):
                loaded = await run_one(run, task, self.configs[name], self.asked, self.state)
                return [f"{name}: {loaded.reason}"] if loaded.end == "failed" else []
            await run_dimensions(run, task, self.day, self.state.summaries[name] or {})
        except (TargetError, BadRequest, TablesFailed) as error:
            return [f"{name}: {error}"]
        return []


def _read_args(args: Mapping[str, Any], limits: PipelineLimits = LIMITS) -> tuple[date | None, LoadArgs]:
    rest = dict(args)
    text = rest.pop("as_of", None)
    try:
        as_of = None if text is None else date.fromisoformat(text)
    except (TypeError, ValueError):
        raise BadRequest("args.as_of", f"must be a date, such as 2026-01-31, not {text!r:.200}") from None
    return as_of, read_args(rest, limits)
