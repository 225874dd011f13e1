"""Duplicates from services without unique tasks: the best waiting job is kept, the others are canceled (S6)."""

from __future__ import annotations

import pytest
from databases import raw_connection

from dataloader.jobs.contract import Operator
from dataloader.store.queue.duplicates import cancel_duplicates, list_duplicates

pytestmark = pytest.mark.requirement("S3", "S6")
ME = Operator("me")


async def test_the_best_of_the_waiting_duplicates_is_kept_and_the_others_are_canceled(
    store, raw, add_job, journal_of, row_of
):
    later = await add_job(args="'{\"id\": 1.0}'", priority="5")
    urgent = await add_job(args="'{\"id\": 1}'", priority="5", created_at="now() - interval '1 s'")
    lazy = await add_job(args="'{\"id\": 1}'", available_at="now() + interval '1 h'")
    others = [
        await add_job(args="'{\"id\": 2}'"),
        await add_job(args="'{\"id\": 1}'", queue="'r'"),
        await add_job(args="'{\"id\": 1}'", partition_key="'p'"),
        await add_job(args="'{\"id\": 1}'", status="'running'"),
        await add_job(args="'{\"id\": 1}'", schedule="'s'", planned_at="now()"),
        await add_job(args="'{\"id\": 1}'", unique_key="'t:1'"),
        await add_job(args="'{\"id\": 1}'", task="'u'"),
    ]
    [group] = await list_duplicates(store)
    assert (group.queue, group.task, group.jobs, group.best, group.args) == ("q", "t", 3, urgent, {"id": 1})
    assert await list_duplicates(store, task="u") == []
    assert await cancel_duplicates(store, ["u"], ME) == 0
    assert await cancel_duplicates(store, ["t"], ME, limit=1) == 1
    assert await cancel_duplicates(store, ["t"], ME) == 1
    assert await cancel_duplicates(store, ["t"], None) == 0
    assert {await row_of(one, "status") for one in (later, lazy)} == {"canceled"}
    assert await row_of(later, "error") == f"a duplicate of job {urgent}"
    assert await journal_of(lazy) == ["canceled: duplicate"]
    assert "canceled" not in {await row_of(one, "status") for one in [urgent, *others]}
    assert await raw.fetchval("SELECT count(*) FROM dl_audit WHERE action = 'cancel_duplicates'") == 3


async def test_one_that_others_wait_for_is_kept_and_none_goes_while_the_best_is_in_doubt(
    store, database, add_job, row_of
):
    best = await add_job(created_at="now() - interval '1 h'")
    awaited = await add_job(awaited="true")
    third = await add_job()
    [group] = await list_duplicates(store)
    assert group.best == awaited
    async with raw_connection(database.dsn) as somebody:
        # Another session may claim or cancel it; the result is not known yet.
        await somebody.execute("BEGIN")
        await somebody.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", awaited)
        assert await cancel_duplicates(store, ["t"], ME) == 0
        await somebody.execute("ROLLBACK")
    assert await cancel_duplicates(store, ["t"], ME) == 2
    assert [await row_of(one, "status") for one in (best, awaited, third)] == ["canceled", "queued", "canceled"]


async def test_a_key_whose_next_job_was_a_duplicate_wakes_another(store, add_job, row_of):
    parked = await add_job(lock_key="'k'", waits_for="'lock'", args="'{\"id\": 2}'")
    best = await add_job(args="'{\"id\": 1}'")
    await add_job(lock_key="'k'", args="'{\"id\": 1}'")
    assert await cancel_duplicates(store, ["t"], ME) == 1
    assert await row_of(best, "status") == "queued"
    assert await row_of(parked, "waits_for") is None
