"""Handlers that do not stop, and end their process (Q8)."""

from __future__ import annotations

import pytest
import trio
from conditions import patience_s
from logged import capture_logs
from proxy import open_proxy

from dataloader import Tasks
from dataloader.actors.job_runs import Run, Runs, StopReason
from dataloader.actors.lease import Lease
from dataloader.actors.overdue import OverdueWatch
from dataloader.jobs.ids import uuid7
from dataloader.jobs.model import ClaimedJob

LEASE_S, GRACE_S = 60, 30


def a_run(token: int, lease_until: float) -> Run:
    """Return a run of a job with a key."""
    job = ClaimedJob(
        job_id=uuid7(), token=token, queue="q", task="t", args="{}", lock_key="k", lock_hash=1, partition_key="",
        attempt=1, max_attempts=5, lease_s=LEASE_S,
    )  # fmt: skip
    return Run(job=job, lease=Lease(LEASE_S, lease_until), claimed_at=0)


@pytest.mark.requirement("Q7", "Q8")
@pytest.mark.parametrize(
    ("committed", "why", "ends_the_process"),
    [
        (False, StopReason.LEASE_ENDED, True),
        (False, StopReason.KEY_LOST, True),
        (True, StopReason.CANCEL, False),
        (True, StopReason.LEASE_ENDED, False),
        (True, StopReason.KEY_LOST, True),
    ],
)
async def test_one_whose_job_or_key_may_be_another_s_does(autojump_clock, committed, why, ends_the_process):
    runs, told, run = Runs(), [], a_run(1, trio.current_time() - 1)
    runs.add(run)
    if committed:
        run.shield_commit()
        run.commit_ended(well=True)
    run.stop(why)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(OverdueWatch(runs=runs, look_s=10, cancel_grace_s=3, unstoppable=told.append).run)
        await trio.sleep(3)
        assert told == []
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert told == [run] * ends_the_process


@pytest.mark.requirement("Q8")
async def test_a_blocked_loop_reports_each_run_once_when_its_lease_must_be_over(autojump_clock):
    runs, told = Runs(), []
    watch = OverdueWatch(runs=runs, look_s=10, cancel_grace_s=3, unstoppable=told.append)
    first, second, ended = [a_run(token, LEASE_S) for token in (1, 2, 3)]
    for run in (ended, first, second):
        runs.add(run)
    ended.body_ended = True
    watch.loop_blocked(LEASE_S + 3)
    assert told == []
    for _ in range(3):
        watch.loop_blocked(LEASE_S + 3.1)
    assert told == [first, second]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        await trio.sleep(2 * LEASE_S)
        nursery.cancel_scope.cancel()
    assert told == [first, second]


@pytest.mark.requirement("Q8")
@pytest.mark.parametrize(("seen_from", "given_up_at"), [(0, LEASE_S), (LEASE_S - 2, LEASE_S - 1 + GRACE_S)])
async def test_only_a_process_that_was_suspended_gets_a_grace_after_its_lease(autojump_clock, seen_from, given_up_at):
    runs, told, began = Runs(), [], trio.current_time()
    runs.add(a_run(1, began + LEASE_S))
    watch = OverdueWatch(
        runs=runs, look_s=10, cancel_grace_s=GRACE_S, unstoppable=lambda _run: told.append(trio.current_time() - began)
    )
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            await trio.sleep(seen_from)
            nursery.start_soon(watch.run)
            await trio.sleep(2 * LEASE_S)
            nursery.cancel_scope.cancel()
    assert told == [pytest.approx(given_up_at)]
    assert [line["event"] for line in lines] == ["a handler does not stop; it keeps its key and lease until it returns"]


@pytest.mark.requirement("Q8")
async def test_the_time_in_which_a_process_was_suspended_is_no_grace(autojump_clock):
    """The process is suspended after its handler was stopped, and resumes after the end of the lease."""
    runs, told, run = Runs(), [], a_run(1, trio.current_time() + LEASE_S)
    runs.add(run)
    run.stop(StopReason.CANCEL)
    watch = OverdueWatch(
        runs=runs, look_s=10, cancel_grace_s=GRACE_S, unstoppable=lambda _run: told.append(trio.current_time())
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        await trio.sleep(GRACE_S / 2 - 0.5)
        autojump_clock.jump(2 * LEASE_S)
        resumed_at = trio.current_time()
        await trio.sleep(LEASE_S)
        nursery.cancel_scope.cancel()
    assert told == [pytest.approx(resumed_at + GRACE_S / 2, abs=1)]


@pytest.mark.slow
@pytest.mark.requirement("Q7", "Q12")
async def test_a_handler_that_runs_after_its_commit_is_stopped_when_its_key_is_at_risk(open_worker, database):
    tasks, started, is_cut_off, ended = Tasks(), trio.Event(), trio.Event(), trio.Event()

    @tasks.task("t")
    async def handler(job):
        started.set()
        await is_cut_off.wait()
        async with job.transaction():
            pass
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async with (
        open_proxy(database.dsn) as direct,
        open_worker(tasks, direct_dsn=direct.dsn, default_lease_s=5, heartbeat_s=1) as supervisor,
    ):
        await supervisor.jobs.enqueue("t", queue="q", lock_key="k")
        with trio.fail_after(patience_s()):
            await started.wait()
            direct.freeze("locks")
            is_cut_off.set()
            await ended.wait()
        direct.thaw()
