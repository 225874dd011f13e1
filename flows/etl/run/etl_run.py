"""Job's run of loads and its record in the database: its beginning, its resumption after a retry, its end."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from dataloader.flows.etl.declare.pipeline_limits import LIMITS, PipelineLimits
from dataloader.flows.etl.run.cancellation_token import CancellationToken
from dataloader.flows.etl.run.load_log import log
from dataloader.jobs.job import Job
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import NOT_HELD, Snooze, StopReason
from dataloader.store.connection.bridge import Database
from dataloader.store.etl.load_holders import LoadIsHeld
from dataloader.store.etl.run_journal import (
    SUCCEEDED_WITH_FAILURES,
    RunState,
    aio_begin_run,
    aio_end_run,
    aio_note_task,
)
from dataloader.store.queue.transaction import Transactions

DRAIN_S: Final = 4.0
"""Seconds in which arrived responses are written when the process ends, of the process's ten seconds."""

_FROM_BAD_TO_GOOD: Final = ("failed", "canceled", SUCCEEDED_WITH_FAILURES)

Summary = Mapping[str, Any]


@attrs.define(eq=False)
class TaskEnd:
    """End of a task of a run. `status` is None until it is known. `summary` is its work until now."""

    status: str | None = None
    summary: Summary = attrs.field(factory=dict)


@attrs.define(eq=False, kw_only=True)
class EtlRun:
    """Run of the job `job` under the name `name`. `cancel` stops it like a cancel of the job.

    `limits` are fixed times. `ended` has the tasks that have begun, by name. `status` is the run's status after its
    end. `held` is set if the run waits for another run of one of its loads.

    Raises `LookupError` if the process has no database for its jobs.
    """

    job: Job
    name: str
    cancel: CancellationToken = attrs.field(factory=CancellationToken)
    limits: PipelineLimits = LIMITS
    database: Database = attrs.field(init=False)
    transactions: Transactions = attrs.field(init=False)
    claimed: ClaimedJob = attrs.field(init=False)
    kind: str = attrs.field(init=False, default="")
    ended: dict[str, TaskEnd] = attrs.field(init=False, factory=dict)
    held: LoadIsHeld | None = attrs.field(init=False, default=None)
    status: str = attrs.field(init=False, default="running")

    def __attrs_post_init__(self) -> None:
        self.database = self.job.resource(Database)
        self.transactions = self.job.resource(Transactions)
        self.claimed = self.job.resource(ClaimedJob)

    async def begin(self, kind: str, tasks: Sequence[tuple[str, str]]) -> RunState:
        """Begin the run of these tasks, (layer, name), or resume it.

        Raises `LoadIsHeld` for the kind `load` if another run holds the load. In this case nothing is recorded.
        """
        self.kind, claimed = kind, self.claimed
        return await self.transactions.run(aio_begin_run, claimed.job_id, claimed.token, self.name, kind, tasks)

    @asynccontextmanager
    async def noted(self) -> AsyncIterator[None]:
        """Record the end of the run after the block in any case, and keep its summary as the job's result."""
        is_over = False
        try:
            yield
            is_over = True
        except LoadIsHeld as held:
            self.held = held
            raise
        finally:
            statuses = [end.status for end in self.ended.values()]
            status = self.status = _worst(statuses) if is_over else self.status_of_stop()
            summary = self.summary()
            self.job.keep(summary)
            if not self.is_lost:
                with trio.move_on_after(self.limits.clean_up_s, shield=True):
                    await self.transactions.run(aio_end_run, self.claimed.job_id, self.claimed.token, status, summary)

    def summary(self) -> Summary:
        """Return the summary of the run. The summary of a single load is that of the load."""
        if self.kind == "load":
            return next((end.summary for end in self.ended.values()), {"status": self.status})
        reason = {} if self.held is None else {"reason": str(self.held)}
        return {"status": self.status, **reason, "tasks": {name: end.summary for name, end in self.ended.items()}}

    @asynccontextmanager
    async def task(self, name: str) -> AsyncIterator[TaskEnd]:
        """Record the beginning and the end of a task of the run, also if the job is stopped or the task fails.

        The run holds the load for the duration of the block. Raises `LoadIsHeld` if another run holds it.
        """
        end = TaskEnd()
        await self._note(name, "running", end.summary)
        self.ended[name] = end
        try:
            yield end
        finally:
            end.status = end.status or self.status_of_stop()
            if not self.is_lost:
                with trio.move_on_after(self.limits.clean_up_s, shield=True):
                    await self._note(name, end.status, end.summary)

    def status_of_stop(self) -> str:
        """Return the status of a run that was stopped or that waits for another one."""
        if self.held is not None:
            return "waiting"
        match self.job.stopped_by:
            case None | StopReason.TIMEOUT:
                return "failed"
            case StopReason.CANCEL:
                return "canceled"
            case _:
                return "interrupted"

    @property
    def is_lost(self) -> bool:
        """Return whether nothing of the run may be written: another worker has the job or will soon have it."""
        return self.job.stopped_by in NOT_HELD

    def drain_s(self, most_s: float) -> float:
        """Return the seconds in which arrived responses may be written after the job was stopped."""
        match self.job.stopped_by:
            case StopReason.DRAIN:
                return min(most_s, DRAIN_S)
            case why if why in NOT_HELD:
                return 0.0
            case _:
                return most_s

    async def _note(self, task: str, status: str, summary: Summary) -> None:
        claimed = self.claimed
        await self.transactions.run(aio_note_task, claimed.job_id, claimed.token, task, status, summary)


def wait_for(held: LoadIsHeld, limits: PipelineLimits) -> Snooze:
    """Return the job to the queue for a tenth of the time that the other run has taken until now."""
    shortest_s, longest_s = limits.wait_s
    pause_s = min(max(held.held_s / 10, shortest_s), longest_s) * random.uniform(0.9, 1.1)  # noqa: S311 - not a secret
    log.info("a run waits for another run of its load", load=held.load, other=str(held.run_id), again_in_s=pause_s)
    return Snooze(pause_s, str(held))


def _worst(statuses: Sequence[str | None]) -> str:
    return next((status for status in _FROM_BAD_TO_GOOD if status in statuses), "succeeded")
