"""What was a Celery application: a task with retries, a rate limit, a chain, a chord, a beat schedule.

docs/moving/from-celery.md shows each beside what it was.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import httpx2

from dataloader import Job, NewJob, RateLimit, RetryPolicy, Supplier, Tasks, ThreadJob

tasks = Tasks()
thumbnails = Supplier("thumbnails", rate_limits=(RateLimit(10, per_s=60),))


@attrs.frozen
class Image:
    url: str


# @app.task(autoretry_for=(HTTPError,), retry_backoff=True, max_retries=7, rate_limit="10/m", time_limit=60)
@tasks.task(
    "image.fetch",
    args=Image,
    queue="images",
    max_attempts=8,  # the first run and seven retries
    retry=RetryPolicy(base_s=1, factor=2, cap_s=600),
    supplier=thumbnails,  # in all processes together
    timeout_s=60,
)
async def fetch(job: Job[Image]) -> int:
    async with httpx2.AsyncClient() as client:
        answer = await client.get(job.args.url)
    answer.raise_for_status()
    return len(answer.content)


# @app.task
# def summary(sizes): ...
@tasks.task("album.summary", queue="images")
def summary(job: ThreadJob) -> dict[str, int]:
    sizes = [before.result for before in job.after().values()]
    return {"images": len(sizes), "bytes": sum(sizes)}


# chord(fetch.s(url) for url in urls)(summary.s())
@tasks.task("album.load", queue="images")
async def load_album(job: Job) -> None:
    async with job.transaction() as transaction:
        for url in job.args["urls"]:
            await transaction.enqueue(fetch, Image(url))
        await transaction.enqueue(summary, after=transaction.enqueued)


# chain(extract.s(path), clean.s(), store.s())()
def extract(job: ThreadJob) -> str:
    return f"text of {job.args['path']}"


def clean(job: ThreadJob) -> str:
    return str(job.previous).upper()


def store(job: ThreadJob) -> dict[str, Any]:
    return {"path": job.args["path"], "text": job.previous}


tasks.stages("document", extract, clean, store, queue="documents")

# app.conf.beat_schedule = {"nightly": {"task": "album.load", "schedule": crontab(hour=3, minute=30), "args": (...)}}
tasks.schedule("nightly", task=load_album, cron="30 3 * * *", zone="UTC", args={"urls": []})


def later(url: str) -> NewJob:
    """Return the job of fetch.apply_async((url,), countdown=60, priority=9, task_id=…), for `enqueue_many`."""
    in_a_minute = datetime.now(UTC) + timedelta(seconds=60)
    return NewJob(task=fetch.name, args={"url": url}, available_at=in_a_minute, priority=10)
