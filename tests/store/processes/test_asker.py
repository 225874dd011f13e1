"""Calls and starts that arrive singly are sent together; no caller waits for another's lock or gets its answer."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from conditions import patience_s
from databases import raw_connection
from performers import performer_of

from dataloader.jobs.client.processes import ProcessClient
from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import IdempotencyConflict, StoreUnavailable, Unstorable
from dataloader.store.connection.gatherer import MAX_GROUP
from dataloader.store.processes.asker import Asker
from dataloader.store.processes.requests import Request, aio_ask

pytestmark = pytest.mark.requirement("P2")

BLOCK = "BEGIN; LOCK TABLE dl_process_tasks IN EXCLUSIVE MODE"
STATEMENTS = "SELECT count(DISTINCT xmin::text) FROM dl_process_tasks WHERE kind = 'call'"
CALLS = "SELECT args::int FROM dl_process_tasks WHERE kind = 'call' ORDER BY task_id"
RUNNING = "INSERT INTO dl_processes (type, process_id, status) SELECT 'pay', unnest($1::text[]), 'running'"
JOBS = """
SELECT (SELECT count(*) FROM dl_jobs WHERE queue = 'process.pay' AND status = 'queued' AND waits_for IS NULL),
       (SELECT count(*) FROM dl_processes p JOIN dl_jobs j USING (job_id) WHERE (j.args ->> 'key')::bigint = p.key)
"""


PATIENTLY = """
DO $$ DECLARE f regprocedure; BEGIN
  FOR f IN SELECT oid FROM pg_proc WHERE proname IN ('dl_process_request', 'dl_process_request_many') LOOP
    EXECUTE format('ALTER FUNCTION %s SET lock_timeout = %L', f, '60s');
  END LOOP;
END $$
"""
"""Long lock timeout: on a slow machine, too, a caller waits for a lock until the test releases it."""


def call(process_id, args=1, **fields):
    return Request(type="pay", process_id=process_id, kind="call", method="m", args=args, **fields)


def start(process_id, **fields):
    return Request(type="pay", process_id=process_id, kind="init", **fields)


@pytest.fixture
def asker(store):
    return Asker(store, 60)


@pytest.fixture
async def gathered(asker, raw, until_blocked):
    """Return a function that sends the first request, and, while it waits, the others from separate callers.

    It returns the answers.
    """

    async def ask_all(first, *others, block=BLOCK):
        answers = [None] * (1 + len(others))

        async def one(place, request):
            try:
                answers[place] = await asker.ask(request)
            except Unstorable as error:
                answers[place] = error

        await raw.execute(block)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, 0, first)
            await until_blocked()
            for place, request in enumerate(others, 1):
                nursery.start_soon(one, place, request)
                await trio.testing.wait_all_tasks_blocked()
            await raw.execute("COMMIT")
        return answers

    return ask_all


async def test_calls_that_come_during_a_statement_are_asked_for_by_the_next_in_their_order(raw, gathered):
    names = [f"p{number}" for number in range(20)]
    await raw.execute(RUNNING, names)
    answers = await gathered(*(call(names[number % 20], number) for number in range(40)))
    assert {answer.verdict for answer in answers} == {"added"}
    assert await raw.fetchval(STATEMENTS) == 2
    assert [row[0] for row in await raw.fetch(CALLS)] == list(range(40))
    assert [answer.task_id for answer in answers] == sorted(answer.task_id for answer in answers)
    assert tuple(await raw.fetchrow(JOBS)) == (20, 20)


async def test_a_group_has_its_bound(raw, gathered):
    await raw.execute(RUNNING, ["p"])
    await gathered(*(call("p", number) for number in range(MAX_GROUP + 11)))
    assert await raw.fetchval(STATEMENTS) == 3


async def test_each_of_a_group_has_its_own_answer(raw, asker, gathered):
    await raw.execute(RUNNING, ["p", "q"])
    await raw.execute("UPDATE dl_processes SET status = 'error' WHERE process_id = 'q'")
    known = await asker.ask(call("p", key="known"))
    answers = await gathered(
        call("p"), call("p", key="known"), call("p", 2, key="known"), call("q"), call("nobody"), start("p"),
        start("new"), start("new"), call("p", key="twice"), call("p", key="twice"), start("not", key="twice"),
        call("made", may_start=True, start=7),
    )  # fmt: skip
    assert [answer.verdict for answer in answers] == [
        "added", "again", "conflict", "status", "missing", "exists",
        "added", "exists", "added", "again", "conflict",
        "added",
    ]  # fmt: skip
    assert answers[1].task_id == answers[2].task_id == known.task_id
    assert (answers[3].status, answers[5].status) == ("error", "running")
    assert answers[8].task_id == answers[9].task_id
    rows = await raw.fetch("SELECT process_id, status, job_id IS NOT NULL FROM dl_processes ORDER BY process_id")
    assert [tuple(row) for row in rows] == [
        ("made", "init", True), ("new", "init", True), ("p", "running", True), ("q", "error", False),
    ]  # fmt: skip
    assert tuple(await raw.fetchrow(JOBS)) == (3, 3)


async def test_one_that_can_not_be_stored_spoils_no_other_of_its_group(raw, gathered):
    await raw.execute(RUNNING, ["p", "q"])
    await raw.execute("ALTER TABLE dl_process_tasks ADD CONSTRAINT no_bad_ones CHECK (args <> '0')")
    first, good, bad, other = await gathered(call("p"), call("p", 2), call("p", 0), call("q", 3))
    assert (first.verdict, good.verdict, other.verdict) == ("added", "added", "added")
    assert isinstance(bad, Unstorable)


async def test_a_call_of_a_locked_process_waits_only_with_others_of_that_process(raw, asker, database):
    await raw.execute(RUNNING, ["locked", "free"])
    await raw.execute(PATIENTLY)
    answers = []

    async def one(number):
        answers.append(await asker.ask(call("locked", number)))

    async with raw_connection(database.dsn) as other, trio.open_nursery() as nursery:
        await other.execute("BEGIN; SELECT FROM dl_processes WHERE process_id = 'locked' FOR UPDATE")
        for number in range(20):
            nursery.start_soon(one, number)
        with trio.fail_after(patience_s()):
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert (await asker.ask(call("free"))).verdict == "added"
        assert not answers
        await other.execute("COMMIT")
    assert [answer.verdict for answer in answers] == ["added"] * 20
    # The call of the free process, the first waiting call, and the others.
    assert await raw.fetchval(STATEMENTS) == 3
    assert not asker._of_process


async def test_a_call_readies_the_job_of_a_sleeping_process_and_replaces_an_ended_one(raw, asker, gathered):
    await raw.execute(RUNNING, ["asleep", "ended", "stopped"])
    for name in ("asleep", "ended", "stopped"):
        await asker.ask(call(name))
    await raw.execute(
        "UPDATE dl_jobs SET available_at = now() + interval '1 h', waits_for = 'time'"
        " WHERE args ->> 'process_id' = 'asleep';"
        "UPDATE dl_jobs SET status = 'canceled', finished_at = now()"
        " WHERE args ->> 'process_id' IN ('ended', 'stopped');"
        "UPDATE dl_processes SET running_task = 1 WHERE process_id = 'stopped'"
    )
    await gathered(call("asleep"), call("asleep"), call("ended"), call("ended"), call("stopped"))
    assert tuple(await raw.fetchrow(JOBS)) == (3, 3)
    crashes = await raw.fetch("SELECT crashes > 1000 FROM dl_processes ORDER BY process_id")
    assert [row[0] for row in crashes] == [False, False, True]


async def test_starts_of_many_with_keys_in_opposite_orders_do_not_wait_for_each_other(store, raw, until_blocked):
    await raw.execute(PATIENTLY)

    def processes():
        return ProcessClient(performer_of(store, Operator("me")))

    async def refused(requests):
        with pytest.raises(IdempotencyConflict):
            await processes().start_many(requests)

    async with trio.open_nursery() as nursery:
        # The first has begun `a`, and cannot begin `b`; if it had its key already, the second could not continue.
        await raw.execute("BEGIN")
        await raw.run(aio_ask, start("b"), 60)
        nursery.start_soon(refused, [start("a", key="two"), start("b", key="one")])
        await until_blocked()
        with trio.fail_after(patience_s()):
            await processes().start_many([start("c", key="one"), start("d", key="two")])
        await raw.execute("ROLLBACK")
    names = await raw.fetch("SELECT process_id FROM dl_processes ORDER BY process_id")
    assert [row[0] for row in names] == ["c", "d"]


async def test_the_callers_of_a_group_learn_that_the_database_is_away(raw, asker, until_blocked):
    await raw.execute(RUNNING, ["p"])
    await raw.execute(PATIENTLY)
    errors = []

    async def one():
        with pytest.raises(StoreUnavailable) as error:
            await asker.ask(call("p"))
        errors.append(error)

    async def cut():
        await until_blocked()
        await raw.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE NOT granted")

    await raw.execute(BLOCK)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        await until_blocked()
        for _ in range(3):
            nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        await cut()
        while len(errors) < 1:  # noqa: ASYNC110 - it has no event
            await trio.sleep(0.01)
        await cut()
    await raw.execute("ROLLBACK")
    assert len(errors) == 4
    assert (await asker.ask(call("p"))).verdict == "added"
    assert await raw.fetchval("SELECT count(*) FROM dl_process_tasks") == 1
