"""Depths for pages: one process counts for all, in a small share of the time; pauses are always current."""

from __future__ import annotations

import pytest
from databases import raw_connection

from dataloader.jobs.contract import Operator
from dataloader.jobs.listings import EVERY_JOB
from dataloader.store.queue import control
from dataloader.store.queue.depths import OTHERS, CountLimits, read_depths
from dataloader.store.queue.name_pages import page_of_queues
from dataloader.store.queue.reads import count_queues, list_jobs

pytestmark = pytest.mark.requirement("E11")

AGE = "SELECT extract(epoch FROM next_at - clock_timestamp())::float8 FROM dl_depths"


async def add(raw, *queues, at="now()"):
    for queue in queues:
        await raw.execute(
            f"INSERT INTO dl_jobs (job_id, queue, task, lock_key, available_at)"
            f" VALUES (gen_random_uuid(), $1, 't', 'k', {at})",
            queue,
        )


async def ready(store, **limits):
    return {queue.queue: queue.ready for queue in (await read_depths(store, CountLimits(**limits))).queues}


async def slow_down(raw, seconds):
    """Make each count last `seconds` longer: it reads the workers through a view that sleeps first."""
    await raw.execute(f"""
        ALTER TABLE dl_workers RENAME TO the_workers;
        CREATE VIEW dl_workers AS SELECT * FROM the_workers WHERE (SELECT pg_sleep({seconds})) IS NOT NULL
    """)


async def test_a_count_is_shared_until_the_next_one_is_due(store, raw):
    await slow_down(raw, 0.1)
    await add(raw, "a", "b", "b")
    assert await ready(store) == {"a": 1, "b": 2}
    # 0.1 s is a twentieth of 2 s.
    assert 1 < await raw.fetchval(AGE) < 30
    counted_at = (await read_depths(store)).at
    await add(raw, "a")
    assert await ready(store) == {"a": 1, "b": 2}
    assert (await read_depths(store)).at == counted_at
    await raw.execute("UPDATE dl_depths SET next_at = now()")
    assert await ready(store) == {"a": 2, "b": 2}


async def test_during_a_count_other_processes_read_the_previous_one(store, raw, database):
    await add(raw, "a")
    assert await ready(store, share=1.0) == {"a": 1}
    async with raw_connection(database.dsn) as other:
        await slow_down(raw, 20)
        await other.execute("BEGIN")
        await other.execute("SELECT FROM dl_depths FOR UPDATE")
        await add(raw, "a")
        # The jobs are not read at all: that would exceed the statement's timeout.
        assert await ready(store, share=1.0) == {"a": 1}


async def test_a_count_that_takes_too_long_is_given_up_and_not_tried_again_soon(store, raw):
    await add(raw, "a")
    assert await ready(store) == {"a": 1}
    await raw.execute("UPDATE dl_depths SET next_at = now()")
    await raw.execute("BEGIN; LOCK TABLE dl_jobs IN ACCESS EXCLUSIVE MODE")
    assert await ready(store, count_s=0.1) == {"a": 1}
    await raw.execute("ROLLBACK")
    assert 1 < await raw.fetchval(AGE) <= 2


async def test_pauses_are_those_of_now_and_say_since_when_and_by_whom(store, raw):
    await add(raw, "a", at="'-infinity'")
    first = await read_depths(store)
    assert [(one.queue, one.ready, one.oldest_ready_at, one.paused) for one in first.queues] == [("a", 1, None, False)]
    await raw.execute("UPDATE dl_depths SET next_at = 'infinity'")
    for queue in ("a", "new"):
        await control.pause(store, queue, Operator("ann"))
    since = (await read_depths(store)).paused["a"].at
    await control.pause(store, "a", Operator("bob"))
    found = await read_depths(store)
    assert [(one.queue, one.ready, one.paused) for one in found.queues] == [("a", 1, True), ("new", 0, True)]
    assert (found.paused["a"].by, found.paused["a"].at) == ("ann", since)
    await control.resume(store, "a", Operator("bob"))
    assert (await read_depths(store)).paused.keys() == {"new"}


async def test_queues_that_are_too_many_are_counted_together(store, raw):
    await add(raw, "a", "b", "b", "c", "c", "d")
    assert list((await ready(store, named=2)).items()) == [("b", 2), ("c", 2), ("", 2)]


@pytest.mark.slow
@pytest.mark.requirement("Q9")
async def test_names_that_only_other_services_can_write_are_not_listed_but_counted(store, raw):
    """PostgreSQL compresses them, so that its index accepts 200,000 characters."""
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, args) SELECT gen_random_uuid(),"
        " CASE WHEN i = 0 THEN 'q' ELSE repeat('x', 200000) || i END, repeat('t', 200000) || i, 'k' || i, '{}'"
        " FROM generate_series(0, 29) i"
    )
    counted = await count_queues(store, most=100, rest=OTHERS)
    assert [(queue.queue, queue.unknown_task + queue.ready) for queue in counted] == [(OTHERS, 29), ("q", 1)]
    assert [queue.queue for queue in (await page_of_queues(store)).queues] == ["q"]
    page = await list_jobs(store, EVERY_JOB, limit=1_000)
    assert 1 < len(page.jobs) < 10
    assert page.next is not None
