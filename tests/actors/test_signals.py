"""Tests wait for signals of a supervisor: its actions, their numbers, and their values."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from conditions import until, when_ended

from dataloader import NewJob, Settings, Tasks, Worker, open_supervisor
from dataloader.store.queue.notifications import CancelRequested, QueueReady
from dataloader.testing import Claimed, KnownTasks, Recorded, Signal


@pytest.fixture
def signal():
    return Signal("done")


async def test_a_wait_ends_with_the_event_of_its_number_or_immediately_if_it_is_over(signal, autojump_clock):
    waited = []

    async def wait(count):
        waited.append((count, await signal.wait(count)))

    async with trio.open_nursery() as nursery:
        for count in (1, 2):
            nursery.start_soon(wait, count)
        await trio.testing.wait_all_tasks_blocked()
        signal.emit("a")
        await trio.testing.wait_all_tasks_blocked()
        assert waited == [(1, "a")]
        signal.emit("b")
    assert waited == [(1, "a"), (2, "b")]
    assert (signal.count, signal.last, signal.values) == (2, "b", ["a", "b"])
    assert (await signal.wait(), await signal.wait(2, timeout_s=0)) == ("a", "b")


async def test_a_wait_for_a_value_looks_at_the_newest_one_alone(signal, autojump_clock):
    for value in (1, 2):
        signal.emit(value)
    assert await signal.wait_until(lambda last: last == 2) == 2
    with pytest.raises(AssertionError):
        await signal.wait_until(lambda last: last == 1, timeout_s=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(signal.wait_until, lambda last: last == 3)
        await trio.testing.wait_all_tasks_blocked()
        signal.emit(3)


async def test_a_wait_in_vain_names_the_signal_and_what_has_happened(signal, autojump_clock):
    with pytest.raises(AssertionError, match=r"^signal 'done': 0 events in 60 s of waiting; 1 expected$"):
        await signal.wait()
    signal.emit("a")
    with pytest.raises(AssertionError, match=r"^signal 'done': 1 events in 5 s of waiting, the last one with 'a'; 2 "):
        await signal.wait(2, timeout_s=5)
    assert signal.last == "a"
    with pytest.raises(AssertionError, match=r"the last one with 'a'; no newest value was accepted$"):
        await signal.wait_until(lambda last: last == "b", timeout_s=5)


@pytest.mark.slow
async def test_a_supervisor_emits_signals_of_a_jobs_whole_life(open_worker, raw, row_of):
    tasks, release = Tasks(), trio.Event()

    @tasks.task("wait", queue="q")
    async def wait(job):
        await release.wait()

    async with open_worker(tasks, {"q": 2}, heartbeat_s=0.2) as supervisor:
        signals = supervisor.signals
        listening = await signals.listening.wait()
        await signals.heartbeat.wait_until(lambda began: began > listening)
        assert (await signals.known_tasks.wait()) == KnownTasks(queue="q", tasks=("wait",))
        await signals.resting.wait_until(lambda queues: queues == ("q",))
        assert (await signals.retry_delays.wait(), await signals.period_ends.wait()) == ({}, ())
        assert await signals.history_read.wait() == await raw.fetchval("SELECT id FROM dl_history")
        claims = signals.claimed.count
        assert {claim.jobs for claim in signals.claimed.values} == {()}

        [added, other, third] = await supervisor.jobs.enqueue_many([NewJob(task="wait") for _ in range(3)])
        claim = await signals.claimed.wait_until(lambda claim: claim.jobs)
        assert set(claim.jobs) <= {added.job_id, other.job_id, third.job_id}
        assert (claim.queue, claim.tasks, claim.lanes) == ("q", ("wait",), ())
        assert QueueReady("q") in signals.notified.values
        await until(lambda: running(supervisor), lambda number: number == 2)
        assert signals.resting.last == ()
        token = (await row_of(added.job_id))["token"]
        await supervisor.jobs.cancel(added.job_id)
        assert await signals.cancel_requested.wait() == added.job_id
        assert CancelRequested(token) in signals.notified.values
        assert await signals.recorded.wait() == Recorded(job_id=added.job_id, token=token)
        await signals.claimed.wait(claims + 2)
        release.set()
        await signals.recorded.wait(3)
        assert {end.job_id for end in signals.recorded.values} == {added.job_id, other.job_id, third.job_id}
        assert supervisor.state.queues["q"].running == 0
        await signals.resting.wait_until(lambda queues: queues == ("q",))
        assert await signals.keys_safe.wait() < await signals.keys_safe.wait(2)
        assert {type(claim) for claim in signals.claimed.values} == {Claimed}


async def running(supervisor):
    return supervisor.state.queues["q"].running


@pytest.mark.slow
async def test_a_supervisor_without_signals_runs_jobs(database):
    tasks = Tasks()

    @tasks.task("quick", queue="q")
    async def quick(job): ...

    settings = Settings(db_dsn=database.dsn, workers=(Worker("q", 1),), port=0)
    async with open_supervisor(settings, tasks) as supervisor:
        assert supervisor.signals is None
        job = await supervisor.jobs.enqueue("quick")
        assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
