"""Histories of updates (R5): whatever ends, expires, is killed or requeued meanwhile, the newest runs last, and alone.

Real sessions: four send updates of eight keys in a random order of versions, three work. The begin and the end of each
handler are recorded.
"""

from __future__ import annotations

import random
from collections import defaultdict

import attrs
import pytest
import trio

from dataloader import Tasks
from dataloader.jobs.model import NewJob
from dataloader.jobs.states import Step
from dataloader.jobs.text import shown_json
from dataloader.store.queue.enqueue import enqueue, enqueue_unique
from dataloader.store.queue.leases import reap
from dataloader.store.queue.make_ready import ready_due, ready_free
from dataloader.store.queue.task_rows import aio_declare

pytestmark = [pytest.mark.slow, pytest.mark.requirement("R5")]
KEYS, REQUESTS, ASKERS, WORKERS = 8, 160, 4, 3
OPEN = "SELECT count(*) FROM dl_jobs WHERE status IN ('queued', 'running')"


async def aio_execute(connection, sql, *args):
    return await connection.execute(sql, *args)


@attrs.define
class History:
    """Requests and runs: by key, the versions in the order of their starts, and the current runs."""

    store: object
    dice: random.Random
    start_worker: object
    versions: dict[int, int] = attrs.field(factory=lambda: dict.fromkeys(range(KEYS), 0))
    starts: dict[int, list[int]] = attrs.field(factory=lambda: defaultdict(list))
    now: dict[int, int] = attrs.field(factory=dict)
    wrong: list[str] = attrs.field(factory=list)
    did: dict[str, int] = attrs.field(factory=lambda: defaultdict(int))
    is_over: bool = False

    async def ask(self, requests):
        for key, version in requests:
            job = NewJob(task="t", args={"key": key, "version": version}, version=version)
            if self.dice.random() < 0.5:
                answer = await enqueue_unique(self.store, job)
            else:
                [answer] = await enqueue(self.store, [job])
            self.did[answer.did] += 1
            await trio.sleep(self.dice.random() * 0.01)

    async def work(self):
        worker = self.start_worker()
        while not self.is_over:
            jobs = await worker.claim(limit=2)
            for job in jobs:
                self.begin(job)
            for number, job in enumerate(jobs):
                await trio.sleep(self.dice.random() * 0.01)
                if await self.end(worker, job):
                    for other in jobs[number + 1 :]:
                        self.body_ends(other)
                    await self.kill(worker)
                    worker = self.start_worker()
                    break
            if not jobs:
                await trio.sleep(0.005)

    def begin(self, job):
        args = shown_json(job.args)
        key, version = args["key"], args["version"]
        if key in self.now:
            self.wrong.append(f"key {key}: {version} beside {self.now[key]}")
        if self.starts[key] and version < self.starts[key][-1]:
            self.wrong.append(f"key {key}: {version} after {self.starts[key][-1]}")
        self.now[key] = version
        self.starts[key].append(version)

    def body_ends(self, job):
        self.now.pop(shown_json(job.args)["key"], None)

    async def end(self, worker, job):
        """End a run in a random way; return whether the whole worker must be killed."""
        self.body_ends(job)
        how = self.dice.choices(["succeed", "retry", "return", "fail", "requeued", "killed"], [8, 4, 2, 1, 1, 1])[0]
        match how:
            case "succeed":
                await worker.end(job)
            case "retry":
                await worker.end(job, Step.RETRY, error="broken", delay_s=self.dice.choice([0.0, 0.02]))
            case "return":
                await worker.end(job, Step.RETURN)
            case "fail":
                await worker.end(job, Step.FAIL, error="broken")
            case "requeued":
                sql = "UPDATE dl_jobs SET status = 'queued', available_at = now() WHERE job_id = $1 AND token = $2"
                await self.store.run(aio_execute, sql, job.job_id, job.token)
                worker.locks.forget(job.token)
                await worker.locks.release()
            case "killed":
                return True
        return False

    async def kill(self, worker):
        """Kill a worker: its keys are free immediately; its rows are found when their leases have ended."""
        await worker.locks.close()
        sql = (
            "UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE status = 'running' AND claimed_by = $1"
        )
        await self.store.run(aio_execute, sql, worker.name)

    async def sweep(self):
        while not self.is_over:
            await reap(self.store, 10)
            await ready_due(self.store)
            await ready_free(self.store)
            await trio.sleep(0.01)


@pytest.mark.parametrize("seed", range(3))
async def test_the_newest_runs_last_and_alone_and_none_older_after_it(store, raw, start_worker, seed):
    tasks = Tasks()
    tasks.task("t", queue="q", unique=("key",), duplicates="update", max_attempts=1_000)(print)
    await store.run(aio_declare, tasks.values(), "w")
    dice = random.Random(seed)
    history = History(store, dice, start_worker)
    requests = []
    for number in range(1, REQUESTS + 1):
        requests.append((key := dice.randrange(KEYS), number))
        history.versions[key] = number
    # Nearly in order: some are late by a few places.
    requests.sort(key=lambda request: request[1] + dice.gauss(0, 8))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(WORKERS):
                nursery.start_soon(history.work)
            nursery.start_soon(history.sweep)
            async with trio.open_nursery() as asking:
                for place in range(ASKERS):
                    asking.start_soon(history.ask, requests[place::ASKERS])
            while await raw.fetchval(OPEN):  # noqa: ASYNC110 - the database has no event
                await trio.sleep(0.02)
            history.is_over = True
    assert history.wrong == []
    assert {key: starts[-1] for key, starts in history.starts.items()} == {
        k: v for k, v in history.versions.items() if v
    }
    assert {"added", "updated", "older"} <= history.did.keys()
