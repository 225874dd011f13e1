"""Blocks of jobs whose tasks a process does not know: moved into lanes, which close when they are no longer needed."""

from __future__ import annotations

from functools import partial

import pytest

from dataloader.store.limits.limit_rows import aio_known, aio_limit_task
from dataloader.store.limits.unknown_blocks import close_lanes, file_block
from dataloader.store.queue.worker_rows import WorkerRow, aio_show

pytestmark = pytest.mark.requirement("Q6")

ADD = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, priority)
SELECT gen_random_uuid(), 'q', $1, n::text, false, $3 FROM generate_series(1, $2::int) AS n
"""
IN_LANES = "SELECT lane, count(*)::int AS jobs FROM dl_jobs WHERE waits_for = 'limit' GROUP BY lane ORDER BY lane"
SMALL = {"look": 16, "least": 4}
"""Four unknown jobs among sixteen are a block."""
DECLARED = "INSERT INTO dl_tasks (task, layout, declared_by) VALUES ($1, 1, 'w')"


@pytest.fixture
def show(store):
    async def show(name, queues, tasks, only=None):
        await store.write(aio_show, WorkerRow(name, "h", 1, "1", queues, tasks, only or {}))

    return show


async def lanes(raw):
    return {row["lane"]: row["jobs"] for row in await raw.fetch(IN_LANES)}


async def file_all(store, known=("ours",)):
    after, moved = None, 0
    while (filed := await file_block(store, "q", known, after, **SMALL)).is_block:
        moved, after = moved + filed.jobs, filed.last
    return moved


async def test_a_block_goes_to_the_lanes_of_its_tasks_and_few_unknown_jobs_stay(store, raw):
    await raw.execute(DECLARED, "theirs")
    await raw.execute(ADD, "theirs", 6, 1)
    await raw.execute(ADD, "ours", 5, 2)
    await raw.execute(ADD, "nobody's", 6, 3)
    await raw.execute(ADD, "ours", 15, 4)
    await raw.execute(ADD, "theirs", 3, 5)
    assert await file_all(store) == 12
    assert await lanes(raw) == {"nobody's": 6, "theirs": 6}
    ready = "SELECT task, count(*)::int AS n FROM dl_jobs WHERE waits_for IS NULL GROUP BY task ORDER BY task"
    assert [tuple(row) for row in await raw.fetch(ready)] == [("ours", 20), ("theirs", 3)]
    # A new job of a declared task goes to the lane directly.
    await raw.execute("SELECT dl_enqueue('theirs', queue => 'q')")
    assert (await lanes(raw))["theirs"] == 7


async def test_a_block_is_not_moved_while_it_is_small_and_jobs_that_were_canceled_stay(store, raw):
    await raw.execute(ADD, "theirs", 3, 1)
    assert not (await file_block(store, "q", ["ours"], **SMALL)).is_block
    await raw.execute(ADD, "theirs", 5, 1)
    await raw.execute("UPDATE dl_jobs SET cancel_requested = true WHERE ctid = (SELECT min(ctid) FROM dl_jobs)")
    assert await file_all(store) == 4
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE cancel_requested AND waits_for IS NULL") == 1


async def test_a_worker_that_knows_the_task_claims_moved_jobs_and_skips_a_locked_one(store, raw, start_worker):
    await raw.execute(DECLARED, "t")
    await raw.execute(ADD, "t", 8, 1)
    await raw.execute("BEGIN")
    await raw.execute("SELECT FROM dl_jobs WHERE ctid = (SELECT min(ctid) FROM dl_jobs) FOR UPDATE")
    assert await file_all(store) == 7
    await raw.execute("ROLLBACK")
    claim = await start_worker().locks.claim("q", 20, ["t"], 30.0, limited=["t"], lanes=["t"])
    assert len(claim.jobs) == 7


async def test_a_task_that_is_declared_later_has_the_lane_that_was_opened_for_it(store, raw):
    await raw.execute(ADD, "new", 8, 1)
    assert await file_all(store) == 8
    await raw.execute(DECLARED, "new")
    assert await store.run(aio_known, ["new"]) == (["new"], ["new"], [])


async def age(raw, seconds):
    await raw.execute(
        "UPDATE dl_lanes SET unknown_at = unknown_at - make_interval(secs => $1),"
        " closing_at = closing_at - make_interval(secs => $1)",
        seconds,
    )


async def test_a_lane_closes_when_all_workers_of_its_queue_have_known_the_task_for_an_hour(store, raw, show):
    await raw.execute(DECLARED, "new")
    await show("old", {"q": 1}, ["ours"])
    await show("elsewhere", {"other": 1}, ["ours"])
    await raw.execute(ADD, "new", 8, 1)
    assert await file_all(store) == 8
    await age(raw, 4_000)
    assert await close_lanes(store) == 0, "one worker does not know the task"
    await show("old", {"q": 1}, ["ours", "new"])
    assert await close_lanes(store) == 0, "an hour has not passed since"
    await age(raw, 4_000)
    assert await close_lanes(store) == 1
    # New jobs are plain ready jobs, and workers still take those in the lane.
    assert await store.run(aio_known, ["new"]) == (["new"], ["new"], [])
    await raw.execute("SELECT dl_enqueue('new', queue => 'q')")
    assert await lanes(raw) == {"new": 8}
    await age(raw, 4_000)
    assert await close_lanes(store) == 0, "it is not empty"
    await raw.execute("UPDATE dl_jobs SET status = 'failed', waits_for = NULL WHERE lane IS NOT NULL")
    assert await close_lanes(store) == 1
    assert await store.run(aio_known, ["new"]) == (["new"], [], [])
    # A job that is retried later is ready, though its row names the lane.
    await raw.execute("UPDATE dl_jobs SET status = 'queued' WHERE status = 'failed'")
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE waits_for IS NULL AND lane IS NULL") == 9


@pytest.mark.parametrize("reason", ["limits", "an entry"])
async def test_a_lane_that_limits_or_entries_need_does_not_close(store, raw, show, reason):
    await raw.execute(DECLARED, "new")
    await raw.execute(ADD, "new", 8, 1)
    assert await file_all(store) == 8
    if reason == "limits":
        await raw.execute("UPDATE dl_tasks SET max_running = 1")
    await show("w", {"q": 1}, ["new"], {"q": ["new"]} if reason == "an entry" else None)
    await age(raw, 4_000)
    assert await close_lanes(store) == 0
    assert await raw.fetchval("SELECT limited FROM dl_tasks")


async def test_a_lane_that_closes_opens_again_for_another_block(store, raw, show):
    await raw.execute(DECLARED, "new")
    await raw.execute(ADD, "new", 8, 1)
    assert await file_all(store) == 8
    await age(raw, 4_000)
    assert await close_lanes(store) == 1
    await raw.execute(ADD, "new", 8, 1)
    assert await file_all(store) == 8
    assert await raw.fetchval("SELECT limited FROM dl_tasks")
    assert await raw.fetchval("SELECT closing_at IS NULL FROM dl_lanes")


async def test_limits_set_while_a_lane_closes_keep_it(store, raw, show):
    await raw.execute(DECLARED, "new")
    await raw.execute(ADD, "new", 8, 1)
    assert await file_all(store) == 8
    await show("w", {"q": 1}, ["new", "ours"])
    await age(raw, 4_000)
    assert await close_lanes(store) == 1
    await store.write(partial(aio_limit_task, limited=False), "new", {}, {"max_running": 1})
    assert await raw.fetchval("SELECT closing_at IS NULL AND unknown_at IS NULL FROM dl_lanes")
    await raw.execute("DELETE FROM dl_jobs")
    await age(raw, 4_000)
    assert await close_lanes(store) == 0
    assert await store.run(aio_known, ["new"]) == (["new"], ["new"], ["new"])


async def test_jobs_in_a_lane_that_was_dropped_beside_them_are_found(store, raw):
    await raw.execute(DECLARED, "t")
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, lane, waits_for)"
        " VALUES (gen_random_uuid(), 'q', 't', 'k', 't', 'limit')"
    )
    assert await store.run(aio_known, ["t"]) == (["t"], [], [])
    assert await close_lanes(store) == 1
    assert await store.run(aio_known, ["t"]) == (["t"], ["t"], [])
    assert await close_lanes(store) == 0
