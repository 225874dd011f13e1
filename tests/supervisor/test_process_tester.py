"""The tester of processes: the test advances the time, a worker dies on request, and the trace has the events."""

from __future__ import annotations

import pytest
import trio
from conditions import patience_s
from payment_processes import payments

from dataloader import RetryPolicy
from dataloader.flows.processes import Delivery, Done, Process, Processes, Timer
from dataloader.jobs.process_outbox import Sink
from dataloader.jobs.processes import ProcessFailed, ProcessNotFound
from dataloader.testing import process_tester

pytestmark = pytest.mark.slow


@pytest.mark.requirement("P5")
async def test_timers_run_one_after_the_other_as_time_is_advanced(database):
    async with process_tester(database.dsn, payments(retry=RetryPolicy(base_s=100, factor=1))) as tester:
        assert await tester.processes.start("payment", "1", 5) == "reserved"
        await tester.advance(890)
        assert (await tester.trace("payment", "1")).payloads == ["reserved"]
        # The timer is due, fails once, and is retried about a hundred seconds later.
        await tester.advance(400)
        trace = await tester.trace("payment", "1")
        assert trace.payloads == ["reserved", "captured"]
        assert [(task.kind, task.status) for task in trace.tasks] == [
            ("init", "finished"), ("timeout", "error"), ("timeout", "finished"), ("remove", "waiting"),
        ]  # fmt: skip
        await tester.advance(86_400)
        with pytest.raises(ProcessNotFound):
            await tester.processes.get("payment", "1")


@pytest.mark.requirement("P7")
async def test_a_step_whose_worker_dies_is_a_zombie_or_is_run_again(database):
    processes, runs, go_on = Processes(), [], trio.Event()
    for name, on_crash in (("again", "again"), ("error", "error")):
        kind = processes.define(name, on_crash=on_crash)

        @kind.init
        async def begin(p: Process) -> Done:
            runs.append(p.type)
            if runs.count(p.type) == 1:
                await go_on.wait()
            return Done(next=Timer(after_s=900))

    async with process_tester(database.dsn, processes) as tester, trio.open_nursery() as nursery:

        async def starts(name):
            try:
                await tester.processes.start(name, "1")
            except ProcessFailed as error:
                runs.append(str(error))

        for name in ("again", "error"):
            nursery.start_soon(starts, name)
        with trio.fail_after(patience_s()):
            while len(runs) < 2:  # noqa: ASYNC110 - the steps have no event
                await trio.sleep(0.01)
        for name in ("again", "error"):
            await tester.crash(name, "1")
        await tester.settle()
        go_on.set()
        assert (await tester.processes.get("again", "1")).status == "running"
        assert (await tester.processes.get("error", "1")).detail == "zombie detected"
        with pytest.raises(ValueError, match="has no running step"):
            await tester.crash("again", "1")
    assert runs.count("again") == 2
    assert runs.count("error") == 1


@pytest.mark.requirement("P9", "P10")
async def test_messages_and_what_sinks_are_told_are_seen_and_delivered_by_hand_or_at_once(database):
    processes, told = Processes(), []
    kind = processes.define("parent", state=int)

    @kind.init
    async def begin(p: Process[int], children: int) -> Done:
        for number in range(children):
            p.start(kind, f"{p.process_id}.{number}", 0)
        return Done(state=children, events=["began"])

    @processes.sink("books")
    async def book(delivery: Delivery) -> None:
        told.append(delivery.process_id)

    sinks = [Sink(name="books", kinds=("event",))]
    async with process_tester(database.dsn, processes, sinks=sinks, deliver_by_hand=True) as tester:
        await tester.processes.start("parent", "a", 2)
        await tester.settle()
        assert [(one.process_id, one.args) for one in await tester.sent()] == [("a.0", 0), ("a.1", 0)]
        assert told == []
        await tester.deliver()
        assert await tester.sent() == []
        assert (await tester.processes.get("parent", "a.1")).state == 0
        assert sorted(told) == ["a", "a.0", "a.1"]
        await tester.processes.start("parent", "b", 1)
        await tester.settle()
        assert len(await tester.sent()) == 1
        await tester.deliver()
    async with process_tester(database.dsn, processes, sinks=sinks) as tester:
        await tester.deliver()
        await tester.processes.start("parent", "c", 1)
        await tester.settle()
        assert (await tester.processes.get("parent", "c.0")).status == "running"
        assert "c.0" in told
