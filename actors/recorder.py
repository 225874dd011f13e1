"""Writes the outcomes of runs, in batches.

Outcomes that arrive while one batch is written form the next: a single one is written immediately, and many share a
statement. Progress and log lines are written with them, or within a second.

The runners send to it through one channel. A run is removed and its key freed only when its end is recorded. The
recorder ends when the channel's senders are closed and everything is written, so a drain loses nothing. While the
database cannot be used it retries, and the heartbeats continue to renew the leases; an outcome whose lease has ended
meanwhile changes nothing. A job whose row another session has locked is in each later batch until it is written.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import attrs
import trio
from msgspec.structs import replace

from dataloader.actors.job_runs import Run, Runs
from dataloader.actors.outage import Outage
from dataloader.actors.recorder_messages import Ended, Shown, ToRecord
from dataloader.actors.run_sums import RunSums
from dataloader.actors.signals import Recorded, Signals
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError, StoreUnavailable, Unstorable
from dataloader.jobs.growing_pauses import Pauses
from dataloader.jobs.logger import get_logger
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.run_stats import RunOutcome, outcome_of_run
from dataloader.jobs.states import Step
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import Session
from dataloader.store.queue.finish import Finished, aio_finish, aio_keep_lines, aio_show_progress
from dataloader.store.queue.lock_session import LockSession

log = get_logger(__name__)

MAX_BATCH: Final = 250
KEYED_FIRST: Final = 200
"""Maximum number of ends of jobs with a key that a batch writes before ends of jobs without one.

Without a bound, the latter would wait while the former keep the recorder busy.
"""
MAX_TURNS: Final = 10
"""Maximum number of turns of the event loop in which a batch is gathered before it is written."""
SHOW_EVERY_S: Final = 1.0
MAX_PAUSE_S: Final = 2.0
LOCKED_PAUSE_S: Final = 0.01
MAX_LOCKED_PAUSE_S: Final = 0.5


_Row = TypeVar("_Row", bound=tuple[Any, ...])


@attrs.define(eq=False)
class Recorder:
    """The only writer of outcomes.

    `released` is set when keys can be released. `sums` are the statistics; `tally` counts the written outcomes since
    the start, by step. `insisting` becomes false when a drain has reached its bound: outcomes that cannot be written
    from then on are left to the end of their leases.
    """

    session: Session
    locks: LockSession
    runs: Runs
    outage: Outage
    telemetry: Telemetry
    released: Wake
    sums: RunSums
    tally: Counter[Step] = attrs.field(factory=Counter)
    insisting: bool = True
    signals: Signals | None = None
    _unwritten: list[Ended] = attrs.field(factory=list, init=False)
    _to_show: dict[int, Run] = attrs.field(factory=dict, init=False)
    _show_at: float = attrs.field(default=math.inf, init=False)
    _locked: list[Ended] = attrs.field(factory=list, init=False)
    _locked_pauses: Pauses = attrs.field(factory=partial(Pauses, LOCKED_PAUSE_S, MAX_LOCKED_PAUSE_S), init=False)
    _again_at: float = attrs.field(default=math.inf, init=False)

    async def run(
        self,
        messages: trio.MemoryReceiveChannel[ToRecord],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Write until the channel has ended and is empty."""
        task_status.started()
        with messages:
            while True:
                batch, ended = await self._gather(messages)
                if batch:
                    await self._record(batch)
                if self._to_show and (ended or trio.current_time() >= self._show_at):
                    await self._show()
                ends = ended and not batch
                if ends or trio.current_time() >= self.sums.due_at:
                    await self.sums.write()
                if ends:
                    return

    async def _gather(self, messages: trio.MemoryReceiveChannel[ToRecord]) -> tuple[list[Ended], bool]:
        """Return the next ends, after those whose row was locked before, and whether the channel has ended.

        There is at least one end, unless it is time to write progress or sums, or the channel has ended. If there are
        more ends than a batch holds, those of jobs with a key come first, because the next job of the key waits for
        them.
        """
        ended = False
        try:
            if not self._unwritten:
                with trio.move_on_at(min(self._show_at, self._again_at, self.sums.due_at)):
                    self._take(await messages.receive())
            # Runs that end in consecutive turns of the event loop share one statement.
            for _ in range(MAX_TURNS):
                before = len(self._unwritten)
                with contextlib.suppress(trio.WouldBlock):
                    while True:
                        self._take(messages.receive_nowait())
                if before == len(self._unwritten) or before >= MAX_BATCH:
                    break
                await trio.lowlevel.cancel_shielded_checkpoint()
        except trio.EndOfChannel:
            ended = True
            if self._locked and not self._unwritten:
                await trio.sleep_until(self._again_at)
        if len(self._unwritten) > MAX_BATCH:
            self._unwritten = _keyed_first(self._unwritten)
        batch, self._unwritten = self._unwritten[:MAX_BATCH], self._unwritten[MAX_BATCH:]
        return self._locked + batch, ended

    def _take(self, message: ToRecord) -> None:
        if isinstance(message, Ended):
            self._unwritten.append(message)
        else:
            self._to_show[message.run.job.token] = message.run
            self._show_at = min(self._show_at, trio.current_time() + SHOW_EVERY_S)

    async def _record(self, batch: Sequence[Ended]) -> None:
        # Log lines first: they would be lost with the run.
        logging = await self._keep_lines([message.run for message in batch if message.run.outbox.has_lines])
        if not self.insisting:
            logging = set()
        outcomes = []
        for message in batch:
            if message.outcome is not None and message.run.job.token not in logging:
                progress = message.run.outbox.newest_progress
                outcomes.append(message.outcome if progress is None else replace(message.outcome, progress=progress))
        finished = await self._insist(outcomes)
        batch = self._pass_over(batch, [*finished.locked, *logging])
        if finished.void:
            self.telemetry.fenced(len(finished.void))
            log.warning("late outcomes had no effect: another worker has the jobs now", jobs=len(finished.void))
        for message in batch:
            job = message.run.job
            self._count(message, finished)
            self._to_show.pop(job.token, None)
            self.runs.remove(message.run)
            self.locks.forget(job.token)
            message.run.when_recorded()
        if not self._to_show:
            self._show_at = math.inf  # nothing is left to show: no need to wake for it
        self.released.set()
        if self.signals is not None:
            for message in batch:
                self.signals.recorded.emit(Recorded(job_id=message.run.job.job_id, token=message.run.job.token))

    def _count(self, message: Ended, finished: Finished) -> None:
        job, outcome = message.run.job, message.outcome
        if outcome is None:
            if message.run.committed:
                self.tally[message.run.committed_as] += 1
                self.sums.add(job.queue, job.task, RunOutcome.SUCCEEDED, message.run.run_s)
        elif job.token not in finished.void:
            self.tally[outcome.step] += 1
            became = outcome_of_run(outcome.step, finished.written.get(job.token))
            self.sums.add(job.queue, job.task, became, message.run.run_s)

    def _pass_over(self, batch: Sequence[Ended], locked: Sequence[int]) -> Sequence[Ended]:
        """Keep the messages whose row is locked for the next batch, or for a pause if none comes; return the others."""
        if locked and not self.insisting:
            log.error(
                "outcomes could not be written; their jobs are recovered when their leases expire", jobs=len(locked)
            )
            locked = []
        self._locked = [message for message in batch if message.run.job.token in locked]
        if not locked:
            self._locked_pauses.reset()
            self._again_at = math.inf
            return batch
        self._again_at = trio.current_time() + self._locked_pauses.next()
        return [message for message in batch if message.run.job.token not in locked]

    async def _insist(self, outcomes: list[Outcome]) -> Finished:
        """Write `outcomes`; retry while the database cannot be used, which their tokens make safe."""
        if not outcomes:
            return Finished({}, [])
        pauses = Pauses(0.05, MAX_PAUSE_S)
        while True:
            try:
                finished = await self.session.write(aio_finish, outcomes)
            except StoreError as error:
                if isinstance(error, Unstorable):
                    return await self._without_the_unstorable(outcomes, error)
                if not self.insisting:
                    log.error(  # noqa: TRY400 - the drain's report follows; a traceback would add nothing
                        "outcomes could not be written; their jobs are recovered when their leases expire",
                        jobs=len(outcomes),
                    )
                    return Finished({}, [])
                pause_s = pauses.next()
                self.outage.failed("recorder", error, jobs=len(outcomes), again_in_s=round(pause_s, 2))
                await trio.sleep(pause_s)
            except Exception as error:  # noqa: BLE001 - if one outcome is at fault, the others are written
                return await self._without_the_unstorable(outcomes, error)
            else:
                self.outage.worked("recorder")
                return finished

    async def _without_the_unstorable(self, outcomes: list[Outcome], error: Exception) -> Finished:
        """Write each outcome separately, because one of them makes the statement fail for all."""
        if len(outcomes) == 1:
            return await self._insist_without_text(outcomes[0], error)
        all_finished = Finished({}, [])
        for outcome in outcomes:
            finished = await self._insist([outcome])
            all_finished.written.update(finished.written)
            all_finished.void.extend(finished.void)
            all_finished.locked.extend(finished.locked)
        return all_finished

    async def _insist_without_text(self, outcome: Outcome, error: Exception) -> Finished:
        """End a job whose outcome cannot be stored: write a fixed error instead of its texts."""
        log.error("an outcome could not be stored unchanged", job_id=str(outcome.job_id), error=str(error))
        if outcome.error == UNSTORABLE and outcome.result is None:
            return Finished({}, [outcome.token])
        # The next stage cannot begin with a value that cannot be stored.
        step = Step.FAIL if outcome.step is Step.MOVE else outcome.step
        return await self._insist([Outcome(outcome.job_id, outcome.token, step, UNSTORABLE, delay_s=outcome.delay_s)])

    async def _show(self) -> None:
        runs = [run for run in self._to_show.values() if not run.body_ended]
        self._to_show.clear()
        self._show_at = math.inf
        shown = []
        for run in runs:
            run.outbox.is_told = False
            if (progress := run.outbox.take_progress()) is not None:
                shown.append((run, progress))
        logging = await self._keep_lines([run for run in runs if run.outbox.has_lines])
        for run in runs:
            if run.job.token in logging:
                self._show_again(run)
        waiting = await self._write_progress(shown) if shown else set()
        for run, progress in shown:
            if run.job.token in waiting:
                run.outbox.give_back_progress(progress)
                self._show_again(run)

    async def _write_progress(self, shown: Sequence[tuple[Run, str]]) -> set[int]:
        """Write the progress of runs; return the tokens of those whose progress must be written again."""
        rows = [(run.job.job_id, run.job.token, progress) for run, progress in shown]
        try:
            return await self._by_halves(aio_show_progress, rows)
        except StoreUnavailable as error:
            # Not reported as an outage of the recorder: the run may end before the next attempt.
            if not self.outage.lasts:
                log.warning("progress waits for the database", jobs=len(shown), error=str(error))
            return {run.job.token for run, _ in shown}
        except StoreError as error:
            log.warning("progress could not be written", jobs=len(shown), error=str(error))
            return set()

    async def _by_halves(self, write: Callable[..., Awaitable[set[int]]], rows: Sequence[_Row]) -> set[int]:
        """Write rows of several runs, except those that the database refuses. Return the tokens of locked runs."""
        try:
            return await self.session.write(write, rows)
        except Unstorable as error:
            if len(rows) == 1:
                log.warning("the database rejected progress or log lines of a run", error=str(error))
                return set()
            middle = len(rows) // 2
            first = await self._by_halves(write, rows[:middle])
            return first | await self._by_halves(write, rows[middle:])

    def _show_again(self, run: Run) -> None:
        run.outbox.is_told = True
        self._take(Shown(run))

    async def _keep_lines(self, runs: Sequence[Run]) -> set[int]:
        """Write the runs' log lines. Return the tokens of runs that keep their lines, because their row is locked."""
        lines = {run: run.outbox.take_lines() for run in runs}
        texts = [(run.job.job_id, run.job.token, at, text) for run, pairs in lines.items() for at, text in pairs]
        if not texts:
            return set()
        try:
            of_loads = any(run.outbox.is_of_loads for run in lines)
            locked = await self._by_halves(partial(aio_keep_lines, of_loads=of_loads), texts)
        except StoreError as error:
            # Not kept for another attempt: they are many, and the process's own log has room for them.
            if not self.outage.lasts:
                log.warning("log lines could not be stored", lines=len(texts), error=str(error))
            return set()
        for run, pairs in lines.items():
            if run.job.token in locked:
                run.outbox.give_back_lines(pairs)
        return locked


def _keyed_first(ends: list[Ended]) -> list[Ended]:
    """Return `ends` with up to `KEYED_FIRST` ends of jobs with a key in front, in their order otherwise."""
    keyed = [end for end in ends if end.run.job.lock_hash is not None]
    keyless = [end for end in ends if end.run.job.lock_hash is None]
    return keyed[:KEYED_FIRST] + keyless + keyed[KEYED_FIRST:]


UNSTORABLE: Final = "the return value or the error of the handler could not be stored"


def open_channel() -> tuple[trio.MemorySendChannel[ToRecord], trio.MemoryReceiveChannel[ToRecord]]:
    """Open the recorder's channel. It has no bound: a run has at most one `Shown` and one `Ended` under way."""
    return trio.open_memory_channel[Ended | Shown](math.inf)
