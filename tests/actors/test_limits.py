"""Limits of running services: tasks start as many jobs as they may, when they may, over all processes (S1, S4)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio
from conditions import until

from dataloader import Budget, NewJob, Supplier, Tasks


def most_within(instants, span_s):
    """The most of `instants` that lie within any span."""
    ordered = sorted(instants)
    return max(sum(1 for at in ordered if first <= at < first + span_s) for first in ordered)


@pytest.mark.requirement("S1")
async def test_no_more_jobs_of_a_task_run_at_once_than_it_allows_over_all_processes(open_worker, raw):
    tasks, most, now = Tasks(), 0, 0

    @tasks.task("narrow", queue="q", max_running=3)
    async def narrow(job):
        nonlocal most, now
        now += 1
        most = max(most, now)
        await trio.sleep(0.02)
        now -= 1

    @tasks.task("wide", queue="q")
    async def wide(job): ...

    async with open_worker(tasks, {"q": 10}) as one, open_worker(tasks, {"q": 10}):
        for _ in range(30):
            await one.jobs.enqueue("narrow")
        await one.jobs.enqueue("wide")

        async def ended():
            return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'") == 31

        await until(ended)
    assert most == 3


@pytest.mark.requirement("S1")
async def test_the_next_batch_begins_when_the_last_one_has_ended_and_its_pause_is_over(open_worker, raw):
    tasks = Tasks()

    @tasks.task("batch", queue="q", batch_size=4, batch_delay_s=0.3)
    async def batch(job):
        await trio.sleep(0.05)

    async with open_worker(tasks, {"q": 3}) as one, open_worker(tasks, {"q": 3}):
        await one.jobs.enqueue_many([NewJob(task="batch") for _ in range(10)])

        async def ended():
            return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'") == 10

        await until(ended)
    rows = await raw.fetch("SELECT started_at, finished_at FROM dl_jobs ORDER BY started_at")
    batches = [[rows[0]]]
    for row in rows[1:]:
        if row["started_at"] >= max(former["finished_at"] for former in batches[-1]):
            batches.append([])
        batches[-1].append(row)
    assert [len(one) for one in batches] == [4, 4, 2]
    for former, later in pairwise(batches):
        pause = min(row["started_at"] for row in later) - max(row["finished_at"] for row in former)
        assert pause.total_seconds() >= 0.3


@pytest.mark.requirement("S4")
async def test_starts_of_all_tasks_of_a_supplier_keep_its_budgets_at_the_first_line_of_the_handler(open_worker, raw):
    tasks, began = Tasks(), []
    hr = Supplier("hr", budgets=(Budget(5, per_s=0.5), Budget(12, per_s=2)), margin_s=0.05)

    @tasks.task("one", queue="q", supplier=hr)
    async def one(job):
        began.append(trio.current_time())

    @tasks.task("two", queue="other", supplier="hr", cost=2)
    async def two(job):
        began.extend([trio.current_time()] * 2)

    async with open_worker(tasks, {"q": 10, "other": 10}) as first, open_worker(tasks, {"q": 10}):
        await first.jobs.enqueue_many([NewJob(task="one") for _ in range(20)] + [NewJob(task="two") for _ in range(5)])

        async def ended():
            return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'") == 25

        await until(ended, within_s=60)
    assert len(began) == 30
    assert most_within(began, 0.5) <= 5
    assert most_within(began, 2) <= 12
