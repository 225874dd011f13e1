"""Task of a process's wake-up job: runs the steps of the process.

A run begins a step, calls the author's function, writes the outcome and continues with the next task of the process:
first a waiting call, then a timer that is due. After `MOST_STEPS` steps or `MOST_S` seconds the job returns to the
queue, so that other processes can run. The write of the outcome also ends the job: it schedules the job for the timer
or deletes it. So the queue records nothing for such a run.

An outage of the queue's database does not end a step. `Outages` distinguishes it from other errors. An interrupted step
runs again in the same run and without using a try. Before that, `begin` finds out whether a COMMIT without an answer
has succeeded: in that case the process's mark has moved. If the outage outlasts the lease, the author's function is
stopped as usual. When the database is available again, the outcome is stored or the mark is removed, unless another
worker has the job by then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID

import attrs
import msgspec
import trio

from dataloader.flows.processes.define import Processes, ProcessType
from dataloader.flows.processes.step_call import MAX_ERROR, UNSUPPORTED, StepCall, StepTransaction
from dataloader.flows.processes.stepper import Stepper
from dataloader.jobs.errors import StoreError, Unstorable
from dataloader.jobs.growing_pauses import Pauses
from dataloader.jobs.job import AsyncWorkerPort, Ending, Job, port_of
from dataloader.jobs.logger import get_logger
from dataloader.jobs.model import MAX_ATTEMPTS, ClaimedJob
from dataloader.jobs.outages import Outages
from dataloader.jobs.outcomes import NOT_HELD, StopReason
from dataloader.jobs.process_listings import ProcessAnswer
from dataloader.jobs.process_outbox import ProcessOutbox
from dataloader.jobs.process_telemetry import ProcessTelemetry
from dataloader.jobs.retry import RetryPolicy
from dataloader.jobs.task import Task
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.answers import Answers
from dataloader.store.processes.own_events import read_own_events
from dataloader.store.processes.steps import (
    BegunStep,
    Committed,
    StepOutcome,
    StepSnapshot,
    Wakeup,
    Work,
    aio_commit_within,
)
from dataloader.store.queue.transaction import Transactions, Written

log = get_logger(__name__)
B = TypeVar("B", BegunStep, Committed)
B_co = TypeVar("B_co", BegunStep, Committed, covariant=True)


class Send(Protocol[B_co]):
    """Sends the beginning or the end of a step. With `in_turn`, it waits for the lock of the process's row."""

    async def __call__(self, *, in_turn: bool) -> B_co:
        """Send the statement and return the database's answer."""


SOON: Final = RetryPolicy(base_s=1, factor=2, cap_s=30)
"""Retry policy for runs that end without the usual write, for example because the lease has ended."""
MOST_STEPS: Final = 100
MOST_S: Final = 1.0
OUTAGE_PAUSES_S: Final = (0.2, 30.0)
"""First and longest pause, in seconds, before a step runs again after an outage interrupted it."""
LOCKED_S: Final = 0.001
"""Seconds until the next try for a locked row. Callers of a process hold its row for about this time."""
LOST_S: Final = 0.2
ANSWER_S: Final = 2.0
"""Seconds in which the database must answer a check of whether it is available."""


def tasks_of(processes: Processes) -> list[Task[Any]]:
    """Return the tasks of the wake-up jobs of these types, one for each version that a type supports."""
    return [
        Task(
            name=name,
            handler=partial(drive, kind),
            is_async=True,
            queue=kind.queue,
            max_attempts=MAX_ATTEMPTS,
            retry=SOON,
            description=f"Steps of processes of the type {kind.name}.",
        )
        for kind in processes
        for name in kind.tasks
    ]


async def drive(kind: ProcessType[Any], job: Job, *, outage_pauses_s: tuple[float, float] = OUTAGE_PAUSES_S) -> object:
    """Run the steps of one process until none is due. This is the handler of the type's tasks."""
    return await _Drive(kind, job, outage_pauses_s).run()


@attrs.define(eq=False)
class _Drive:
    kind: ProcessType[Any]
    job: Job
    outage_pauses_s: tuple[float, float]
    wakeup: Wakeup = attrs.field(init=False)
    stepper: Stepper = attrs.field(init=False)
    database: Database = attrs.field(init=False)
    port: AsyncWorkerPort = attrs.field(init=False)
    answers: Answers = attrs.field(init=False)
    telemetry: ProcessTelemetry = attrs.field(init=False)
    outbox: ProcessOutbox = attrs.field(init=False)
    until: float = attrs.field(factory=lambda: trio.current_time() + MOST_S, init=False)
    ident: UUID | None = attrs.field(default=None, init=False)
    """Ident of the task whose step runs."""
    is_last: bool = attrs.field(default=False, init=False)
    """True if this run does no further step."""
    is_late: bool = attrs.field(default=False, init=False)
    """True once the handler has ended and its remaining writes are being done."""
    outages: Outages = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.port = port_of(self.job)
        claimed = self.job.resource(ClaimedJob)
        self.wakeup = Wakeup(self.job.args["key"], self.job.job_id, claimed.token, self.kind.crashes)
        self.stepper = self.job.resource(Stepper)
        self.database = self.job.resource(Database)
        self.outages = Outages(partial(self.database.serves, ANSWER_S), Pauses(*self.outage_pauses_s))
        self.answers = self.job.resource(Answers)
        self.telemetry = self.job.resource(ProcessTelemetry)
        self.outbox = self.job.resource(ProcessOutbox)

    async def run(self) -> object:
        begun = await self._begun_again()
        if begun.verdict == "void":
            log.info("the process of the wake-up job no longer exists")
            return None
        if begun.verdict != "step":
            return None
        assert begun.work is not None and begun.snapshot is not None  # noqa: S101, PT018 - a step has both
        snapshot, work = begun.snapshot, begun.work
        steps = 1
        while True:
            self.is_last = steps >= MOST_STEPS
            outcome, snapshot, stored = await self._step(snapshot, work)
            if stored is not None:
                then: BegunStep | Committed = stored
            elif outcome.outcome == "returned":
                # The step's transaction may have committed without an answer, and marked the next step.
                then = await self._begun_again()
                steps -= 1
            else:
                then = await self._ended(outcome)
            if then.verdict == "void":
                log.warning("the end of a step may not be stored: another run has the process")
            if then.work is None:
                return None
            work, snapshot = then.work, then.on(snapshot)
            steps += 1

    async def _begun_again(self) -> BegunStep:
        """Begin a step, or the step that an outage has interrupted: again, unless the database has stored its end."""
        async with self._ending(None) as end:
            begun = await self._begun()
            end.written = begun.verdict in {"rest", "zombie"}
        return begun

    async def _ended(self, outcome: StepOutcome) -> BegunStep | Committed:
        """Write the outcome of a step and begin the next one."""
        async with self._ending(outcome) as end:
            committed = await self._committed(self._going_on(outcome))
            # An earlier try may have been committed and its answer lost. It has marked the next step, which begins
            # here.
            then = await self._begun() if committed.verdict == "void" else committed
            end.written = then.verdict in {"rest", "gone", "zombie"}
        return then

    @asynccontextmanager
    async def _ending(self, outcome: StepOutcome | None) -> AsyncIterator[Ending]:
        """Enter the port's ending. If the lease ends before the database answers, write the rest after the handler."""
        async with self.port.ending() as end:
            try:
                yield end
            except (trio.Cancelled, StoreError):
                end.later = partial(self._late, outcome)
                raise

    async def _late(self, outcome: StepOutcome | None) -> None:
        """Write an outcome, or remove the mark of a step, after the handler. Void if another run has the job."""
        self.is_late = True
        if outcome is not None:
            outcome.go_on = False
            if (await self._committed(outcome)).verdict != "void":
                return
        begun = await self._begun()
        if begun.work is not None:
            await self._committed(self._returned(begun.work))

    def _returned(self, work: Work) -> StepOutcome:
        return StepOutcome(wakeup=self.wakeup, task_id=work.task_id, outcome="returned")

    async def _begun(self) -> BegunStep:
        since = trio.current_time()
        begun = await self._insist(partial(self.stepper.begin, self.database, self.wakeup))
        kind = None if begun.work is None else begun.work.kind
        self.telemetry.begun(self.kind.name, begun.verdict, kind, trio.current_time() - since)
        for task_id in begun.told:
            self.answers.told(task_id)
        return begun

    async def _committed(self, step: StepOutcome) -> Committed:
        since = trio.current_time()
        try:
            committed = await self._insist(partial(self.stepper.commit, self.database, step))
        except Unstorable as error:
            step = StepOutcome(
                wakeup=step.wakeup, task_id=step.task_id, outcome="failed", error=f"{UNSUPPORTED}: {error}"[:MAX_ERROR]
            )
            committed = await self._insist(partial(self.stepper.commit, self.database, step))
        self._tell(step, committed, trio.current_time() - since)
        return committed

    async def _insist(self, send: Send[B]) -> B:
        """Send until the row is not locked and the database answers. The token makes repetition safe.

        After two failed lock attempts, queue for the row: if a process gets many requests, its row may always be
        locked.
        """
        times_locked = 0
        while True:
            try:
                answer = await send(in_turn=times_locked > 1)
            except Unstorable:
                raise
            except StoreError as error:
                if self.port.stopped_by() is not None and not self.is_late:
                    raise  # the handler has to end; remaining writes must not delay it
                self.stepper.log_wait(str(error))
                await trio.sleep(LOST_S)
                continue
            if answer.verdict != "locked":
                return answer
            times_locked += 1
            await trio.sleep(LOCKED_S)

    def _tell(self, step: StepOutcome, committed: Committed, took_s: float) -> None:
        """Give the answers to waiting callers in this process, so that they need not read the database."""
        following = "timeout" if step.outcome == "retry" else step.following
        self.telemetry.committed(self.kind.name, committed.verdict, step.outcome, following, took_s)
        if committed.verdict != "void" and (step.messages is not None or self.outbox.has_sinks):
            self.outbox.sent()
        for task_id in committed.told:
            self.answers.told(task_id)
        if committed.verdict == "void" or step.outcome in {"retry", "returned"}:
            return
        if self.answers.is_awaited(step.task_id):
            answer = ProcessAnswer(
                task_id=step.task_id,
                status="error" if step.outcome == "failed" else "finished",
                response=None if step.response is None else msgspec.json.decode(step.response),
                error=step.error,
                ident=self.ident,
            )
            self.answers.told(step.task_id, answer)

    def _going_on(self, outcome: StepOutcome) -> StepOutcome:
        may = not self.is_last and trio.current_time() < self.until and self.port.stopped_by() is None
        outcome.go_on = may
        return outcome

    async def _step(self, snapshot: StepSnapshot, work: Work) -> tuple[StepOutcome, StepSnapshot, Committed | None]:
        """Call the author's function; return its outcome, and the result of the write if a transaction stored it."""
        if self.ident != work.ident:
            self.outages.reset()
        self.ident = work.ident
        call = StepCall(
            kind=self.kind,
            wakeup=self.wakeup,
            snapshot=snapshot,
            work=work,
            events=partial(read_own_events, self.database, self.wakeup.key, snapshot.last_event_id),
            open=self._transaction,
            outages=self.outages,
        )
        since = trio.current_time()
        try:
            outcome, after = await call.run()
            if outcome.outcome == "returned":
                self.stepper.log_wait(call.outage or "")
                await trio.sleep(self.outages.pauses.next())
            else:
                self.outages.reset()
        except BaseException:  # cancellation, alone or in a group; the author's errors are outcomes
            stored = None if call.stored is None else call.stored[2]
            await self._stopped(work, stored)  # noqa: ASYNC102 - shielded until the time at which the handler must have ended
            raise
        self.telemetry.processed(self.kind.name, work.kind, outcome.outcome, trio.current_time() - since)
        return outcome, after, None if call.stored is None else call.stored[2]

    @asynccontextmanager
    async def _transaction(self, call: StepCall) -> AsyncIterator[StepTransaction]:
        """Store the step's outcome together with the author's rows when the block ends without an error."""

        async def end(transaction: StepTransaction, written: Written) -> None:
            outcome, after = call.done(transaction.done)
            since = trio.current_time()
            async with self.port.ending() as end:
                committed: Committed = await written(partial(aio_commit_within, self._going_on(outcome)))
                end.written = committed.verdict in {"rest", "gone"}
            call.stored = outcome, after, committed
            self._tell(outcome, committed, trio.current_time() - since)

        async with self.job.resource(Transactions).open_for(StepTransaction, end) as transaction:
            yield transaction

    async def _stopped(self, work: Work, stored: Committed | None) -> None:
        """Write the end of a stopped run: an operator's cancel fails the step, other stops remove the step's mark.

        If a transaction has stored the step, only the mark of the step after it is removed.
        """
        if stored is not None:
            if stored.work is None:
                return
            work = stored.work
        outcome = self._returned(work)
        match self.port.stopped_by():
            case StopReason.LEASE_ENDED:
                # No heartbeat succeeded. The job is this run's until another worker claims it.
                async with self.port.ending() as end:
                    end.later = partial(self._late, outcome)
                return
            case why if why is None or why in NOT_HELD:  # another worker has the job, so a write would be void
                return
            case StopReason.CANCEL if stored is None:
                outcome = attrs.evolve(outcome, outcome="failed", error="stopped by an operator")
        with suppress(StoreError):  # on an error it is written after the handler; the cancellation ends the handler
            async with self._ending(outcome) as end:
                end.written = (await self._committed(outcome)).verdict in {"rest", "gone"}
