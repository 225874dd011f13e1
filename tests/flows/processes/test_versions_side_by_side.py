"""Workers of two versions of a type run concurrently, and the older version can be restored (P11)."""

from __future__ import annotations

import attrs
import pytest
import trio
from conditions import until

from dataloader import Settings, Tasks, Worker, open_supervisor
from dataloader.flows.processes import Done, Process, Processes, Timer, add_processes
from dataloader.jobs.process_listings import ProcessFilter
from dataloader.jobs.processes import CallTimeout

pytestmark = pytest.mark.requirement("P11")

NEVER_S = 3_600
ANSWER_S = 30.0
IDLE = """
SELECT count(*) = 0 FROM pg_stat_activity
WHERE datname = current_database() AND query LIKE '%dl_process_move_some%' AND state <> 'idle'
  AND pid <> pg_backend_pid()
"""
UNSERVED = "UPDATE dl_process_types SET served_until = now() - interval '1 s' WHERE version = 2"


def counters(version):
    processes, tasks = Processes(), Tasks()
    kind = processes.define("counter", version=version)

    @kind.init
    async def begin(_p: Process) -> Done:
        return Done(version, state={"n": 0, "at": None})

    @kind.call
    async def add(p: Process) -> Done:
        return Done([version, p.state["n"] + 1], state=p.state | {"n": p.state["n"] + 1})

    @kind.call
    async def set_timer(p: Process) -> Done:
        return Done(next=Timer(after_s=0))

    @kind.timeout
    async def due(p: Process) -> Done:
        return Done(state=p.state | {"at": version})

    add_processes(tasks, processes)
    return tasks


@pytest.fixture
def serve(database):
    """Return a function that opens a worker of a version.

    Polls and sweeps are an hour apart, so everything is notified.
    """

    def serve(version, **changes):
        quiet = Settings(
            db_dsn=database.dsn, workers=(Worker("process.counter", 4),), poll_s=NEVER_S, claim_backoff_s=NEVER_S
        )
        return open_supervisor(attrs.evolve(quiet, **changes), counters(version))

    return serve


@pytest.mark.slow
async def test_calls_and_timers_never_wait_for_workers_of_another_version(serve):
    async with serve(1) as old:
        assert await old.processes.start("counter", "a", timeout_s=ANSWER_S) == 1
        async with serve(2) as new:
            assert await new.processes.start("counter", "b", timeout_s=ANSWER_S) == 2
            for number in range(1, 26):
                for asking, process_id, version in ((new, "a", 1), (old, "b", 2)):
                    answer = await asking.processes.call("counter", process_id, "add", timeout_s=ANSWER_S)
                    assert answer == [version, number]
            for process_id, version in (("a", 1), ("b", 2)):
                await old.processes.call("counter", process_id, "set_timer", timeout_s=ANSWER_S)

                async def ran(process_id=process_id):
                    return (await new.processes.get("counter", process_id)).state["at"]

                assert await until(ran) == version


@pytest.mark.slow
async def test_after_the_way_back_a_start_takes_the_version_that_is_served(serve, database):
    async with serve(1):
        pass
    async with serve(2) as new:
        assert await new.processes.start("counter", "a", timeout_s=ANSWER_S) == 2
    async with serve(1) as old:
        assert await old.processes.start("counter", "b", timeout_s=ANSWER_S) == 1
        # A process with a newer state waits for workers of its version.
        waiting = await old.processes.find(ProcessFilter(type="counter"))
        assert [(one.process_id, one.version) for one in waiting.processes] == [("b", 1), ("a", 2)]


@pytest.mark.slow
async def test_without_a_worker_a_start_takes_the_newest_declared_version(serve, raw):
    for version in (2, 1):
        async with serve(version):
            assert await raw.fetchval("SELECT dl_process_version('counter')") == version
    assert await raw.fetchval("SELECT dl_process_version('counter')") == 2
    assert await raw.fetchval("SELECT dl_process_version('never declared')") == 1


@pytest.mark.slow
@pytest.mark.parametrize("by", ["the sweep", "a call"])
async def test_an_init_process_moves_when_no_worker_serves_its_version(serve, raw, by):
    async with serve(2) as new:
        await new.jobs.pause("process.counter")
        with pytest.raises(CallTimeout):
            await new.processes.start("counter", "a", timeout_s=0.01)
    assert await raw.fetchval("SELECT version FROM dl_processes") == 2
    if by == "a call":
        # After the sweep at the start of a process: the next one is a minute away.
        await raw.execute("UPDATE dl_process_types SET served_until = 'infinity' WHERE version = 2")
    async with serve(1) as old:
        await old.jobs.resume("process.counter")
        if by == "a call":
            await until(lambda: raw.fetchval(IDLE))
            await raw.execute(UNSERVED)
            answer = await old.processes.call("counter", "a", "add", start={}, timeout_s=ANSWER_S)
            assert answer == [1, 1]
        with trio.fail_after(60):
            await until(lambda: raw.fetchval("SELECT status = 'running' FROM dl_processes"))
    assert await raw.fetchval("SELECT version FROM dl_processes") == 1


async def test_a_process_moves_from_a_version_that_only_older_workers_declared(serve, raw):
    """Such a program has written dl_tasks, and no row of dl_process_types."""
    async with serve(2) as new:
        await new.jobs.pause("process.counter")
        with pytest.raises(CallTimeout):
            await new.processes.start("counter", "a", timeout_s=0.01)
    await raw.execute("DELETE FROM dl_process_types; DELETE FROM dl_workers")
    await raw.execute("INSERT INTO dl_process_types VALUES ('counter', 1, now() + interval '1 h')")
    assert await raw.fetchval("SELECT dl_process_move_some(10)") == 1
    assert await raw.fetchval("SELECT version FROM dl_processes") == 1


async def test_an_init_process_stays_while_an_older_worker_serves_its_version(serve, raw):
    """Such a worker shows its tasks, and does not write dl_process_types."""
    async with serve(2) as new:
        await new.jobs.pause("process.counter")
        with pytest.raises(CallTimeout):
            await new.processes.start("counter", "a", timeout_s=0.01)
        await raw.execute(UNSERVED)
        await raw.execute("INSERT INTO dl_process_types VALUES ('counter', 1, now() + interval '1 h')")
        assert await raw.fetchval("SELECT dl_process_move_some(10)") == 0
        await raw.execute("DELETE FROM dl_workers")
        assert await raw.fetchval("SELECT dl_process_move_some(10)") == 1
        assert await raw.fetchval("SELECT task FROM dl_jobs") == "process.counter.v1"
