"""Several loads in order and in layers as one run: ODS → DWD → DWS → … (E12).

    nightly = Flow(name="nightly", layers={"ods": [rates, countries], "dwd": [stars]})
    add_flows(tasks, nightly)

The tasks of a run are run one after the other, in the order of their registration, so only one request of the run is in
flight at a time. A layer begins when the one before it has succeeded, with failures or without. A retry goes on with
the tasks that have not succeeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date
from typing import Any

import attrs

from dataloader.flows.etl.declare.load import Load
from dataloader.flows.etl.declare.pipeline_config import PipelineConfig, PipelineSettings
from dataloader.flows.etl.flow.dimensions import Dimensions, TablesFailed, run_dimensions
from dataloader.flows.etl.plan.planner import LoadArgs, read_args
from dataloader.flows.etl.run.cancellation_token import CancellationToken
from dataloader.flows.etl.run.etl_run import EtlRun, TaskEnd
from dataloader.flows.etl.run.etl_task import add_etl_task, declared_by, names_of
from dataloader.flows.etl.run.load_run import run_one
from dataloader.jobs.errors import BadRequest, TargetError
from dataloader.jobs.job import Job
from dataloader.jobs.model import MAX_NAME
from dataloader.jobs.outcomes import Canceled, GiveUp
from dataloader.jobs.tasks import Task, Tasks
from dataloader.store.etl.run_journal import GONE_THROUGH, RunState


@attrs.frozen(kw_only=True)
class Flow:
    """A run of several tasks: `layers` are their names with their loads and dimensions, in order.

    Raises `ValueError`, which names the field, its value and what is allowed.
    """

    name: str
    layers: Mapping[str, Sequence[Load | Dimensions]]
    description: str = ""

    def __attrs_post_init__(self) -> None:
        if not self.name or len(self.name) > MAX_NAME:
            raise ValueError(f"name: must be 1 to {MAX_NAME} characters, not {self.name!r:.80}")
        names = [task.name for _, task in self.tasks]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"layers: must be one or more tasks, each name once, not {', '.join(names) or 'none'}")

    @property
    def tasks(self) -> list[tuple[str, Load | Dimensions]]:
        """All tasks with their layers, in order."""
        return [(layer, task) for layer, tasks in self.layers.items() for task in tasks]


def add_flows(tasks: Tasks, *flows: Flow) -> None:
    """Register each flow as a task of its name. Raises `ValueError` for a name that is taken."""
    for flow in flows:
        add_etl_task(tasks, run_flow, flow, f"Run {', '.join(flow.layers)}.")


def add_dimensions(tasks: Tasks, *sets: Dimensions) -> None:
    """Register each set of dimensions as a task of its name. Raises `ValueError` for a name that is taken."""
    for dimensions in sets:
        flow = Flow(name=dimensions.name, layers={"": [dimensions]}, description=dimensions.description)
        add_etl_task(tasks, run_flow, flow, f"Merge {', '.join(d.table for d in dimensions.tables)}.")


def loads_of(tasks: Mapping[str, Task]) -> set[str]:
    """The names of the loads among the tasks, those of flows too."""
    loads = set(names_of(tasks, Load))
    for task in tasks.values():
        flow = declared_by(task, Flow)
        loads |= {one.name for _, one in flow.tasks if isinstance(one, Load)} if flow else set()
    return loads


async def run_flow(flow: Flow, job: Job, cancel: CancellationToken | None = None) -> object:
    """Run a flow as a job: the handler of its task. Its args are those of a load, for all its loads, and `as_of`."""
    try:
        as_of, asked = _read_args(job.args)
        settings = job.resource(PipelineSettings)
        configs = {
            task.name: settings.config(task.name, task.pipeline, asked.pipeline)
            for _, task in flow.tasks
            if isinstance(task, Load)
        }
    except ValueError as error:
        return GiveUp(str(error))
    run = EtlRun(job=job, name=flow.name, cancel=cancel or CancellationToken())
    state = await run.begin("flow", [(layer, task.name) for layer, task in flow.tasks])
    day = as_of or state.started_at.astimezone(UTC).date()
    async with run.noted():
        reasons = await _Layers(run, configs, asked, state, day).run(flow)
    if run.cancel.is_cancelled:
        return Canceled("the run's cancellation token was cancelled")
    return GiveUp("; ".join(reasons)) if reasons else run.summary()


@attrs.frozen(eq=False)
class _Layers:
    """A running flow. `configs` are those of its loads; dimensions are merged as of the date `day`."""

    job_run: EtlRun
    configs: Mapping[str, PipelineConfig]
    asked: LoadArgs
    state: RunState
    day: date

    async def run(self, flow: Flow) -> list[str]:
        """Run the layers, up to the first in which a task fails; return the reason of each task that failed."""
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
        """Run a task unless an earlier attempt has; return the reason if it failed."""
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


def _read_args(args: Mapping[str, Any]) -> tuple[date | None, LoadArgs]:
    rest = dict(args)
    text = rest.pop("as_of", None)
    try:
        as_of = None if text is None else date.fromisoformat(text)
    except (TypeError, ValueError):
        raise ValueError(f"args.as_of: must be a day, such as 2026-01-31, not {text!r}") from None
    return as_of, read_args(rest)
