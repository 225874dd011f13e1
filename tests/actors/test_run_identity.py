"""Runs of one job differ by their tokens: another session queues a job again that runs here, or restores its row."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from conditions import until, when_ended
from logged import capture_logs

from dataloader import Tasks
from dataloader.actors.job_runs import Run, Runs
from dataloader.actors.lease import Lease
from dataloader.jobs.ids import uuid7
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import StopReason

pytestmark = pytest.mark.requirement("Q8")

REQUEUE = "UPDATE dl_jobs SET status = 'queued', lease_expires_at = NULL, available_at = now() WHERE job_id = $1"
"""Statement of the document's reaper, for one job."""
COPY = "CREATE TABLE backup AS SELECT * FROM dl_jobs"
RESTORE = """
TRUNCATE dl_jobs CASCADE;
INSERT INTO dl_jobs SELECT * FROM backup;
"""


@pytest.fixture
def desk():
    """Return a task whose first run stops slowly; `log` has the actions of its runs, in order."""

    class Desk:
        def __init__(self):
            self.tasks, self.log, self.started = Tasks(), [], trio.Event()
            self.may_stop = trio.Event()
            self.tasks.task("work")(self.work)

        async def work(self, _job):
            number = sum(what == "begins" for what, _ in self.log) + 1
            self.log.append(("begins", number))
            self.started.set()
            if number == 1:
                try:
                    await trio.sleep_forever()
                finally:
                    with trio.move_on_after(20, shield=True):
                        self.log.append(("is stopped", number))
                        await self.may_stop.wait()
            self.log.append(("ends", number))
            return number

    return Desk()


async def by_another_service(_supervisor, raw, job_id):
    await raw.execute(REQUEUE, job_id)


async def by_force(supervisor, raw, job_id):
    # An operator may do so after another session has set a lease without an end.
    await raw.execute(
        "UPDATE dl_jobs SET lease_expires_at = 'infinity', heartbeat_at = now() - interval '10 d' WHERE job_id = $1",
        job_id,
    )
    await supervisor.jobs.retry(job_id, force=True)


async def by_a_restore(_supervisor, raw, _job_id):
    await raw.execute(RESTORE)


@pytest.mark.slow
@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("queued", [by_another_service, by_force, by_a_restore])
async def test_a_job_claimed_again_here_starts_after_its_former_run_ended(open_worker, desk, raw, row_of, queued):
    with capture_logs() as logs:
        async with open_worker(desk.tasks, heartbeat_s=3_600, default_lease_s=86_400) as supervisor:
            job = await supervisor.jobs.enqueue("work", queue="q")
            with trio.fail_after(60):
                await desk.started.wait()
            if queued is by_a_restore:
                await raw.execute(f"{COPY} WHERE job_id = '{job.job_id}'")
                await raw.execute(
                    "UPDATE backup SET status = 'queued', token = 0, attempt = 0, claimed_by = NULL,"
                    " lease_expires_at = NULL, started_at = NULL, run_started_at = NULL, heartbeat_at = NULL"
                )
            former = (await row_of(job.job_id))["token"]
            await queued(supervisor, raw, job.job_id)
            row = await until(lambda: row_of(job.job_id), lambda row: row["token"] not in {0, former})
            assert (row["status"], row["claimed_by"]) == ("running", supervisor.worker)
            await until(_given(desk.log), lambda log: ("is stopped", 1) in log)
            # The new run is claimed, and its handler waits for the end of the former one.
            assert desk.log == [("begins", 1), ("is stopped", 1)]
            assert supervisor.state.queues["q"].running == 2
            assert supervisor.signals.recorded.count == 0
            desk.may_stop.set()
            ended = await when_ended(supervisor, job.job_id)
            assert (ended.status, ended.result) == ("succeeded", 2)
        assert desk.log == [("begins", 1), ("is stopped", 1), ("begins", 2), ("ends", 2)]
        recorded = [(end.job_id, end.token) for end in supervisor.signals.recorded.values]
        assert sorted(recorded) == sorted([(job.job_id, former), (job.job_id, row["token"])])
    assert [log["event"] for log in logs if log["log_level"] == "warning"] == [
        "claimed a job that still runs here; stopping its former run first",
    ]


@pytest.mark.slow
@pytest.mark.requirement("Q9")
async def test_handlers_stop_whose_jobs_are_gone_from_the_database(open_worker, desk, raw):
    desk.may_stop.set()
    with capture_logs() as logs:
        async with open_worker(desk.tasks, heartbeat_s=0.2) as supervisor:
            await supervisor.jobs.enqueue("work", queue="q")
            with trio.fail_after(60):
                await desk.started.wait()
            await raw.execute("TRUNCATE dl_jobs CASCADE")
            await supervisor.signals.recorded.wait()
            assert supervisor.state.queues["q"].running == 0
    assert desk.log == [("begins", 1), ("is stopped", 1)]
    assert "stopping a running job that this process has lost" in [log["event"] for log in logs]


@pytest.mark.parametrize(("committed", "level"), [(False, "warning"), (True, "debug")])
async def test_a_job_that_its_own_commit_has_queued_again_is_no_warning(committed, level):
    runs, job_id = Runs(), uuid7()
    _add(runs, job_id, 1).committed = committed
    with capture_logs() as logs:
        _add(runs, job_id, 2)
    assert [log["log_level"] for log in logs] == [level]


async def test_a_run_waits_for_all_former_runs_also_behind_one_that_was_stopped(autojump_clock):
    runs, job_id = Runs(), uuid7()
    first, second, third = (_add(runs, job_id, token) for token in (1, 2, 3))
    assert [run.stop_reason for run in (first, second, third)] == [StopReason.LEASE_LOST, StopReason.LEASE_LOST, None]
    # The second was stopped while it waited, and is recorded; the first continues.
    second.end_body()
    runs.remove(second)
    with trio.move_on_after(5) as wait:
        await third.former_ended()
    assert wait.cancelled_caught
    third.end_body()
    runs.remove(third)
    fourth = _add(runs, job_id, 4)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fourth.former_ended)
        await trio.testing.wait_all_tasks_blocked()
        first.end_body()
    runs.remove(first)
    runs.remove(fourth)
    assert not runs._newest


def _given(value):
    async def read():
        return value

    return read


def _add(runs, job_id, token):
    job = ClaimedJob(
        job_id=job_id, token=token, queue="q", task="t", args="{}", lock_key=None, lock_hash=None, partition_key="",
        attempt=1, max_attempts=5, lease_s=60,
    )  # fmt: skip
    run = Run(job=job, lease=Lease(60, trio.current_time() + 60), claimed_at=trio.current_time())
    runs.add(run)
    return run
