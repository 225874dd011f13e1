"""Runs durable processes on a database for their author's tests, which advance time manually."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from dataloader.flows.processes import Processes, add_processes
from dataloader.jobs.client.processes import ProcessClient
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
    """All requests and timers of a process, and all its events."""

    tasks: list[ProcessTask]
    events: list[ProcessEvent]

    @property
    def payloads(self) -> list[Any]:
        """Payloads of the events, as their author wrote them."""
        return [event.payload for event in self.events]


@attrs.frozen
class ProcessTester:
    """Running processes under test. `processes` starts, calls and reads them."""

    processes: ProcessClient
    _supervisor: Supervisor
    _types: list[str]
    _by_hand: bool = False

    async def settle(self) -> None:
        """Wait until no process has work to do, and events and messages are delivered unless `deliver_by_hand` is set.

        Raises `trio.TooSlowError` after 30 seconds.
        """
        with trio.fail_after(SETTLE_S):
            while await time_travel.is_busy(  # noqa: ASYNC110 - its jobs have no event
                self._supervisor.database, self._types, with_deliveries=not self._by_hand
            ):
                await trio.sleep(LOOK_S)

    async def sent(self) -> list[ProcessRequest]:
        """Return the messages to other processes that wait for delivery, in the order in which they were sent."""
        return await time_travel.sent_messages(self._supervisor.database)

    async def deliver(self) -> None:
        """Deliver messages and sink events, and wait for all that follows from them; for `deliver_by_hand=True`."""
        jobs = self._supervisor.jobs
        await jobs.resume(DELIVERIES)
        await attrs.evolve(self, by_hand=False).settle()
        if self._by_hand:
            await jobs.pause(DELIVERIES)

    async def advance(self, seconds: float) -> None:
        """Advance time by `seconds`: due timers run one after the other, each at its time, and calls expire."""
        await self.settle()
        while seconds > 0:
            due_s = await time_travel.next_timer_s(self._supervisor.database, self._types)
            step = seconds if due_s is None else min(seconds, due_s)
            await time_travel.advance(self._supervisor.database, self._types, step)
            seconds -= step
            await self.settle()

    async def crash(self, process_type: str, process_id: str) -> None:
        """Simulate the death of the worker of the running step. Raises `ValueError` if no step runs."""
        if not await time_travel.lose_worker(self._supervisor.database, process_type, process_id):
            raise ValueError(f"the process {process_id!r} has no running step")

    async def trace(self, process_type: str, process_id: str) -> Trace:
        """Return the requests, timers and events of a process, the first 200 of each."""
        tasks = await self.processes.tasks(process_type, process_id)
        events = await self.processes.events(process_type, process_id)
        return Trace(tasks.tasks, events.events)


@asynccontextmanager
async def process_tester(
    dsn: str, processes: Processes, *, slots: int = 4, sinks: Sequence[Sink] = (), deliver_by_hand: bool = False
) -> AsyncIterator[ProcessTester]:
    """Run the steps of these types on a migrated database, such as that of `temporary_database`.

    Args:
        dsn: the database. Existing processes of these types run, too.
        processes: the types.
        slots: how many steps of a type run concurrently.
        sinks: receivers of process events, such as `Sink(name="books")` for a handler of this name.
        deliver_by_hand: messages and sink events wait for `tester.deliver()`.
    """
    tasks = Tasks()
    add_processes(tasks, processes)
    types = [kind.name for kind in processes]
    workers = tuple(Worker(f"process.{name}", slots) for name in types)
    async with open_supervisor(Settings(db_dsn=dsn, workers=workers, sinks=tuple(sinks)), tasks) as supervisor:
        if deliver_by_hand:
            await supervisor.jobs.pause(DELIVERIES)
        yield ProcessTester(supervisor.processes, supervisor, types, deliver_by_hand)
