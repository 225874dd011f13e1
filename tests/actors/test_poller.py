"""The poll finds ready jobs without notifications, with one statement; an idle process sends no other."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
from conditions import patience_s, until, when_ended
from proxy import open_proxy

from dataloader import Tasks
from dataloader.actors import dispatcher
from dataloader.actors.dispatcher import UNPOLLED
from dataloader.jobs.contract import Change
from dataloader.jobs.schedules import Schedule
from dataloader.store.queue import lock_session
from dataloader.store.queue import poll as polls

pytestmark = pytest.mark.slow

POLL_S = 0.25
QUICK_POLL_S = 0.05


@pytest.fixture
def deaf(monkeypatch):
    """Drop all notifications to this process."""
    monkeypatch.setattr("dataloader.actors.listener.Listener._deliver", lambda *_: None)


def limited_tasks():
    tasks = Tasks()

    @tasks.task("plain")
    async def plain(job):
        """Do nothing."""

    @tasks.task("limited", max_running=3)
    async def limited(job):
        """Do nothing."""

    @tasks.task("other", max_running=1)
    async def other(job):
        """Do nothing; no job runs this."""

    return tasks


async def test_an_idle_process_sends_one_statement_a_poll_for_all_its_queues_and_lanes(
    open_worker, resting, sent, monkeypatch
):
    # A late poll on a busy machine would be replaced by claims, and each poll delays these.
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
    # A process sends its other statements once, in its first seconds.
    assert times.most_common(1)[0][0] == polls._POLL


@pytest.mark.requirement("Q6", "R7", "S1")
async def test_without_notifications_the_poll_finds_all_kinds_of_ready_jobs(open_worker, settled, deaf, raw):
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
        # Left by another process that was killed between two batches.
        waiting = await raw.fetchval("SELECT dl_enqueue('plain', queue => 'nobody')")
        act = await supervisor.bulk.start(Change(action="cancel"), [waiting])

        async def state():
            return (await supervisor.bulk.get(act.bulk_id)).state

        await until(state, lambda state: state == "done")


@pytest.mark.requirement("S1")
async def test_without_notifications_the_poll_finds_that_a_task_has_limits_now(open_worker, settled, deaf, raw):
    async with open_worker(limited_tasks(), {"a": 2}, poll_s=POLL_S) as supervisor:
        await settled(supervisor)
        await supervisor.limits.set_tasks({"plain": {"max_running": 1}})
        job_id = await raw.fetchval("SELECT dl_enqueue('plain', queue => 'a')")
        assert (await when_ended(supervisor, job_id, within_s=patience_s())).status == "succeeded"


@pytest.mark.requirement("S1", "S4")
async def test_without_notifications_the_poll_finds_changed_limits_and_removed_tasks(open_worker, settled, deaf):
    async with open_worker(limited_tasks(), {"a": 2}, poll_s=POLL_S) as supervisor:
        await settled(supervisor)
        signals, limits = supervisor.signals, supervisor.limits
        # One change after the other: the first poll of a process notifies in any case.
        for delay_s in (5.0, 7.0):
            await limits.set_tasks({"plain": {"retry_delay_s": delay_s}})
            await signals.retry_delays.wait_until(lambda found, delay_s=delay_s: found == {"plain": delay_s})
        assert signals.period_ends.last == ()
        await limits.set_tasks({"plain": {"work_periods": "DAILY 00:00-24:00", "at_period_end": "stop"}})
        await signals.period_ends.wait_until(lambda tasks: tasks == ("plain",))
        assert "other" in signals.known_tasks.last.tasks
        await limits.remove_task("other", jobs="keep")
        await signals.known_tasks.wait_until(lambda known: "other" not in known.tasks)


async def test_a_queue_whose_poller_has_no_answer_claims_by_itself(open_worker, resting, deaf, raw, database):
    async with (
        open_proxy(database.dsn) as proxy,
        open_worker(limited_tasks(), {"a": 2}, dsn=proxy.dsn, poll_s=POLL_S / UNPOLLED) as supervisor,
    ):
        await resting(supervisor)
        proxy.freeze("pool")
        for number, task in enumerate(("plain", "limited"), 1):
            job_id = await raw.fetchval("SELECT dl_enqueue($1, queue => 'a')", task)
            assert (await supervisor.signals.recorded.wait(number)).job_id == job_id
            assert await raw.fetchval("SELECT status::text FROM dl_jobs WHERE job_id = $1", job_id) == "succeeded"
