"""Runs processes on a database for tests of their author, who lets time pass by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from dataloader.flows.processes import Processes, add_processes
from dataloader.jobs.process_contract import ProcessClient
from dataloader.jobs.process_listings import ProcessEvent, ProcessTask
from dataloader.jobs.process_outbox import QUEUE as DELIVERIES
from dataloader.jobs.process_outbox import Sink
from dataloader.jobs.process_requests import ProcessRequest
from dataloader.jobs.tasks import Tasks
from dataloader.store.processes import time_travel
from dataloader.supervisor.settings import Settings, Worker
from dataloader.supervisor.supervisor import Supervisor, open_supervisor

LOOK_S: Final = 0.02
SETTLE_S: Final = 30.0


@attrs.frozen
class Trace:
    """All that was asked of a process, its timers included, and all that has happened in it."""

    tasks: list[ProcessTask]
    events: list[ProcessEvent]

    @property
    def payloads(self) -> list[Any]:
        """The events as their author wrote them."""
        return [event.payload for event in self.events]


@attrs.frozen
class ProcessTester:
    """Processes that run, and what a test does with them. `processes` starts, calls and reads them."""

    processes: ProcessClient
    _supervisor: Supervisor
    _types: list[str]
    _by_hand: bool = False

    async def settle(self) -> None:
        """Wait until no process has anything to do now, and what they tell is delivered unless that is done by hand.

        Raises `trio.TooSlowError` after half a minute.
        """
        with trio.fail_after(SETTLE_S):
            while await time_travel.is_busy(  # noqa: ASYNC110 - its jobs have no event
                self._supervisor.database, self._types, with_deliveries=not self._by_hand
            ):
                await trio.sleep(LOOK_S)

    async def sent(self) -> list[ProcessRequest]:
        """The messages to other processes that wait to be delivered, in the order in which they were sent."""
        return await time_travel.sent_messages(self._supervisor.database)

    async def deliver(self) -> None:
        """Deliver messages, and what sinks are told, and all that comes of it; for `deliver_by_hand=True`."""
        jobs = self._supervisor.jobs
        await jobs.resume(DELIVERIES)
        await attrs.evolve(self, by_hand=False).settle()
        if self._by_hand:
            await jobs.pause(DELIVERIES)

    async def advance(self, seconds: float) -> None:
        """Let time pass: timers that fall due run one after the other, each at its time, and calls expire."""
        await self.settle()
        while seconds > 0:
            due_s = await time_travel.next_timer_s(self._supervisor.database, self._types)
            step = seconds if due_s is None else min(seconds, due_s)
            await time_travel.advance(self._supervisor.database, self._types, step)
            seconds -= step
            await self.settle()

    async def crash(self, process_type: str, process_id: str) -> None:
        """Let the worker of the step that runs die: another finds that. Raises `ValueError` if no step runs."""
        if not await time_travel.lose_worker(self._supervisor.database, process_type, process_id):
            raise ValueError(f"no step of the process {process_id!r} runs")

    async def trace(self, process_type: str, process_id: str) -> Trace:
        """What was asked of a process and has happened in it, the first 200 of each."""
        tasks = await self.processes.tasks(process_type, process_id)
        events = await self.processes.events(process_type, process_id)
        return Trace(tasks.tasks, events.events)


@asynccontextmanager
async def process_tester(
    dsn: str, processes: Processes, *, slots: int = 4, sinks: Sequence[Sink] = (), deliver_by_hand: bool = False
) -> AsyncIterator[ProcessTester]:
    """Run the steps of these types on a migrated database, such as `temporary_database` gives.

    Args:
        dsn: the database; processes of these types that it has already run, too.
        processes: the types.
        slots: how many steps of a type run at once.
        sinks: who is told of the processes, such as `Sink(name="books")` for a handler of this name.
        deliver_by_hand: messages and what sinks are told wait for `tester.deliver()`.
    """
    tasks = Tasks()
    add_processes(tasks, processes)
    types = [kind.name for kind in processes]
    workers = tuple(Worker(f"process.{name}", slots) for name in types)
    async with open_supervisor(Settings(db_dsn=dsn, workers=workers, sinks=tuple(sinks)), tasks) as supervisor:
        if deliver_by_hand:
            await supervisor.jobs.pause(DELIVERIES)
        yield ProcessTester(supervisor.processes, supervisor, types, deliver_by_hand)
