"""Behavior of a client through a service, and `open_client`; test_jobs_contract.py has the promises of all ways."""

from __future__ import annotations

import asyncio

import pytest
import trio
from conditions import patience_s, until

from dataloader import BadRequest, ConfigError, Draining, JobFilter, Status, StoreUnavailable, new_job, open_client
from dataloader.web.server.limits import HttpLimits
from dataloader.web.service_connection import open_service


@pytest.mark.slow
async def test_a_wait_beyond_the_limit_polls_and_a_draining_service_is_reported(open_web, database):
    ended, limits = [], HttpLimits(wait_again_s=0)
    async with open_web(max_waits=1, reread_s=0.1, limits=limits) as web, open_client(url=web.url) as client:
        jobs = client.jobs
        [added] = await jobs.enqueue_many([new_job("t", queue="q")])

        async def wait():
            ended.append(await jobs.wait(added.job_id))

        async def is_refused():
            return "too_many_waits" in (await web.client.get("/metrics")).text

        with trio.fail_after(patience_s()):
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(wait)
                await until(is_refused)
                await trio.to_thread.run_sync(
                    database.psql, "UPDATE dl_jobs SET status = 'failed', finished_at = now()"
                )
        assert [job.status for job in ended] == [Status.FAILED] * 2
        web.change(draining=True)
        with pytest.raises(Draining):
            await jobs.enqueue("t", queue="q")
        assert [job.job_id for job in (await jobs.find()).jobs] == [added.job_id]
        assert await jobs.cancel(JobFilter(queue="q")) == 0


async def test_refused_and_unanswered_requests_raise_the_same_errors_as_the_database(open_web):
    async with open_web(max_body_bytes=2_000) as web, open_client(url=web.url) as client:
        jobs = client.jobs
        with pytest.raises(BadRequest, match="bytes"):
            await jobs.enqueue("t", {"text": "x" * 3_000}, queue="q")
        with pytest.raises(BadRequest) as refused:
            await jobs.enqueue_many([new_job("t", queue="q"), new_job("t", {"what": object()}, queue="q")])
        assert refused.value.field == "jobs[1].args"
        assert (await jobs.find()).jobs == []
        async with open_service(web.url, None) as service:
            with pytest.raises(StoreUnavailable):
                await service.ask(dict, "GET", "/jobs", timeout_s=0.000_001)


DSN, URL = "postgresql://localhost/jobs", "http://localhost"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"dsn": DSN, "url": URL},
        {"dsn": DSN, "token": "x"},
        {"dsn": "nothing"},
        {"url": "localhost:8080"},
        {"url": URL, "operator": "me"},
        {"url": URL, "token": "ü"},
        {"url": URL, "token": "x\n"},
        {"url": "http://me:secret@localhost", "token": "x"},
        {"url": f"{URL}/?token=x"},
        {"url": f"{URL}#x"},
    ],
)
def test_open_client_takes_an_address_of_either_kind_and_what_goes_with_it(wrong):
    with pytest.raises(ConfigError):
        trio.run(_open, wrong)


async def test_a_name_that_can_be_no_hosts_gives_no_answer():
    async with open_client(url=f"http://{'a' * 64}") as client:
        jobs = client.jobs
        with pytest.raises(StoreUnavailable, match="no answer from"):
            await jobs.queues()


def test_the_database_is_not_asked_from_asyncio():
    # Not asyncio.run: if trio-asyncio was imported before, that runs on Trio.
    with (
        asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner,
        pytest.raises(ConfigError, match="needs a Trio run"),
    ):
        runner.run(_open({"dsn": DSN}))


async def _open(arguments):
    async with open_client(**arguments):
        pass
