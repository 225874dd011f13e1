"""Work of `dataloader demo` in a running supervisor: a separate program that loads the rates through the HTTP API.

It triggers one job per year by HTTP, follows the jobs by long polls like any client, and compares the results with the
file. It knows only the address of the supervisor. screen.py displays the progress; it receives each change through
`Watcher`.

Jobs that an interrupted run has left in the queue are followed, not triggered again: a durable queue has kept them.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, Final, Protocol
from uuid import UUID, uuid4

import attrs
import trio

from dataloader import JobFilter, JobRecord, Jobs, Status, Task, Worker, open_client
from dataloader.cli.demo.tasks import CONTROL, LEASE_S, LOAD, Contents, check_rates, create_table, read_contents
from dataloader.cli.waiting import wait_for_end

RECENT: Final = "ecb.recent"
HISTORY: Final = "ecb.history"
WORKERS: Final = (Worker(RECENT, 2), Worker(HISTORY, 2), Worker(CONTROL, 1))
"""Several queues, so that recent years do not wait for the others."""
_WHO: Final = "dataloader demo"


def queue_of(year: int) -> str:
    """Return the queue for the job of a year."""
    return RECENT if year >= 2015 else HISTORY


def args_of_year(year: int) -> dict[str, str]:
    """Return the args for the job of a year."""
    return {"from": f"{year}-01-01", "to": f"{year + 1}-01-01"}


def year_of(job: JobRecord) -> int:
    """Return the year that a job loads."""
    return int(job.args["from"][:4])


def count_in_result(job: JobRecord, count: str) -> int | None:
    """Return one of the counts of a year's result, such as `inserted`; None if the job has no result yet."""
    return job.result["counts"].get(count, 0) if job.result else None


class Watcher(Protocol):
    """Receives the progress of the load."""

    def began(self, contents: Contents, *, left: int) -> None:
        """Note that the file was read. There is a job for each of its years, `left` of which are queued."""

    def changed(self, job: JobRecord) -> None:
        """Note that a job is queued, or that its status or progress has changed."""


@attrs.define
class DemoRun:
    """State of a run of the demo: the jobs of the years, and the result of the check."""

    run_id: UUID = attrs.field(factory=uuid4)
    years: dict[int, JobRecord] = attrs.field(factory=dict)
    failed: JobRecord | None = None
    contents: Contents | None = None
    check: dict[str, Any] | None = None
    seconds: float = 0.0

    @property
    def is_over(self) -> bool:
        """Return True if the run has ended: the check was made, or a job failed for good."""
        return self.check is not None or self.failed is not None

    @property
    def is_right(self) -> bool:
        """Return True if all jobs succeeded and the table has exactly the contents of the file."""
        return (
            self.contents is not None
            and self.check is not None
            and all(job.status is Status.SUCCEEDED for job in self.years.values())
            and self.check["rates"] == self.contents.rates.total()
            and Decimal(self.check["sum"] or 0) == self.contents.sum
        )

    def total(self, count: str) -> int:
        """Return the sum of one count, such as `inserted`, over the years that have it."""
        return sum(count_in_result(job, count) or 0 for job in self.years.values())


async def load(url: str, run: DemoRun, watcher: Watcher) -> None:
    """Load all years through the service at `url`. `run` has the results, also after a cancellation."""
    began = trio.current_time()
    contents = run.contents = await trio.to_thread.run_sync(read_contents)
    async with open_client(url=url) as client:
        jobs = client.jobs
        try:
            if await _do(jobs, run, create_table) is None:
                return
            left = await _left(jobs)
            watcher.began(contents, left=len(left))
            async with trio.open_nursery() as nursery:
                for year in sorted(contents.rates, reverse=True):
                    new = year not in left
                    job = await _enqueue_year(jobs, run, year) if new else left[year]
                    nursery.start_soon(_follow_year, jobs, run, job, watcher)
            run.failed = next((job for job in run.years.values() if job.status is not Status.SUCCEEDED), None)
            if run.failed is None:
                checked = await _do(jobs, run, check_rates)
                run.check = None if checked is None else checked.result
        finally:
            run.seconds = trio.current_time() - began


async def _left(jobs: Jobs) -> dict[int, JobRecord]:
    """Return the jobs of years that are queued or running since an earlier run."""
    unended = JobFilter(task=LOAD, status=frozenset({Status.QUEUED, Status.RUNNING}))
    return {year_of(job): job for job in (await jobs.find(unended, limit=500)).jobs}


async def _enqueue_year(jobs: Jobs, run: DemoRun, year: int) -> JobRecord:
    """Add the job of a year, once per run. No other job loads that year at the same time."""
    enqueued = await jobs.enqueue(
        LOAD,
        args_of_year(year),
        queue=queue_of(year),
        lock_key=f"{LOAD}:{year}",
        lease_ttl_sec=LEASE_S,
        idempotency_key=f"demo:{run.run_id}:{year}",
        producer=_WHO,
    )
    return await jobs.get(enqueued.job_id)


async def _do(jobs: Jobs, run: DemoRun, task: Task[Any]) -> JobRecord | None:
    """Run one job to its end. If it did not succeed, return None and set `run.failed`."""
    enqueued = await jobs.enqueue(task, idempotency_key=f"demo:{run.run_id}:{task.name}", producer=_WHO)
    job = await wait_for_end(jobs, enqueued.job_id, timeout_s=math.inf, on_change=lambda _job: None)
    if job.status is Status.SUCCEEDED:
        return job
    run.failed = job
    return None


async def _follow_year(jobs: Jobs, run: DemoRun, job: JobRecord, watcher: Watcher) -> None:
    """Update the job of a year in `run` until it has ended."""

    def changed(now: JobRecord) -> None:
        run.years[year_of(now)] = now
        watcher.changed(now)

    changed(job)
    await wait_for_end(jobs, job.job_id, timeout_s=math.inf, on_change=changed)
