"""A job's run of loads as its record has it: begun, gone on with, ended; and what of the process it needs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from dataloader.flows.etl.run.cancellation_token import CancellationToken
from dataloader.jobs.job import Job
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import StopReason
from dataloader.store.connection.bridge import Database
from dataloader.store.etl.run_journal import (
    SUCCEEDED_WITH_FAILURES,
    RunState,
    aio_begin_run,
    aio_end_run,
    aio_note_task,
)
from dataloader.store.queue.transaction import Transactions

CLEAN_UP_S: Final = 5.0
DRAIN_S: Final = 4.0
"""How long what has come in is written when the process is leaving: it has ten seconds in all."""
LOST: Final = frozenset({StopReason.LEASE_LOST, StopReason.LEASE_ENDED, StopReason.KEY_LOST})
"""After these nothing of this run may be written."""

_FROM_BAD_TO_GOOD: Final = ("failed", "canceled", SUCCEEDED_WITH_FAILURES)

Summary = Mapping[str, Any]


@attrs.define(eq=False)
class TaskEnd:
    """How a task of a run ended: nobody has said yet if `status` is None. `summary` is what it has done by now."""

    status: str | None = None
    summary: Summary = attrs.field(factory=dict)


@attrs.define(eq=False, kw_only=True)
class EtlRun:
    """The run of the job `job` under the name `name`; `cancel` stops it as a cancel of the job does.

    `ended` are its tasks that have begun, by their names; `status` is the run's, once it has ended.

    Raises `LookupError` where jobs have no database.
    """

    job: Job
    name: str
    cancel: CancellationToken = attrs.field(factory=CancellationToken)
    database: Database = attrs.field(init=False)
    transactions: Transactions = attrs.field(init=False)
    claimed: ClaimedJob = attrs.field(init=False)
    kind: str = attrs.field(init=False, default="")
    ended: dict[str, TaskEnd] = attrs.field(init=False, factory=dict)
    status: str = attrs.field(init=False, default="running")

    def __attrs_post_init__(self) -> None:
        self.database = self.job.resource(Database)
        self.transactions = self.job.resource(Transactions)
        self.claimed = self.job.resource(ClaimedJob)

    async def begin(self, kind: str, tasks: Sequence[tuple[str, str]]) -> RunState:
        """Begin the run of these tasks, (layer, name), or go on with it."""
        self.kind, claimed = kind, self.claimed
        return await self.transactions.run(aio_begin_run, claimed.job_id, claimed.token, self.name, kind, tasks)

    @asynccontextmanager
    async def noted(self) -> AsyncIterator[None]:
        """However the block ends, the run's end is noted, and what it has done is the job's result."""
        is_over = False
        try:
            yield
            is_over = True
        finally:
            statuses = [end.status for end in self.ended.values()]
            status = self.status = _worst(statuses) if is_over else self.status_of_stop()
            summary = self.summary()
            self.job.keep(summary)
            if not self.is_lost:
                with trio.move_on_after(CLEAN_UP_S, shield=True):
                    await self.transactions.run(aio_end_run, self.claimed.job_id, self.claimed.token, status, summary)

    def summary(self) -> Summary:
        """What the run has done: of a load alone its own summary."""
        if self.kind == "load":
            return next((end.summary for end in self.ended.values()), {"status": self.status})
        return {"status": self.status, "tasks": {name: end.summary for name, end in self.ended.items()}}

    @asynccontextmanager
    async def task(self, name: str) -> AsyncIterator[TaskEnd]:
        """Note that a task of the run begins, and how it has ended: also when the job is stopped, or it fails."""
        end = self.ended[name] = TaskEnd()
        await self._note(name, "running", end.summary)
        try:
            yield end
        finally:
            end.status = end.status or self.status_of_stop()
            if not self.is_lost:
                with trio.move_on_after(CLEAN_UP_S, shield=True):
                    await self._note(name, end.status, end.summary)

    def status_of_stop(self) -> str:
        """How a run that did not come to its end is left."""
        match self.job.stopped_by:
            case None | StopReason.TIMEOUT:
                return "failed"
            case StopReason.CANCEL:
                return "canceled"
            case _:
                return "interrupted"

    @property
    def is_lost(self) -> bool:
        """Nothing of it may be written any more: the job is another worker's, or soon will be."""
        return self.job.stopped_by in LOST

    def drain_s(self, most_s: float) -> float:
        """For how many seconds what has come in may be written now that the job was stopped."""
        match self.job.stopped_by:
            case StopReason.DRAIN:
                return min(most_s, DRAIN_S)
            case why if why in LOST:
                return 0.0
            case _:
                return most_s

    async def _note(self, task: str, status: str, summary: Summary) -> None:
        claimed = self.claimed
        await self.transactions.run(aio_note_task, claimed.job_id, claimed.token, task, status, summary)


def _worst(statuses: Sequence[str | None]) -> str:
    return next((status for status in _FROM_BAD_TO_GOOD if status in statuses), "succeeded")
