"""Waits for the answers of tasks: from memory, by notification, by polling."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from conditions import patience_s, until
from payments import Gate, payments
from watched_database import WatchedDatabase

from dataloader import Settings, StoreUnavailable, Tasks, Worker, open_client, open_supervisor
from dataloader.flows.processes import add_processes
from dataloader.jobs.process_listings import ProcessAnswer
from dataloader.jobs.processes import ProcessNotFound
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.processes import answers
from dataloader.store.processes.answers import Answers
from dataloader.store.processes.requests import Request, aio_ask

pytestmark = pytest.mark.requirement("P2")

NOWHERE = "postgresql://postgres@127.0.0.1:1/jobs"


@asynccontextmanager
async def opened_answers(dsn, **looks):
    async with open_database(DatabaseOptions(dsn=dsn, connect_timeout_s=3)) as database:
        yield Answers(database, **looks)


def never_look(waits):
    """Stop reading from the database: a wait ends only by a notification."""
    waits.first_look_s = waits.reread_s = 3_600


@asynccontextmanager
async def running(database, gate):
    """Run a supervisor for payments, and the payment 1."""
    tasks = Tasks()
    add_processes(tasks, payments(gate))
    settings = Settings(db_dsn=database.dsn, workers=(Worker("process.payment", 4),), drain_timeout_s=0)
    async with open_supervisor(settings, tasks) as supervisor:
        await supervisor.processes.start("payment", "1", 5)
        yield supervisor


async def test_an_answer_in_memory_is_not_read_from_the_database():
    async with opened_answers(NOWHERE) as waits:
        never_look(waits)
        answer = ProcessAnswer(task_id=7, status="finished", response="x")
        got = []

        async def wait():
            got.append(await waits.wait(7, timeout_s=60, is_new=True))

        with trio.fail_after(patience_s()):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                assert waits.is_awaited(7)
                waits.told(7, answer)
        assert got == [answer, answer]
        assert not waits.is_awaited(7)
        with pytest.raises(StoreUnavailable):
            await waits.wait(7, timeout_s=60)


async def test_a_step_in_this_process_answers_without_a_notification(database):
    gate = Gate()
    async with running(database, gate) as supervisor:
        never_look(supervisor.processes.performer.answers)
        # `watched` is false, so no notification is sent.
        request = Request(type="payment", process_id="1", kind="call", method="hang")
        asked = await supervisor.database.run(aio_ask, request, 60)
        waits, got = supervisor.processes.performer.answers, []

        async def wait():
            got.append(await waits.wait(asked.task_id, timeout_s=60, is_new=True))

        with trio.fail_after(patience_s()):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await until(lambda: _are(waits.is_awaited(asked.task_id) and gate.begun))
                gate.opened.set()
        answer = ProcessAnswer(task_id=asked.task_id, status="finished", response="at last", ident=asked.ident)
        assert got == [answer]


@pytest.mark.slow
async def test_a_step_in_another_process_answers_by_a_notification(database, raw):
    gate = Gate()
    async with running(database, gate), open_client(database.dsn) as client:
        ask = client.processes
        # The first wait starts a listener, with a new connection.
        assert await ask.call("payment", "1", "pay", 5) == "thanks"
        await until(lambda: _listens(raw))
        never_look(ask.performer.answers)
        got = []

        async def call():
            got.append(await ask.call("payment", "1", "hang"))

        with trio.fail_after(patience_s()):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call)
                await until(lambda: _are(gate.begun and ask.performer.answers._watches))
                gate.opened.set()
        assert got == ["at last"]


async def test_an_answer_without_a_notification_is_found_by_one_shared_read(database, raw):
    looks = []

    async def aio_count(_connection, sql, *values):
        if sql == answers._WATCH:
            looks.append(len(values[0]))

    await raw.execute(
        "INSERT INTO dl_processes (type, process_id) VALUES ('t', '1');"
        " INSERT INTO dl_process_tasks (key, type, kind)"
        " SELECT key, 't', 'call' FROM dl_processes, generate_series(1, 50)"
    )
    ids = [row[0] for row in await raw.fetch("SELECT task_id FROM dl_process_tasks")]
    got = []
    async with open_database(DatabaseOptions(dsn=database.dsn)) as opened:
        waits = Answers(WatchedDatabase(opened, before=aio_count), reread_s=0.3)

        async def wait(task_id):
            got.append(await waits.wait(task_id, timeout_s=60))

        with trio.fail_after(patience_s()):
            async with trio.open_nursery() as nursery:
                for task_id in ids:
                    nursery.start_soon(wait, task_id)
                    nursery.start_soon(wait, task_id)
                await until(lambda: _watched(raw), lambda number: number == 50)
                assert looks == [50]
                await raw.execute("UPDATE dl_process_tasks SET status = 'finished', response = '1'")
        assert [(answer.status, answer.response) for answer in got] == [("finished", 1)] * 100
        assert all(size == 50 for size in looks[:2])
        with trio.fail_after(patience_s()):
            waiting = await waits.wait(ids[0], timeout_s=0)
            with pytest.raises(ProcessNotFound):
                await waits.wait(10**12, timeout_s=60)
        assert waiting.is_answered


@pytest.mark.slow
async def test_a_locked_process_delays_a_request_for_a_bounded_time_only(database, raw):
    async with running(database, Gate()) as supervisor:
        await raw.execute("BEGIN")
        await raw.execute("SELECT FROM dl_processes FOR UPDATE")
        started = trio.current_time()
        with pytest.raises(StoreUnavailable):
            await supervisor.processes.call("payment", "1", "pay", 5)
        assert trio.current_time() - started < 20
        assert (await supervisor.processes.get("payment", "1")).status == "running"
        await raw.execute("ROLLBACK")
        assert await supervisor.processes.call("payment", "1", "pay", 5) == "thanks"


async def test_a_caller_cancelled_during_a_read_leaves_it_to_the_next_caller(database, raw):
    await raw.execute(
        "INSERT INTO dl_processes (type, process_id) VALUES ('t', '1');"
        " INSERT INTO dl_process_tasks (task_id, key, type, kind) SELECT 7, key, 't', 'call' FROM dl_processes"
    )
    async with opened_answers(database.dsn) as waits:
        await waits.wait(7, timeout_s=0)
        await raw.execute("BEGIN")
        await raw.execute("LOCK TABLE dl_process_tasks")
        with trio.move_on_after(0.2) as left:
            await waits.wait(7, timeout_s=60)
        assert left.cancelled_caught
        await raw.execute("ROLLBACK")
        with trio.fail_after(patience_s()):
            assert (await waits.wait(7, timeout_s=0.1)).status == "waiting"


async def _are(things):
    return bool(things)


async def _listens(raw):
    """Return whether the calling program has its listener."""
    name = "application_name = 'dataloader client listener'"
    # It is pinged once it listens.
    return await raw.fetchval(f"SELECT count(*) FROM pg_stat_activity WHERE {name} AND query LIKE '%queue_usage%'")


async def _watched(raw):
    return await raw.fetchval("SELECT count(*) FROM dl_process_tasks WHERE watched")
