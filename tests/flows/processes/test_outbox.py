"""Deliveries of processes: events to sinks, at least once and in order; messages to other processes, once (P9, P10)."""

from __future__ import annotations

import pytest
from conditions import until
from quick_processes import again_soon

from dataloader import (
    HeldFilter,
    ProcessFailed,
    ProcessFilter,
    Refused,
    Settings,
    Sink,
    Tasks,
    Worker,
    open_supervisor,
)
from dataloader.flows.processes import (
    Delivery,
    Done,
    Fail,
    Process,
    Processes,
    Refuse,
    add_processes,
)

pytestmark = pytest.mark.requirement("P9")


def counters():
    """Return counters: each addition is an event; `pass` sends the counter's value to another one."""
    processes = Processes()
    kind = processes.define("counter", state=int)

    @kind.init
    async def begin(_p: Process[int], value: int = 0) -> Done:
        return Done(state=value, events=[f"began with {value}"])

    @kind.call
    async def add(p: Process[int], number: int) -> Done | Refuse | Fail:
        if number == 0:
            return Refuse("nothing to add")
        if number < 0:
            return Fail("password=sesame is negative")
        return Done(p.state + number, state=p.state + number, events=[number])

    @kind.call
    async def tell(p: Process[int], ids: list[str]) -> Done:
        for process_id in ids:
            p.call(kind, process_id, "add", 1, start=0)
        return Done(len(ids))

    @kind.call
    async def spread(p: Process[int], ids: list[str]) -> Done | Refuse:
        for process_id in ids:
            p.start("counter", process_id, 7, metadata={"from": p.process_id})
        return Done() if ids else Refuse("to whom?")

    @kind.repair
    async def mend(_p: Process[int]) -> Done:
        return Done(state=0)

    return processes


def settings(database, *sinks, **more):
    return Settings(db_dsn=database.dsn, workers=(Worker("process.counter", 4),), sinks=sinks, **more)


async def emptied(database):
    async def rows():
        return database.psql("SELECT count(*) FROM dl_process_outbox")

    await until(rows, lambda found: found == "0", within_s=20)


@pytest.mark.slow
async def test_a_sink_receives_events_and_changes_in_order_and_leaves_no_rows(database):
    processes, told = counters(), []

    @processes.sink("books")
    async def book(delivery: Delivery) -> None:
        told.append(delivery)

    tasks = Tasks()
    add_processes(tasks, processes)
    async with open_supervisor(settings(database, Sink(name="books")), tasks) as supervisor:
        ask = supervisor.processes
        await ask.start("counter", "a", 5)
        for number in (1, 2, 3):
            await ask.call("counter", "a", "add", number)
        with pytest.raises(Exception, match="nothing to add"):
            await ask.call("counter", "a", "add", 0)
        with pytest.raises(Exception, match="is negative"):
            await ask.call("counter", "a", "add", -1)
        await ask.repair("counter", "a")
        await ask.remove("counter", "a")
        await emptied(database)

        async def jobs():
            return database.psql("SELECT count(*) FROM dl_jobs WHERE queue = 'deliveries'")

        await until(jobs, lambda found: found == "0")
    assert [(one.kind, one.event_id, one.payload) for one in told] == [
        ("created", None, None), ("event", 1, "began with 5"), ("event", 2, 1), ("event", 3, 2), ("event", 4, 3),
        ("failed", None, None), ("repaired", None, None), ("removed", None, None),
    ]  # fmt: skip
    assert {(one.sink, one.type, one.process_id) for one in told} == {("books", "counter", "a")}
    assert len({one.key for one in told}) == len(told)
    assert told[5].reason is not None
    assert "sesame" not in told[5].reason


@pytest.mark.slow
async def test_nothing_is_stored_without_a_sink_and_a_sink_gets_only_its_kinds(database):
    processes, told = counters(), []
    processes.define("other", state=int)

    @processes.sink("some")
    async def some(delivery: Delivery) -> None:
        told.append((delivery.kind, delivery.process_id))

    tasks = Tasks()
    add_processes(tasks, processes)
    async with open_supervisor(settings(database), tasks) as supervisor:
        await supervisor.processes.start("counter", "before", 1)
        assert database.psql("SELECT count(*), max(id) FROM dl_process_outbox") == "0|"
    sinks = Sink(name="some", kinds=("removed",), types=("counter",)), Sink(name="none", types=("other",))
    async with open_supervisor(settings(database, *sinks), tasks) as supervisor:
        await supervisor.processes.start("counter", "a", 1)
        await supervisor.processes.remove("counter", "a")
        await emptied(database)
    assert told == [("removed", "a")]


@pytest.mark.slow
async def test_a_failed_delivery_blocks_only_its_process_until_it_is_held_and_released(database):
    processes, told, broken = counters(), [], ["a"]

    @processes.sink("books")
    async def book(delivery: Delivery) -> None:
        if delivery.process_id in broken and delivery.payload == 1:
            raise ValueError("token=sesame is away")
        told.append((delivery.process_id, delivery.payload))

    tasks = Tasks()
    add_processes(tasks, processes)
    sink = Sink(name="books", kinds=("event",), max_tries=3)
    async with open_supervisor(settings(database, sink), again_soon(tasks)) as supervisor:
        ask = supervisor.processes
        for process_id in "ab":
            await ask.start("counter", process_id, 0)
            for number in (1, 2):
                await ask.call("counter", process_id, "add", number)

        async def held():
            return database.psql("SELECT tries, next_at IS NULL, error FROM dl_process_holdups")

        assert await until(held, lambda found: found.startswith("3|t")) == "3|t|ValueError: token=*** is away"
        await ask.call("counter", "a", "add", 9)

        async def waiting():
            return database.psql("SELECT count(*) FILTER (WHERE held_up), count(*) FROM dl_process_outbox")

        await until(waiting, lambda found: found == "3|3")
        assert [one for one in told if one[0] == "b"] == [("b", "began with 0"), ("b", 1), ("b", 2)]
        broken.clear()
        page = await ask.deliveries()
        assert [(one.sink, one.process_id, one.kind, one.event_id, one.tries) for one in page.deliveries] == [
            ("books", "a", "event", 2, 3)
        ]
        assert await ask.release(HeldFilter(sink="books")) == 1
        await emptied(database)
        assert [one for one in told if one[0] == "a"] == [("a", "began with 0"), ("a", 1), ("a", 2), ("a", 9)]
        assert database.psql("SELECT count(*) FROM dl_process_holdups") == "0"
        assert database.psql("SELECT action FROM dl_audit") == "release_deliveries"


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.slow
async def test_an_error_that_can_not_say_what_it_is_fails_its_delivery_and_its_step_alone(database):
    processes, tries = counters(), []
    kind = processes.define("odd", state=int)

    @kind.init
    async def begin(_p: Process[int]) -> Done:
        raise UnspeakableError

    @processes.sink("books")
    async def book(delivery: Delivery) -> None:
        tries.append(delivery.process_id)
        if tries.count("a") == 1:
            raise UnspeakableError

    tasks = Tasks()
    add_processes(tasks, processes)
    sink = Sink(name="books", kinds=("created",), max_tries=1)
    workers = (Worker("process.counter", 4), Worker("process.odd", 4))
    ready = Settings(db_dsn=database.dsn, workers=workers, sinks=(sink,))
    async with open_supervisor(ready, again_soon(tasks)) as supervisor:
        with pytest.raises(ProcessFailed, match=r"UnspeakableError: \(its text is not available\)"):
            await supervisor.processes.start("odd", "o")
        await supervisor.processes.start("counter", "a", 0)

        async def held():
            return [one.error for one in (await supervisor.processes.deliveries()).deliveries]

        await until(held, lambda found: found == ["UnspeakableError: (its text is not available)"])
        assert await supervisor.processes.release(HeldFilter(sink="books")) == 1
        await emptied(database)
    assert tries == ["a", "a"]


async def test_a_bulk_resume_of_processes_is_delivered_immediately(database):
    processes, told = counters(), []

    @processes.sink("books")
    async def book(delivery: Delivery) -> None:
        told.append((delivery.kind, delivery.process_id))

    tasks = Tasks()
    add_processes(tasks, processes)
    sink = Sink(name="books", kinds=("repaired",))
    async with open_supervisor(settings(database, sink), tasks) as supervisor:
        # From its next poll on, it delivers only what it was notified of.
        poster = supervisor._parts.helpers["outbox"].__self__
        poster.poll_s = 3_600
        poster.wake.set()
        for process_id in "ab":
            await supervisor.processes.start("counter", process_id, 1)
            with pytest.raises(ProcessFailed):
                await supervisor.processes.call("counter", process_id, "add", -1)
        assert await supervisor.processes.resume_many(ProcessFilter(type="counter")) == 2
        await emptied(database)
    assert sorted(told) == [("repaired", "a"), ("repaired", "b")]


@pytest.mark.slow
@pytest.mark.requirement("P10")
async def test_messages_of_a_finished_step_reach_other_processes_once_and_in_order(database):
    tasks = Tasks()
    add_processes(tasks, counters())
    async with open_supervisor(settings(database), tasks) as supervisor:
        ask = supervisor.processes
        await ask.start("counter", "a", 1)
        assert await ask.call("counter", "a", "spread", ["x", "y", "a"]) is None
        with pytest.raises(Refused, match="to whom"):
            await ask.call("counter", "a", "spread", [])
        assert await ask.call("counter", "a", "tell", ["x", "z", "x"]) == 3
        await emptied(database)

        async def values():
            return database.psql(
                "SELECT string_agg(process_id || aux_state, ' ' ORDER BY process_id) FROM dl_processes"
            )

        await until(values, lambda found: found == "a1 x9 y7 z1")
        assert (await ask.get("counter", "x")).metadata == {"from": "a"}
        tried = (await ask.tasks("counter", "x")).tasks
        assert [task.kind for task in tried] == ["init", "call", "call"]
        assert all(task.idempotency_key.startswith("message:") for task in tried)


@pytest.mark.slow
@pytest.mark.requirement("P10")
async def test_a_message_to_a_missing_process_delays_only_its_sender(database):
    processes = counters()

    @processes.types["counter"].call
    async def poke(p: Process[int], process_id: str) -> Done:
        p.call("counter", process_id, "add", 1)
        return Done()

    tasks = Tasks()
    add_processes(tasks, processes)
    async with open_supervisor(settings(database), again_soon(tasks)) as supervisor:
        ask = supervisor.processes
        for process_id in "abc":
            await ask.start("counter", process_id, 0)
        await ask.call("counter", "a", "poke", "later")
        await ask.call("counter", "a", "poke", "c")
        await ask.call("counter", "b", "poke", "c")

        async def value():
            return database.psql("SELECT aux_state FROM dl_processes WHERE process_id = 'c'")

        await until(value, lambda found: found == "1")
        page = await ask.deliveries(HeldFilter(process_id="a"))
        assert [(one.sink, one.kind, one.error) for one in page.deliveries] == [
            ("messages", "call", "there is no process counter/later")
        ]
        await ask.start("counter", "later", 0)
        await until(value, lambda found: found == "2")
        await emptied(database)
        assert (await ask.deliveries()).deliveries == []


@pytest.mark.slow
async def test_a_stored_delivery_of_a_killed_process_is_made_by_the_next_one(database, raw):
    processes, told = counters(), []

    @processes.sink("books")
    async def book(delivery: Delivery) -> None:
        told.append(delivery.payload)

    tasks = Tasks()
    add_processes(tasks, processes)
    sink = Sink(name="books", kinds=("event",))
    async with open_supervisor(settings(database, sink), tasks) as supervisor:
        await supervisor.processes.start("counter", "a", 0)
        await emptied(database)
    # As left by a process that is killed between the commit and the rest: no job knows of it.
    await raw.execute(
        "INSERT INTO dl_process_outbox (sink, partition, key, task_id, event_id, kind)"
        " SELECT 'books', 3, key, 1, 1, 'event' FROM dl_processes"
    )
    async with open_supervisor(settings(database, sink), tasks):
        await emptied(database)
    assert told == ["began with 0"] * 2


@pytest.mark.slow
@pytest.mark.requirement("S6", "P6")
async def test_a_process_in_error_is_noted_only_while_a_notifier_runs(database):
    tasks = Tasks()
    add_processes(tasks, counters())
    noticed = "SELECT count(*), min(kind), min(name), min(error) FROM dl_notices"
    async with open_supervisor(settings(database), tasks) as supervisor:
        ask = supervisor.processes
        for process_id in "ab":
            await ask.start("counter", process_id, 1)
        with pytest.raises(ProcessFailed):
            await ask.call("counter", "a", "add", -1)
        assert database.psql(noticed) == "0|||"
        database.psql("INSERT INTO dl_notice_watch (until) VALUES (now() + interval '1 day')")
        with pytest.raises(ProcessFailed):
            await ask.call("counter", "b", "add", -1)
        await ask.repair("counter", "b")
    assert database.psql(noticed) == "1|process_failed|counter|password=sesame is negative"


def test_deliveries_of_an_abandoned_sink_do_not_delay_released_ones(database):
    database.psql(
        "INSERT INTO dl_process_partitions (sink, partition) VALUES ('abandoned', 0), ('books', 3);"
        "INSERT INTO dl_process_holdups (sink, key, partition, tries, next_at, error)"
        " SELECT 'abandoned', -n, 0, 1, now() - interval '1 h', 'away' FROM generate_series(1, 2000) AS n;"
        "INSERT INTO dl_process_holdups (sink, key, partition, tries, next_at, error)"
        " VALUES ('books', 1, 3, 0, now(), 'away')"
    )
    assert database.psql("SELECT dl_process_post(60)") == "2"
    assert database.psql("SELECT string_agg(task, ' ' ORDER BY task) FROM dl_jobs") == (
        "process.sink/abandoned process.sink/books"
    )
