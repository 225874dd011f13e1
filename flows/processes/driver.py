"""Runs the steps of a process: the task of its wake-up job (P3 to P7).

A run begins a step, calls the author's function, writes the outcome, and goes on with the next task of the process as
long as there is one: a waiting call first, then a timer that is due. After `MOST_STEPS` steps or `MOST_S` seconds the
job goes back to the queue, so that others get their turn. What is written ends the job itself: it waits for the timer,
or is deleted; so the queue records nothing of such a run.

An outage of the queue's database ends no step; `Outages` tells it from others. A step that it interrupts runs again, in
the same run and without counting a try, once `begin` has told whether a COMMIT without an answer has happened: then the
process's mark has moved. If the outage outlasts the lease, the author's function is stopped as always. When the
database is back, the outcome is stored, or the mark is taken back, unless another worker has the job by then.
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
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.process_listings import ProcessAnswer
from dataloader.jobs.process_outbox import ProcessOutbox
from dataloader.jobs.process_telemetry import ProcessTelemetry
from dataloader.jobs.retry import RetryPolicy
from dataloader.jobs.task import Task
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.answers import Answers
from dataloader.store.processes.own_events import read_own_events
from dataloader.store.processes.steps import (
    Begun,
    Committed,
    Snapshot,
    StepOutcome,
    Wakeup,
    Work,
    aio_commit_within,
)
from dataloader.store.queue.transaction import Transactions, Written

log = get_logger(__name__)
B = TypeVar("B", Begun, Committed)
B_co = TypeVar("B_co", Begun, Committed, covariant=True)


class Send(Protocol[B_co]):
    """Sends a step's beginning or end; `in_turn`: waits for its process's row."""

    async def __call__(self, *, in_turn: bool) -> B_co:
        """What the database says."""


SOON: Final = RetryPolicy(base_s=1, factor=2, cap_s=30)
"""After a run that could not be ended as its steps are, such as one whose lease could not be held."""
MOST_STEPS: Final = 100
MOST_S: Final = 1.0
OUTAGE_PAUSES_S: Final = (0.2, 30.0)
"""The pauses before a step runs again that an outage has interrupted: the first, and the longest."""
LOCKED_S: Final = 0.001
"""Somebody who asks a process has its row for so long; the next time it is waited for in turn."""
LOST_S: Final = 0.2
ANSWER_S: Final = 2.0
"""Seconds that a step waits for the database to answer after its time is over."""


def tasks_of(processes: Processes) -> list[Task[Any]]:
    """The tasks of the wake-up jobs of these types: of each version that a type can go on with."""
    return [
        Task(
            name=name,
            handler=partial(drive, kind),
            is_async=True,
            queue=kind.queue,
            max_attempts=MAX_ATTEMPTS,
            retry=SOON,
            description=f"The steps of processes of the type {kind.name}.",
        )
        for kind in processes
        for name in kind.tasks
    ]


async def drive(kind: ProcessType[Any], job: Job, *, outage_pauses_s: tuple[float, float] = OUTAGE_PAUSES_S) -> object:
    """Run the steps of one process until nothing is left to do now: the handler of its type's tasks."""
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
    """The ident of the task whose step runs."""
    is_last: bool = attrs.field(default=False, init=False)
    """This run does no step after this one."""
    is_late: bool = attrs.field(default=False, init=False)
    """The body has ended, and what it could not write is written."""
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
            log.info("the wake-up job has no process any more")
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
                then: Begun | Committed = stored
            elif outcome.outcome == "returned":
                then = await self._resolved(snapshot, work)
                steps -= 1
            else:
                then = await self._ended(outcome)
            if then.verdict == "void":
                log.warning("a step's end was not written, or had no answer: the process is not this run's any more")
            if then.work is None:
                return None
            work, snapshot = then.work, then.on(snapshot)
            steps += 1

    async def _begun_again(self) -> Begun:
        """Begin a step, or the same one again."""
        async with self._ending(None) as end:
            begun = await self._begun()
            end.written = begun.verdict in {"rest", "zombie"}
        return begun

    async def _resolved(self, _snapshot: Snapshot, _work: Work) -> Begun:
        """Learn what became of a step that an outage has interrupted, and begin it again if nothing did.

        Its transaction may have committed without an answer, and marked the next step: then that one begins.
        """
        return await self._begun_again()

    async def _ended(self, outcome: StepOutcome) -> Begun | Committed:
        """Write the outcome of a step; begin the next one."""
        async with self._ending(outcome) as end:
            committed = await self._committed(self._going_on(outcome))
            # The answer of an earlier try may have been lost, which had marked the next step: that one begins here.
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
        """Write an outcome, or take the mark of a step back, after the body: void if the job is another run's."""
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

    async def _begun(self) -> Begun:
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
        """Send it, again while a row is locked or the database is away; the token makes that safe.

        Who does not get the row twice waits for it, behind those who came before: where many ask one process, somebody
        has its row at any time.
        """
        times_locked = 0
        while True:
            try:
                answer = await send(in_turn=times_locked > 1)
            except Unstorable:
                raise
            except StoreError as error:
                if self.port.stopped_by() is not None and not self.is_late:
                    raise  # the body ends; what is to be written does not hold it up
                self.stepper.log_wait(str(error))
                await trio.sleep(LOST_S)
                continue
            if answer.verdict != "locked":
                return answer
            times_locked += 1
            await trio.sleep(LOCKED_S)

    def _tell(self, step: StepOutcome, committed: Committed, took_s: float) -> None:
        """Those who wait in this process get their answers without a look at the database."""
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

    async def _step(self, snapshot: Snapshot, work: Work) -> tuple[StepOutcome, Snapshot, Committed | None]:
        """Call the author's function; whatever it does becomes an outcome, which a transaction may have stored."""
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
        except BaseException:  # the cancellation, alone or in a group; what is the author's was an outcome
            stored = None if call.stored is None else call.stored[2]
            await self._stopped(work, stored)  # noqa: ASYNC102 - it is shielded until the body must have ended
            raise
        self.telemetry.processed(self.kind.name, work.kind, outcome.outcome, trio.current_time() - since)
        return outcome, after, None if call.stored is None else call.stored[2]

    @asynccontextmanager
    async def _transaction(self, call: StepCall) -> AsyncIterator[StepTransaction]:
        """Store the step's outcome with the author's rows, when the block ends well."""

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
        """The run was stopped in the step: a drain takes the mark back, an operator's stop is the step's error.

        Of a step that its transaction has stored only what is marked after it goes back.
        """
        if stored is not None:
            if stored.work is None:
                return
            work = stored.work
        outcome = self._returned(work)
        match self.port.stopped_by():
            case StopReason.DRAIN:
                pass
            case StopReason.LEASE_ENDED:
                # No heartbeat got through. The job is this run's until another worker has taken it.
                async with self.port.ending() as end:
                    end.later = partial(self._late, outcome)
                return
            case StopReason.CANCEL if stored is not None:
                pass
            case StopReason.CANCEL:
                outcome = attrs.evolve(outcome, outcome="failed", error="stopped by an operator")
            case _:  # the job is another worker's: what was written of it would be void
                return
        with suppress(StoreError):  # then it is written after the body; the cancellation is what ends that
            async with self._ending(outcome) as end:
                end.written = (await self._committed(outcome)).verdict in {"rest", "gone"}
