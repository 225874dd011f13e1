"""Keys that other systems see: the key of a step, and the keys of its deliveries, also after a restore (P4, P9)."""

from __future__ import annotations

import pytest
import trio
from conditions import until
from databases import raw_connection
from restores import Backup

from dataloader import Settings, Sink, Tasks, Worker, open_supervisor
from dataloader.flows.processes import Delivery, Done, Process, Processes, add_processes
from dataloader.jobs.processes import CallTimeout, HistoryChanged, ProcessNotFound

pytestmark = pytest.mark.requirement("P4")


@pytest.fixture
def desk():
    """Return payments with the bank's requests and the sink's deliveries, by their keys."""

    class Desk:
        def __init__(self):
            self.bank, self.books, self.processes, self.may_pay = [], [], Processes(), trio.Event()
            self.may_pay.set()
            kind = self.processes.define("pay", state=int, on_crash="again")

            @kind.init
            async def begin(_p: Process[int]) -> Done:
                return Done(state=0, events=["new"])

            @kind.call
            async def pay(p: Process[int], amount: int) -> Done:
                self.bank.append((p.step_key, amount))
                await self.may_pay.wait()
                return Done(state=p.state + amount, events=[f"paid {amount}"])

            @self.processes.sink("books")
            async def book(delivery: Delivery) -> None:
                self.books.append((delivery.key, delivery.payload))

            self.tasks = Tasks()
            add_processes(self.tasks, self.processes)

    return Desk()


def settings(database, **more):
    return Settings(
        db_dsn=database.dsn,
        workers=(Worker("process.pay", 4), Worker("deliveries", 4)),
        sinks=(Sink(name="books", kinds=("event",)),),
        port=0,
        heartbeat_s=0.2,
        default_lease_s=4,
        reaper_period_s=0.5,
        poll_s=0.5,
        **more,
    )


async def told(desk, payload):
    async def books():
        return desk.books

    await until(books, lambda books: payload in [said for _, said in books])


def meanings(pairs):
    """Return the meanings of each key."""
    by_key = {}
    for key, meaning in pairs:
        by_key.setdefault(key, set()).add(meaning)
    return by_key


@pytest.mark.slow
async def test_no_key_means_something_else_after_a_restore_in_place(database, desk, raw):
    async with open_supervisor(settings(database), desk.tasks, with_web=False) as supervisor:
        ask, backup = supervisor.processes, Backup()
        await ask.start("pay", "order-77")
        await told(desk, "new")
        await backup.make(raw)
        for amount in (5, 700):
            # The numbers of the task and of the event are the same each time.
            await ask.call("pay", "order-77", "pay", amount, key=f"k{amount}")
            await told(desk, f"paid {amount}")
            await backup.restore(raw)
    for pairs in (desk.bank, desk.books):
        assert {len(found) for found in meanings(pairs).values()} == {1}
    assert len({key for key, _ in desk.bank}) == 2


@pytest.mark.full
async def test_a_stored_call_that_runs_again_after_a_restore_keeps_its_key(database, desk):
    desk.may_pay = trio.Event()
    async with (
        raw_connection(database.dsn) as raw,
        open_supervisor(settings(database), desk.tasks, with_web=False) as supervisor,
    ):
        ask, backup = supervisor.processes, Backup()
        await ask.start("pay", "order-77")
        await told(desk, "new")
        with pytest.raises(CallTimeout):
            await ask.call("pay", "order-77", "pay", 5, timeout_s=0.5)
        await backup.make(raw)
        desk.may_pay.set()
        await told(desk, "paid 5")
        await backup.restore(raw)

        async def books():
            return desk.books

        await until(books, lambda books: [said for _, said in books].count("paid 5") == 2)
    assert len(desk.bank) >= 2
    assert len(set(desk.bank)) == 1
    assert len(meanings(desk.books)) == 2, "the sink can tell that it knows both events"


@pytest.mark.slow
async def test_a_wait_for_a_task_undone_by_a_restore_gets_no_other_tasks_answer(database, desk, raw):
    desk.may_pay = trio.Event()
    async with open_supervisor(settings(database), desk.tasks, with_web=False) as supervisor:
        ask, backup = supervisor.processes, Backup()
        await ask.start("pay", "order-77")
        await backup.make(raw)
        with pytest.raises(CallTimeout) as timeout:
            await ask.call("pay", "order-77", "pay", 5, timeout_s=0.5)
        task_id, ident = timeout.value.task_id, timeout.value.ident
        async with trio.open_nursery() as nursery:

            async def waits():
                with pytest.raises(ProcessNotFound):  # before the number is assigned again, or after
                    await ask.wait(task_id, ident=ident, timeout_s=60)

            nursery.start_soon(waits)

            async def waiting():
                return ask.performer.answers.is_awaited(task_id)

            await until(waiting)
            await backup.restore(raw)
            desk.may_pay.set()
            assert await ask.call("pay", "order-77", "pay", 700) is None
            # A concurrent statement may have taken the number.
            await raw.execute("UPDATE dl_process_tasks SET task_id = $1 WHERE args = '700'", task_id)
            assert (await ask.task(task_id)).args == 700
        with pytest.raises(HistoryChanged, match="the database was restored"):
            await ask.wait(task_id, ident=ident)
        with pytest.raises(HistoryChanged):
            await ask.withdraw(task_id, ident=ident)


async def test_a_cancelled_caller_withdraws_no_call_of_another_client(database, desk, raw):
    desk.may_pay = trio.Event()
    async with open_supervisor(settings(database), desk.tasks, with_web=False) as supervisor:
        ask = supervisor.processes
        await ask.start("pay", "order-77")
        with pytest.raises(CallTimeout):  # the call behind it does not begin
            await ask.call("pay", "order-77", "pay", 5, timeout_s=0)
        async with trio.open_nursery() as nursery:

            async def mine():
                await ask.call("pay", "order-77", "pay", 6, timeout_s=60, withdraw=True)

            nursery.start_soon(mine)
            task_id = await until(lambda: raw.fetchval("SELECT task_id FROM dl_process_tasks WHERE args = '6'"))

            async def waits():
                return ask.performer.answers.is_awaited(task_id)

            await until(waits)
            # After a restore the number was assigned again: another client's call waits under it.
            await raw.execute(
                "UPDATE dl_process_tasks SET ident = gen_random_uuid(), args = '700' WHERE task_id = $1", task_id
            )
            nursery.cancel_scope.cancel()
        assert await raw.fetchval("SELECT status FROM dl_process_tasks WHERE task_id = $1", task_id) == "waiting"
        desk.may_pay.set()
        assert await ask.wait(task_id, timeout_s=60) is None
        assert 700 in [amount for _, amount in desk.bank]
