"""Processes under load while their workers are killed: callers get the answers of a single counter (P3, P4, P7).

Each call is recorded with its beginning and its answer. Then a search looks for an order of all of them, consistent
with the times, in which a counter gives these answers (Wing and Gong). A call with an error must have changed nothing.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict

import attrs
import pytest
import trio
from databases import raw_connection
from services import FAST, LEASE_S

from dataloader import Settings, StoreUnavailable, Tasks, Worker, open_supervisor
from dataloader.flows.processes import Done, Process, Processes, add_processes
from dataloader.jobs.processes import CallTimeout
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.processes.asker import Asker
from dataloader.store.processes.requests import Request, aio_act, aio_ask

SUMS = """
SELECT p.aux_state::int, sum(e.payload::int) FROM dl_processes p LEFT JOIN dl_process_events e USING (key)
GROUP BY p.key
"""
# Empty in every snapshot: each waiting request has a job that will process it.
FORGOTTEN = """
SELECT p.type, p.process_id, t.task_id, j.status, j.waits_for
FROM dl_process_tasks t JOIN dl_processes p USING (key) LEFT JOIN dl_jobs j ON j.job_id = p.job_id
WHERE t.status = 'waiting' AND p.removed_at IS NULL
  AND (j.status IN ('queued', 'running') AND j.waits_for IS NULL) IS NOT TRUE
"""
CLIENTS, CALLS, KILLS = 8, 12, 3
ANSWER = "SELECT status, response, error FROM dl_process_tasks WHERE task_id = $1 AND status <> 'waiting'"


@attrs.frozen
class Call:
    """Request of a client, its time, and the answer."""

    method: str
    args: object
    began: float
    ended: float
    answer: object

    def on(self, value):
        """Return the counter's value after it; None if the counter would have answered otherwise."""
        match self.method:
            case "add":
                return value + self.args if self.answer == value + self.args else None
            case "read":
                return value if self.answer == value else None
            case _:
                fits = value == self.args["old"]
                return (self.args["new"] if fits else value) if self.answer == fits else None


def is_linear(calls):
    """Return whether a counter that begins at 0 can have given these answers."""
    seen, stack = set(), [(frozenset(range(len(calls))), 0)]
    while stack:
        left, value = stack.pop()
        if not left:
            return True
        if (left, value) in seen:
            continue
        seen.add((left, value))
        first_end = min(calls[n].ended for n in left)
        can = [n for n in left if calls[n].began <= first_end]
        stack += [(left - {n}, after) for n in can if (after := calls[n].on(value)) is not None]
    return False


@attrs.define(eq=False)
class Client:
    """Sends requests to random counters until each has an answer: by `asker`, or singly."""

    raw: object
    asker: Asker | None
    dice: random.Random
    number: int
    over: trio.Event
    asked: int = 0
    history: dict = attrs.field(factory=lambda: defaultdict(list))
    errors: int = 0

    async def run(self):
        for turn in itertools.count():
            if self.over.is_set() and turn >= CALLS:
                return
            # Sometimes immediately: at the same moment as the end of a run.
            await trio.sleep(self.dice.random() * self.dice.choice([0, 0.2]))
            self.asked += 1
            kind, counter = ("again", "fragile")[turn % 2], f"c{self.dice.randrange(2)}"
            method, args = self.dice.choice([("add", 1 + self.dice.randrange(3)), ("read", None), ("swap", None)])
            if method == "swap":
                args = {"old": (old := self.dice.randrange(12)), "new": old + 5}
            began = trio.current_time()
            asked = await self._ask(kind, counter, method, args, f"{self.number} {turn}")
            status, response, _ = await self._answer(asked.task_id)
            if status == "finished":
                call = Call(method, args, began, trio.current_time(), json.loads(response))
                self.history[kind, counter].append(call)
            else:
                assert kind == "fragile", "a step of a process that is to go on has failed"
                self.errors += 1

    async def _ask(self, kind, counter, method, args, key):
        request = Request(type=kind, process_id=counter, kind="call", method=method, args=args, key=key)
        while (asked := await self._once(request)).verdict != "added":
            assert asked.verdict == "status"
            await self.raw.run(aio_act, kind, counter, "resume", LEASE_S)
            await trio.sleep(0.02)
        return asked

    async def _once(self, request):
        return await (self.raw.run(aio_ask, request, LEASE_S) if self.asker is None else self.asker.ask(request))

    async def _answer(self, task_id):
        while (row := await self.raw.fetchrow(ANSWER, task_id)) is None:  # noqa: ASYNC110 - the database has no event
            await trio.sleep(0.01)
        return row


@pytest.mark.long
@pytest.mark.full
@pytest.mark.requirement("P3", "P4", "P7")
async def test_counters_whose_workers_are_killed_answer_as_if_there_was_one_counter(serve, database, raw):
    dice = random.Random(7)
    queues = {"process.again": 4, "process.fragile": 4}
    services = [await serve(queues, tasks="service_processes:tasks", **FAST) for _ in range(2)]
    for kind, counter in itertools.product(("again", "fragile"), ("c0", "c1")):
        await raw.run(aio_ask, Request(type=kind, process_id=counter, kind="init"), LEASE_S)
    while await raw.fetchval("SELECT count(*) FROM dl_processes WHERE status = 'init'"):  # noqa: ASYNC110
        await trio.sleep(0.02)

    async def kill():
        for _ in range(KILLS):
            await trio.sleep(0.3 + dice.random())
            while not await raw.fetchval("SELECT count(*) FROM dl_processes WHERE running_task IS NOT NULL"):  # noqa: ASYNC110
                await trio.sleep(0.001)
            services.pop(0).process.kill()
            services.append(await serve(queues, tasks="service_processes:tasks", **FAST))
        over.set()

    clients, over = [], trio.Event()
    with trio.fail_after(120):
        async with open_database(DatabaseOptions(dsn=database.dsn)) as store, trio.open_nursery() as watching:
            asker = Asker(store, LEASE_S)
            watching.start_soon(nobody_is_forgotten, database.dsn)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill)
                for number in range(CLIENTS):
                    nursery.start_soon(one_client, database.dsn, asker if number % 2 else None, number, over, clients)
            watching.cancel_scope.cancel()
    history = defaultdict(list)
    for client in clients:
        for key, calls in client.history.items():
            history[key] += calls
    asked, errors = sum(client.asked for client in clients), sum(client.errors for client in clients)
    assert sum(map(len, history.values())) + errors == asked
    for (kind, counter), calls in history.items():
        assert is_linear(calls), (kind, counter, calls)
    # The stored state equals the sum of the events: a killed step has left neither.
    assert all(state == (total or 0) for state, total in await raw.fetch(SUMS))
    assert not await raw.fetch("SELECT FROM dl_processes WHERE running_task IS NOT NULL OR job_id IS NOT NULL")
    assert not database.deadlocks()


async def nobody_is_forgotten(dsn):
    async with raw_connection(dsn) as raw:
        while True:
            assert not await raw.fetch(FORGOTTEN)
            await trio.sleep(0.002)


async def one_client(dsn, asker, number, over, clients):
    async with raw_connection(dsn) as raw:
        clients.append(Client(raw, asker, random.Random(number), number, over))
        await clients[-1].run()


def test_the_search_finds_an_order_and_knows_when_there_is_none():
    def add(began, ended, answer):
        return Call("add", 1, began, ended, answer)

    assert is_linear([add(0, 3, 2), add(1, 2, 1)])
    assert is_linear([add(0, 1, 1), Call("swap", {"old": 1, "new": 6}, 0, 9, answer=True), Call("read", None, 2, 3, 6)])
    assert not is_linear([add(0, 1, 2), add(2, 3, 1)])
    assert not is_linear([add(0, 3, 1), add(1, 2, 1)])
    assert not is_linear([add(0, 1, 1), Call("read", None, 2, 3, 0)])


def booking(tasks):
    """Define a type whose step writes a row and its outcome in one transaction, which takes a while."""
    processes = Processes()
    kind = processes.define("account", state=int)

    @kind.init
    async def begin(_p: Process[int]) -> Done:
        return Done(state=0)

    @kind.call
    async def book(p: Process[int]) -> Done:
        async with p.transaction() as t:
            await t.execute("INSERT INTO ledger VALUES ($1, $2)", p.process_id, p.step_key)
            await trio.sleep(0.1)
            t.done = Done(p.state + 1, state=p.state + 1, events=["booked"])
        return t.done

    add_processes(tasks, processes)
    return tasks


@pytest.mark.full
@pytest.mark.requirement("P7", "P13")
@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_f14_restarts_of_the_server_put_no_process_in_error_and_book_nothing_twice(own_server, mode):
    accounts, calls, restarts = 6, 12, 3
    await own_server.fetch("CREATE TABLE ledger (account text, step text)")
    settings = Settings(db_dsn=own_server.dsn, workers=(Worker("process.account", accounts),), connect_timeout_s=2)

    async def ask(supervisor, account):
        for number in range(calls):
            await insisted(supervisor, account, number)

    async def insisted(supervisor, account, number):
        while True:
            try:
                key = f"{account} {number}"
                answer = await supervisor.processes.call("account", account, "book", key=key, start=None, timeout_s=30)
            except (StoreUnavailable, CallTimeout):
                await trio.sleep(0.1)
            else:
                assert answer == number + 1
                return

    async def restart():
        for _ in range(restarts):
            await trio.sleep(1)
            await own_server.stop(mode)
            await trio.sleep(0.5)
            await own_server.start()

    async with open_supervisor(settings, booking(Tasks())) as supervisor:
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(restart)
                for number in range(accounts):
                    nursery.start_soon(ask, supervisor, f"a{number}")
        states = await own_server.fetch("SELECT status, aux_state::int AS state FROM dl_processes")
        assert [tuple(row) for row in states] == [("running", calls)] * accounts
        booked = "SELECT count(*) AS rows, count(DISTINCT (account, step)) AS steps FROM ledger"
        assert [tuple(row) for row in await own_server.fetch(booked)] == [(accounts * calls, accounts * calls)]
