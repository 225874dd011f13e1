"""Only type-checked, never run: types that a user's program may expect of the public names."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, assert_type
from uuid import UUID

import attrs

from dataloader import (
    DrainReport,
    Enqueued,
    GiveUp,
    Job,
    JobFilter,
    JobRecord,
    Jobs,
    ProcessClient,
    ProcessFilter,
    ProcessJob,
    ProcessRecord,
    RateLimit,
    Retry,
    RetryPolicy,
    RunStats,
    Settings,
    Snooze,
    StatsFilter,
    Status,
    Supplier,
    Task,
    Tasks,
    ThreadJob,
    Worker,
    open_client,
    open_supervisor,
)
from dataloader.flows.processes import Processes, ProcessType

tasks = Tasks()


@attrs.frozen
class Order:
    """State of a durable process."""

    amount: int


processes = Processes()
assert_type(processes.define("order", state=Order), ProcessType[Order])
assert_type(processes.define("free"), ProcessType[Any])


@tasks.task("render", process=True, memory_mb=512, max_jobs=100)
def render(job: ProcessJob) -> float:
    """Run in a child process."""
    assert_type(job.args, dict[str, Any])
    job.progress({"n": 1})
    assert_type(job.enqueue("load.rates"), Enqueued)
    return job.deadline


@tasks.task("load.rates", retry=RetryPolicy(base_s=5), timeout_s=60)
async def load_rates(job: Job) -> Retry | Snooze | GiveUp | int:
    """Return any outcome, or a result, from an async handler."""
    assert_type(job.job_id, UUID)
    await job.progress({"rows": 1})
    await job.checkpoint()
    job.log.info("read", rows=1)
    async with job.transaction() as transaction:
        await transaction.execute("SELECT $1", job.attempt)
        transaction.result = {"rows": 1}
    return Retry(after_s=job.deadline)


@tasks.resource
@asynccontextmanager
async def lines() -> AsyncIterator[list[str]]:
    """Open a resource of the type that it yields."""
    yield []


@tasks.task(
    "read", supplier=Supplier("library", rate_limits=(RateLimit(1, per_s=1),)), retry=RetryPolicy(final=(OSError,))
)
async def read(job: Job) -> None:
    """Request it by its declaration, or by its type."""
    assert_type(job.resource(lines), list[str])
    assert_type(job.resource(dict[str, int]), dict[str, int])


@tasks.task("crunch")
def crunch(job: ThreadJob) -> None:
    """Run in a thread, where nothing is awaited."""
    job.checkpoint()
    job.progress({"rows": 1})


@attrs.frozen
class Year:
    """Arguments with types."""

    year: int


@tasks.task("load.year", args=Year, queue="load", lock_key=("year",))
async def load_year(job: Job[Year]) -> int:
    """Receive an instance of the task's args type."""
    assert_type(job.args, Year)
    return job.args.year


@tasks.task("load.year.of_another", args=Year)  # type: ignore[arg-type]  # the handler takes other args
async def load_another(job: Job[str]) -> None:
    """Receive the task's args type."""
    assert_type(job.args, str)


async def ask(jobs: Jobs) -> int:
    """Change one job, which returns the job, or the jobs of a filter, which returns their number."""
    job = (await jobs.find(JobFilter(queue="load"))).jobs[0]
    assert_type(await jobs.wait(job.job_id), JobRecord)
    assert_type(await jobs.cancel(job.job_id), JobRecord)
    assert_type(await jobs.set_priority(JobFilter(queue="load"), 3, limit=10), int)
    assert_type((await jobs.stats(StatsFilter(begin=job.created_at, by="day"))).stats, list[RunStats])
    return await jobs.retry(JobFilter(status=frozenset({Status.FAILED})))


async def ask_in_both_ways() -> None:
    """Use the database, and a service."""
    async with open_client("postgresql://localhost/jobs", operator="me") as client:
        by_database = client.jobs
        assert_type(await ask(by_database), int)
    async with open_client(url="http://localhost:8080", token="secret") as client:
        by_service = client.jobs
        assert_type(by_service, Jobs)


async def ask_processes() -> None:
    """Do the same for durable processes."""
    async with open_client("postgresql://localhost/jobs", operator="me") as client:
        by_database = client.processes
        assert_type(by_database, ProcessClient)
        assert_type((await by_database.find(ProcessFilter(type="payment"))).processes, list[ProcessRecord])
        assert_type(await by_database.resume_many(ProcessFilter(type="payment")), int)
    async with open_client(url="http://localhost:8080", token="secret") as client:
        by_service = client.processes
        assert_type(by_service, ProcessClient)


async def embed() -> Status:
    """Check that a registered handler is a task of its args' type, and that a supervisor's results have types."""
    settings = Settings(db_dsn="postgresql://localhost/jobs", workers=(Worker("load", 2),))
    async with open_supervisor(settings, tasks) as supervisor:
        first = await supervisor.jobs.enqueue("load.rates", {"year": 1999}, queue="load")
        assert_type(first, Enqueued)
        record = await supervisor.jobs.wait(first.job_id)
        assert_type(record, JobRecord)
        assert_type(await supervisor.drain(), DrainReport)
    assert_type(crunch, Task[dict[str, Any]])
    assert_type(load_year, Task[Year])
    return record.status
