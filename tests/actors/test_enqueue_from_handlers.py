"""Jobs that a handler enqueues, in its transaction or outside it, in each kind of handler."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import attrs
import pytest
from conditions import until, when_ended

from dataloader import BadRequest, IdempotencyConflict, NewJob, Tasks

pytestmark = [pytest.mark.slow, pytest.mark.requirement("Q12")]


@attrs.frozen
class Part:
    number: int


@pytest.fixture
def tasks():
    """Return a parent task of each kind, with two children in its transaction and one outside.

    `fail` raises an error.
    """
    tasks = Tasks()

    @tasks.task("part", args=Part, queue="q", lock_key="part:{number}")
    async def part(job):
        return job.args.number

    @tasks.task("trio")
    async def in_trio(job):
        await job.enqueue(part, Part(0), idempotency_key="beside")
        async with job.transaction() as t:
            first = await t.enqueue(part, Part(1))
            assert await t.fetch("SHOW lock_timeout") == [{"lock_timeout": "0"}]  # that of the handler
            [second] = await t.enqueue_many([NewJob(task="part", args={"number": 2})])
            assert t.enqueued == (first.job_id, second.job_id)
            if job.args.get("fail"):
                raise ValueError("after the children")
            t.result = [str(one) for one in t.enqueued]

    @tasks.task("asyncio", asyncio=True)
    async def in_asyncio(job):
        await job.enqueue(part, Part(0), idempotency_key="beside")
        async with job.transaction() as t:
            first = await t.enqueue(part, Part(1))
            await asyncio.sleep(0)
            [second] = await t.enqueue_many([NewJob(task="part", args={"number": 2})])
            assert t.enqueued == (first.job_id, second.job_id)
            if job.args.get("fail"):
                raise ValueError("after the children")
            t.result = [str(one) for one in t.enqueued]

    @tasks.task("thread")
    def in_thread(job):
        job.enqueue(part, Part(0), idempotency_key="beside")
        with job.transaction() as t:
            first = t.enqueue(part, Part(1))
            [second] = t.enqueue_many([NewJob(task="part", args={"number": 2})])
            assert t.enqueued == (first.job_id, second.job_id)
            if job.args.get("fail"):
                raise ValueError("after the children")
            t.result = [str(one) for one in t.enqueued]

    return tasks


ROWS = "SELECT job_id::text, status::text, lock_key FROM dl_jobs WHERE task = 'part' ORDER BY lock_key"


@pytest.mark.parametrize("flavour", ["trio", "asyncio", "thread"])
async def test_jobs_of_a_transaction_are_there_when_its_success_is_or_not_at_all(open_worker, tasks, raw, flavour):
    async with open_worker(tasks) as supervisor:
        failed = await supervisor.jobs.enqueue(flavour, {"fail": True}, queue="q", max_attempts=1)
        assert (await when_ended(supervisor, failed.job_id)).status == "failed"
        assert [row["lock_key"] for row in await raw.fetch(ROWS)] == ["part:0"]
        parent = await supervisor.jobs.enqueue(flavour, queue="q")
        ended = await when_ended(supervisor, parent.job_id)
        assert ended.status == "succeeded", ended.error

        async def rows():
            return await raw.fetch(ROWS)

        # Polls are an hour apart, so the commit's notification has woken the queue.
        children = await until(rows, lambda rows: all(row["status"] == "succeeded" for row in rows))
    assert [row["lock_key"] for row in children] == ["part:0", "part:1", "part:2"]
    assert [row["job_id"] for row in children[1:]] == ended.result


async def test_a_refused_request_leaves_its_transaction_and_its_settings_unchanged(open_worker, raw):
    tasks, said = Tasks(), []

    @tasks.task("t")
    async def parent(job):
        async with job.transaction() as t:
            await t.execute("SET LOCAL lock_timeout = '7s'")
            await t.enqueue("t", {"a": 1}, queue="other", idempotency_key="i")
            with pytest.raises(IdempotencyConflict):
                await t.enqueue("t", {"a": 2}, queue="other", idempotency_key="i")
            with pytest.raises(BadRequest, match="queue: is required"):
                await t.enqueue_many([NewJob(task="t", queue="other"), NewJob(task="t")])
            with suppress(BadRequest):
                await t.enqueue("t", {"a": object()}, queue="other")
            await t.enqueue("t", {"a": 1}, queue="other", idempotency_key="i")
            said.extend(await t.fetch("SHOW lock_timeout"))
            said.append(len(t.enqueued))

    async with open_worker(tasks) as supervisor:
        job = await supervisor.jobs.enqueue("t", queue="q")
        ended = await when_ended(supervisor, job.job_id)
        assert ended.status == "succeeded", ended.error
    assert said == [{"lock_timeout": "7s"}, 1]
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE queue = 'other'") == 1
