"""Never run, only type-checked: what a user's program may expect of the public names."""

from typing import assert_type
from uuid import UUID

from dataloader import (
    DrainReport,
    Enqueued,
    GiveUp,
    Job,
    JobRecord,
    Retry,
    RetryPolicy,
    Settings,
    Snooze,
    Status,
    Tasks,
    ThreadJob,
    Worker,
    open_supervisor,
)

tasks = Tasks()


@tasks.task("load.rates", retry=RetryPolicy(base_s=5), timeout_s=60)
async def load_rates(job: Job) -> Retry | Snooze | GiveUp | int:
    """An async handler may give back any outcome, or a result."""
    assert_type(job.job_id, UUID)
    await job.progress({"rows": 1})
    await job.checkpoint()
    job.log.info("read", rows=1)
    async with job.transaction() as transaction:
        await transaction.execute("SELECT $1", job.attempt)
        transaction.result = {"rows": 1}
    return Retry(after_s=job.deadline)


@tasks.task("crunch")
def crunch(job: ThreadJob) -> None:
    """A plain handler runs in a thread, where nothing is awaited."""
    job.checkpoint()
    job.progress({"rows": 1})


async def embed() -> Status:
    """A registered handler keeps its own type, and a supervisor says what it gives back."""
    settings = Settings(db_dsn="postgresql://localhost/jobs", workers=(Worker("load", 2),))
    async with open_supervisor(settings, tasks) as supervisor:
        first = await supervisor.jobs.enqueue("load.rates", {"year": 1999}, queue="load")
        assert_type(first, Enqueued)
        record = await supervisor.jobs.wait(first.job_id)
        assert_type(record, JobRecord)
        assert_type(await supervisor.drain(), DrainReport)
    assert_type(crunch(ThreadJob.__new__(ThreadJob)), None)
    return record.status
