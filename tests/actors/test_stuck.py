"""Which handlers that do not stop end their process (Q8)."""

from __future__ import annotations

import math

import pytest
import trio
from proxy import open_proxy

from dataloader import Tasks
from dataloader.actors.heartbeat import Heartbeat
from dataloader.actors.job_runs import Run, Runs, StopReason
from dataloader.actors.lease import Lease
from dataloader.actors.outage import Outage
from dataloader.jobs.ids import uuid7
from dataloader.jobs.model import ClaimedJob


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
async def test_one_whose_job_or_key_may_be_another_s_does(committed, why, ends_the_process):
    job = ClaimedJob(
        job_id=uuid7(), token=1, queue="q", task="t", args="{}", lock_key="k", lock_hash=1, partition_key="",
        attempt=1, max_attempts=5, lease_s=60,
    )  # fmt: skip
    runs, told = Runs(), []
    run = Run(job=job, lease=Lease(job.lease_s, trio.current_time() - 1), claimed_at=0, committed=committed)
    runs.add(run)
    run.stop(why)
    run.overdue_since = -math.inf
    heartbeat = Heartbeat(
        session=None, locks=None, database=None, worker=None, runs=runs, outage=Outage(), telemetry=None, period_s=10,
        cancel_grace_s=1, unstoppable=told.append,
    )  # fmt: skip
    heartbeat._look_for_stuck()
    heartbeat._look_for_stuck()
    assert told == [run] * ends_the_process


@pytest.mark.slow
@pytest.mark.requirement("Q7", "Q12")
async def test_what_goes_on_after_its_transaction_is_stopped_when_its_key_may_be_given_away(open_worker, database):
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
        open_worker(tasks, lock_dsn=direct.dsn, default_lease_s=5, heartbeat_s=1) as supervisor,
    ):
        await supervisor.jobs.enqueue("t", queue="q", lock_key="k")
        with trio.fail_after(20):
            await started.wait()
            direct.freeze("locks")
            is_cut_off.set()
            await ended.wait()
        direct.thaw()
