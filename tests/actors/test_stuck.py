"""Which handlers that do not stop end their process (Q8)."""

from __future__ import annotations

import math

import pytest
import trio

from dataloader.actors.heartbeat import Heartbeat
from dataloader.actors.runs import Run, Runs, Why
from dataloader.jobs.ids import uuid7
from dataloader.jobs.model import ClaimedJob


@pytest.mark.requirement("Q7", "Q8")
@pytest.mark.parametrize(
    ("committed", "why", "ends_the_process"),
    [
        (False, Why.LEASE_ENDED, True),
        (False, Why.KEY_LOST, True),
        (True, Why.CANCEL, False),
        (True, Why.LEASE_ENDED, False),
        (True, Why.KEY_LOST, True),
    ],
)
async def test_one_whose_job_or_key_may_be_another_s_does(committed, why, ends_the_process):
    job = ClaimedJob(
        job_id=uuid7(), token=1, queue="q", task="t", args="{}", lock_key="k", lock_hash=1, partition_key="",
        attempt=1, max_attempts=5, lease_s=60,
    )  # fmt: skip
    runs, told = Runs(), []
    run = Run(job=job, lease_until=trio.current_time() - 1, claimed_at=0, committed=committed)
    runs.add(run)
    run.stop(why)
    run.overdue_since = -math.inf
    heartbeat = Heartbeat(
        session=None, locks=None, database=None, worker=None, runs=runs, telemetry=None, period_s=10,
        cancel_grace_s=1, unstoppable=told.append,
    )  # fmt: skip
    heartbeat._look_for_stuck()
    heartbeat._look_for_stuck()
    assert told == [run] * ends_the_process
