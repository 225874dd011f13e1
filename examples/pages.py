"""A site's pages: one job fans out to a job a page, in asyncio, and a report runs in a thread after all of them.

cd examples
DL_DB_DSN=postgresql:///pages WORKERS_JSON='[{"queue":"pages","concurrency":8}]' dataloader serve --tasks pages:tasks
psql pages -c "SELECT dl_enqueue('site.load', '{\"url\": \"https://example.org\", \"pages\": 100}')"
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import attrs

from dataloader import AioJob, Job, Tasks, ThreadJob

tasks = Tasks()


@attrs.frozen
class Site:
    url: str
    pages: int


@attrs.frozen
class Page:
    url: str


@tasks.resource(asyncio=True)
@asynccontextmanager
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        yield session


@tasks.task("page.load", args=Page, queue="pages", asyncio=True, timeout_s=60)
async def load_page(job: AioJob[Page]) -> int:
    async with job.resource(http).get(job.args.url) as response:
        return len(await response.read())


@tasks.task("site.report", queue="pages")
def report(job: ThreadJob) -> dict[str, int]:
    sizes = [page.result for page in job.after().values()]
    job.progress({"pages": len(sizes)})
    return {"pages": len(sizes), "bytes": sum(sizes)}


@tasks.task("site.load", args=Site, queue="pages", lock_key="site:{url}")
async def load_site(job: Job[Site]) -> None:
    async with job.transaction() as transaction:
        for number in range(job.args.pages):
            await transaction.enqueue(load_page, Page(f"{job.args.url}/{number}"))
        await transaction.enqueue(report, after=transaction.enqueued)
