"""The recorder turns only when there is something to write."""

from __future__ import annotations

import math

import trio
import trio.testing
from prometheus_client import CollectorRegistry

from dataloader.actors.messages import Ended, Shown, Wake
from dataloader.actors.recorder import Recorder, open_channel
from dataloader.actors.runs import Run, Runs
from dataloader.jobs.ids import uuid7
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.telemetry import Telemetry


class Steps(trio.abc.Instrument):
    """Counts how often a task is run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += self.name in task.name


class Locks:
    def forget(self, token: int) -> None:
        """No key is held."""


def a_run() -> Run:
    job = ClaimedJob(
        job_id=uuid7(), token=7, queue="q", task="t", args="{}", lock_key="k", lock_hash=1, partition_key="", attempt=1,
        max_attempts=5, lease_s=60,
    )  # fmt: skip
    return Run(job=job, lease_until=math.inf, claimed_at=0)


async def test_it_rests_when_the_run_that_had_progress_to_be_shown_has_ended(mock_clock):
    runs, run = Runs(), a_run()
    runs.add(run)
    recorder = Recorder(
        session=None,
        locks=Locks(),
        runs=runs,
        telemetry=Telemetry(CollectorRegistry()),
        freed=lambda _queue, _slots: None,
        released=Wake(),
    )
    send, receive = open_channel(1)
    async with trio.open_nursery() as nursery:
        await nursery.start(recorder.run, receive)
        run.progress = "{}"
        send.send_nowait(Shown(run))
        send.send_nowait(Ended(run, None))
        await trio.testing.wait_all_tasks_blocked()
        assert not len(runs)
        mock_clock.jump(10)
        steps = Steps("Recorder.run")
        trio.lowlevel.add_instrument(steps)
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        trio.lowlevel.remove_instrument(steps)
        assert steps.count < 5
        nursery.cancel_scope.cancel()
