"""Depths for pages: one process counts for all, in a small share of the time; pauses are told as they are now."""

from __future__ import annotations

import pytest
from databases import raw_connection

from dataloader.jobs.contract import Operator
from dataloader.store.queue import control, depths
from dataloader.store.queue.depths import read_depths

pytestmark = pytest.mark.requirement("E11")

AGE = "SELECT extract(epoch FROM next_at - clock_timestamp())::float8 FROM dl_depths"


async def add(raw, *queues, at="now()"):
    for queue in queues:
        await raw.execute(
            f"INSERT INTO dl_jobs (job_id, queue, task, lock_key, available_at)"
            f" VALUES (gen_random_uuid(), $1, 't', 'k', {at})",
            queue,
        )


async def ready(store):
    return {queue.queue: queue.ready for queue in (await read_depths(store)).queues}


async def test_what_was_counted_is_read_by_all_until_a_count_is_cheap_again(store, raw, monkeypatch):
    monkeypatch.setattr(depths, "DEPTHS", f"SELECT * FROM ({depths.DEPTHS}) AS q CROSS JOIN pg_sleep(0.1) AS slept")
    await add(raw, "a", "b", "b")
    assert await ready(store) == {"a": 1, "b": 2}
    # A tenth of a second is a twentieth of two seconds.
    assert 1 < await raw.fetchval(AGE) < 30
    counted_at = (await read_depths(store)).at
    await add(raw, "a")
    assert await ready(store) == {"a": 1, "b": 2}
    assert (await read_depths(store)).at == counted_at
    await raw.execute("UPDATE dl_depths SET next_at = now()")
    assert await ready(store) == {"a": 2, "b": 2}


async def test_while_somebody_counts_others_read_what_was_counted_before(store, raw, database, monkeypatch):
    monkeypatch.setattr(depths, "SHARE", 1.0)
    await add(raw, "a")
    assert await ready(store) == {"a": 1}
    async with raw_connection(database.dsn) as other:
        await other.execute("BEGIN")
        await other.execute("SELECT FROM dl_depths FOR UPDATE")
        monkeypatch.setattr(depths, "DEPTHS", f"SELECT * FROM ({depths.DEPTHS}) AS q CROSS JOIN pg_sleep(20) AS slept")
        await add(raw, "a")
        # Not even a look at the jobs: it would sleep.
        assert await ready(store) == {"a": 1}


async def test_a_count_that_takes_too_long_is_given_up_and_not_tried_again_soon(store, raw, monkeypatch):
    await add(raw, "a")
    assert await ready(store) == {"a": 1}
    monkeypatch.setattr(depths, "DEPTHS", f"SELECT * FROM ({depths.DEPTHS}) AS q CROSS JOIN pg_sleep(20) AS slept")
    monkeypatch.setattr(depths, "COUNT_S", 0.1)
    await raw.execute("UPDATE dl_depths SET next_at = now()")
    assert await ready(store) == {"a": 1}
    assert 1 < await raw.fetchval(AGE) <= 2


async def test_pauses_are_those_of_now_and_say_since_when_and_by_whom(store, raw, monkeypatch):
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


async def test_queues_that_are_too_many_are_counted_together(store, raw, monkeypatch):
    monkeypatch.setattr(depths, "NAMED", 2)
    await add(raw, "a", "b", "b", "c", "c", "d")
    assert list((await ready(store)).items()) == [("b", 2), ("c", 2), ("", 2)]
