"""What was a procrastinate application: a task with a lock, a periodic one, a context. Its waiting jobs come along.

docs/moving/from-procrastinate.md shows each beside what it was; `from_procrastinate.sql` moves the jobs.
"""

from datetime import UTC, datetime

import attrs

from dataloader import GiveUp, Job, RetryPolicy, Tasks

tasks = Tasks()


@attrs.frozen
class Account:
    account: int


# @app.task(queue="sync", lock="…", retry=RetryStrategy(max_attempts=5, exponential_wait=5), pass_context=True)
# async def sync(context, account): ...
@tasks.task(
    "sync",
    args=Account,
    queue="sync",
    lock_key="account:{account}",
    max_attempts=5,
    retry=RetryPolicy(base_s=5, factor=5),
)
async def sync(job: Job[Account]) -> str | GiveUp:
    job.log.info("syncing", account=job.args.account, attempt=job.attempt)
    if job.args.account < 0:
        return GiveUp("there is no such account")  # was: raise JobAborted
    return f"account {job.args.account} is in sync"


# @app.task(queueing_lock="refresh")
@tasks.task("refresh", queue="sync", unique=True)
async def refresh(job: Job) -> None:
    await job.checkpoint()


# @app.periodic(cron="*/10 * * * *")
# @app.task
# async def cleanup(timestamp: int): ...
@tasks.task("cleanup", queue="sync")
async def cleanup(job: Job) -> str:
    planned = job.planned_at or datetime.now(UTC)
    return f"all before {planned:%H:%M} is gone"


tasks.schedule("cleanup", task=cleanup, cron="*/10 * * * *")
