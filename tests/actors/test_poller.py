"""What notifications fail to tell is found by one statement of the process, which is all that an idle one sends."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
from conditions import patience_s, until, when_ended

from dataloader import Tasks
from dataloader.actors import dispatcher, poller
from dataloader.actors.dispatcher import UNPOLLED
from dataloader.jobs.contract import Change
from dataloader.jobs.errors import StoreUnavailable
from dataloader.jobs.schedules import Schedule
from dataloader.store.connection import bridge
from dataloader.store.queue import lock_session
from dataloader.store.queue import poll as polls

POLL_S = 0.25
QUICK_POLL_S = 0.05


@pytest.fixture
def deaf(monkeypatch):
    """A process that hears no notification."""
    monkeypatch.setattr("dataloader.actors.listener.Listener._deliver", lambda *_: None)


@pytest.fixture
def sent(monkeypatch):
    """The statements that the process sends, on all its connections."""
    statements, connect = [], bridge.connect

    async def logged(*args, **options):
        connection = await connect(*args, **options)
        connection.add_query_logger(lambda query: statements.append(query.query))
        return connection

    monkeypatch.setattr(bridge, "connect", logged)
    return statements


def limited_tasks():
    tasks = Tasks()

    @tasks.task("plain")
    async def plain(job):
        """Does nothing."""

    @tasks.task("limited", max_running=3)
    async def limited(job):
        """Does nothing."""

    @tasks.task("other", max_running=1)
    async def other(job):
        """Nobody asks for it."""

    return tasks


@pytest.mark.slow
async def test_an_idle_process_sends_one_statement_a_poll_for_all_its_queues_and_lanes(
    open_worker, resting, sent, monkeypatch
):
    # A poll that came late on a busy machine would be made up for by claims; each poll that comes puts these off.
    monkeypatch.setattr(dispatcher, "UNPOLLED", 2 / QUICK_POLL_S)
    async with open_worker(limited_tasks(), {"a": 2, "b": 2, "c": 2}, poll_s=QUICK_POLL_S) as supervisor:
        await resting(supervisor)
        sent.clear()
        began = trio.current_time()

        async def counted():
            return Counter(sent)

        await until(counted, lambda found: found[polls._POLL] >= 20 and trio.current_time() - began > 2 * 1.2)
    times = Counter(sent)
    assert times[lock_session._CLAIM] == 0
    # What else a process does in its first seconds it does once.
    assert times.most_common(1)[0][0] == polls._POLL


@pytest.mark.slow
@pytest.mark.requirement("Q6", "R7", "S1")
async def test_without_notifications_the_poll_finds_what_is_ready_due_planned_to_be_judged_or_in_a_lane(
    open_worker, settled, deaf, raw
):
    async with open_worker(limited_tasks(), {"a": 2, "b": 2}, poll_s=POLL_S) as supervisor:
        await settled(supervisor)
        first = await raw.fetchval("SELECT dl_enqueue('plain', queue => 'a')")
        others = await raw.fetchrow(
            "SELECT dl_enqueue('plain', queue => 'b', after => ARRAY[$1::uuid]), dl_enqueue('limited', queue => 'a'),"
            " dl_enqueue('limited', queue => 'b'),"
            " dl_enqueue('plain', queue => 'a', available_at => now() + interval '0.3 s')",
            first,
        )
        for job_id in [first, *others]:
            assert (await when_ended(supervisor, job_id, within_s=patience_s())).status == "succeeded"
        await supervisor.schedules.put(Schedule(name="often", task="plain", every_s=1, job={"queue": "a"}))

        async def planned():
            return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE schedule = 'often' AND status = 'succeeded'")

        await until(planned)
        # As another process has left it that was killed between two batches.
        waiting = await raw.fetchval("SELECT dl_enqueue('plain', queue => 'nobody')")
        act = await supervisor.bulk.start(Change(action="cancel"), [waiting])

        async def state():
            return (await supervisor.bulk.get(act.bulk_id)).state

        await until(state, lambda state: state == "done")


@pytest.mark.slow
@pytest.mark.requirement("S1")
async def test_without_notifications_the_poll_finds_that_a_task_has_limits_now(open_worker, settled, deaf, raw):
    async with open_worker(limited_tasks(), {"a": 2}, poll_s=POLL_S) as supervisor:
        await settled(supervisor)
        await supervisor.limits.set_tasks({"plain": {"max_running": 1}})
        job_id = await raw.fetchval("SELECT dl_enqueue('plain', queue => 'a')")
        assert (await when_ended(supervisor, job_id, within_s=patience_s())).status == "succeeded"


@pytest.mark.requirement("S1", "S4")
async def test_without_notifications_the_poll_finds_other_retry_delays_and_periods_and_that_a_task_is_removed(
    open_worker, settled, deaf
):
    async with open_worker(limited_tasks(), {"a": 2}, poll_s=POLL_S) as supervisor:
        await settled(supervisor)
        parts, limits = supervisor._parts, supervisor.limits

        async def delays():
            return dict(parts.services.retry_delays)

        # One change after the other: the first poll of a process tells anyway.
        for delay_s in (5.0, 7.0):
            await limits.set_tasks({"plain": {"retry_delay_s": delay_s}})
            await until(delays, lambda found, delay_s=delay_s: found == {"plain": delay_s})
        assert parts.runs.period_end is None
        await limits.set_tasks({"plain": {"work_periods": "DAILY 00:00-24:00", "at_period_end": "stop"}})

        async def has_end():
            return parts.runs.period_end

        await until(has_end)
        [queue] = parts.dispatchers
        assert queue.knows("other")
        await limits.remove_task("other", jobs="keep")

        async def knows():
            return queue.knows("other")

        await until(knows, lambda known: not known)


@pytest.mark.slow
async def test_a_queue_whose_poller_has_no_answer_claims_by_itself(open_worker, settled, deaf, raw, monkeypatch):
    async def silent(*_):
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(poller, "poll", silent)
    async with open_worker(limited_tasks(), {"a": 2}, poll_s=POLL_S / UNPOLLED) as supervisor:
        await settled(supervisor)
        for task in ("plain", "limited"):
            job_id = await raw.fetchval("SELECT dl_enqueue($1, queue => 'a')", task)
            assert (await when_ended(supervisor, job_id, within_s=patience_s())).status == "succeeded"
