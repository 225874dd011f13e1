"""Bulk operations: frozen when they begin, run in batches by any process, each job once (U16)."""

from __future__ import annotations

import json

import pytest
import trio
from databases import raw_connection
from performers import performer_of
from web_server import TOKENS, all_tokens, open_server

from dataloader.jobs.bulk_listings import BulkCount, BulkNotFound
from dataloader.jobs.client.bulk import Bulk
from dataloader.jobs.contract import Change, Operator
from dataloader.jobs.errors import BadRequest, StoreUnavailable
from dataloader.jobs.ids import uuid7
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.process_requests import ProcessRequest
from dataloader.store.processes.requests import aio_ask
from dataloader.store.queue import bulk_operations
from dataloader.store.queue.bulk_batches import MAX_TURNS, BulkBatch, do_batch
from dataloader.store.queue.control import cancel_many
from dataloader.store.queue.table_rules import prune_tables
from dataloader.web.http_performer import HttpPerformer
from dataloader.web.service_connection import open_service

pytestmark = pytest.mark.requirement("E11")

CANCEL, RETRY, RUN_NOW = (Change(action=action) for action in ("cancel", "retry", "run_now"))
IN_Q = JobFilter(queue="q")
ADD = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, status, finished_at, available_at)
SELECT gen_random_uuid(), $1, 't', i::text, false, $2::dl_status,
       CASE WHEN $2 IN ('queued', 'running') THEN NULL ELSE now() END, now() + make_interval(secs => $4)
FROM generate_series(1, $3::int) AS i RETURNING job_id
"""


@pytest.fixture(params=["database", "service"])
async def acts(request, store, database):
    """Return the operations in both ways."""
    if request.param == "database":
        yield Bulk(performer_of(store, Operator("chief", "request 7")))
        return
    async with open_server(database.dsn, tokens=all_tokens()) as web, open_service(web.url, TOKENS["chief"]) as service:
        yield Bulk(HttpPerformer(service))


@pytest.fixture
def own(store):
    """Return the operations over the database alone."""
    return Bulk(performer_of(store, Operator("ann")))


@pytest.fixture
def add(raw):
    """Return a function that adds `number` jobs of a queue and status, and returns their IDs."""

    async def add(number, status="queued", *, queue="q", delay_s=0):
        return [row["job_id"] for row in await raw.fetch(ADD, queue, status, number, delay_s)]

    return add


@pytest.fixture
def statuses(raw):
    """Return a function that reads the number of jobs of each status."""

    async def statuses(queue="q"):
        rows = await raw.fetch("SELECT status::text, count(*) FROM dl_jobs WHERE queue = $1 GROUP BY 1", queue)
        return dict(map(tuple, rows))

    return statuses


async def all_batches(store):
    """Run batches until none is left."""
    done = []
    while (batch := await do_batch(store)) is not None:
        assert len(done) <= 2 * MAX_TURNS
        done.append(batch)
    return done


@pytest.mark.slow
async def test_u16_all_that_match_are_frozen_and_done_five_hundred_at_a_time(acts, store, add, statuses, raw):
    await add(1_201)
    await add(3, queue="other")
    await add(2, "succeeded")
    assert await acts.count(CANCEL, IN_Q) == BulkCount(1_201, exact=True)
    begun = await acts.start(CANCEL, IN_Q)
    assert (begun.action, begun.jobs, begun.done, begun.state, begun.actor) == ("cancel", 1_201, 0, "open", "chief")
    assert begun.filter == {"queue": "q"}
    await add(5)
    assert await do_batch(store) == BulkBatch(500, 500)
    half = await acts.get(begun.bulk_id)
    assert (half.done, half.changed, half.state) == (500, 500, "open")
    assert await all_batches(store) == [BulkBatch(500, 500), BulkBatch(201, 201)]
    ended = await acts.get(begun.bulk_id)
    assert (ended.done, ended.changed, ended.state) == (1_201, 1_201, "done")
    assert await statuses() == {"canceled": 1_201, "succeeded": 2, "queued": 5}
    assert [one.bulk_id for one in (await acts.find()).bulk] == [begun.bulk_id]
    audit = await raw.fetch("SELECT actor, action, detail->>'changed' AS changed FROM dl_audit ORDER BY audit_id")
    assert [tuple(row) for row in audit] == [("chief", "start_bulk", None), ("chief", "end_bulk", "1201")]
    assert await raw.fetchval("SELECT count(*) FROM dl_bulk_jobs") == 0
    journals = await raw.fetch("SELECT payload::text FROM dl_job_events WHERE kind = 'canceled' GROUP BY 1")
    assert [json.loads(row["payload"]) for row in journals] == [{"reason": "operator", "by": "chief"}]


@pytest.mark.requirement("P12")
async def test_no_cancel_of_many_takes_the_jobs_that_wake_processes_and_they_are_counted(acts, store, add, raw):
    for process_id in "12":
        await store.run(aio_ask, ProcessRequest(type="pay", process_id=process_id, kind="init"), 60)
    processes = [row["job_id"] for row in await raw.fetch("SELECT job_id FROM dl_jobs")]
    # Another service has put a job without args into their queue.
    [foreign] = await add(1, queue="process.pay")
    assert await acts.count(CANCEL, JobFilter(queue="process.pay")) == BulkCount(1, exact=True, left_out=2)
    assert await acts.count(RUN_NOW, JobFilter(queue="process.pay")) == BulkCount(0, exact=True)
    begun = await acts.start(CANCEL, processes)
    assert (begun.jobs, begun.state) == (0, "done")
    assert (await acts.start(CANCEL, JobFilter(queue="process.pay"))).jobs == 1
    await all_batches(store)
    canceled = "SELECT job_id FROM dl_jobs WHERE status <> 'queued' OR cancel_requested"
    assert [row["job_id"] for row in await raw.fetch(canceled)] == [foreign]
    await raw.execute("UPDATE dl_jobs SET status = 'queued', cancel_requested = false, finished_at = NULL")
    assert await cancel_many(store, JobFilter(queue="process.pay"), Operator("ann")) == 1
    assert [row["job_id"] for row in await raw.fetch(canceled)] == [foreign]


async def test_u16_a_job_that_fails_again_is_not_retried_again(own, store, add, raw, statuses):
    await add(700, "failed")
    begun = await own.start(RETRY, JobFilter(queue="q", status=frozenset({"failed"})))
    for _ in range(2):
        await do_batch(store)
        await raw.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now() WHERE status = 'queued'")
    assert await all_batches(store) == []
    ended = await own.get(begun.bulk_id)
    assert (ended.state, ended.changed) == ("done", 700)
    assert await statuses() == {"failed": 700}


@pytest.mark.slow
async def test_u16_each_operation_changes_only_the_jobs_that_it_applies_to(acts, store, add, raw):
    delayed = await add(3, delay_s=3_600)
    ended = await add(2, "canceled")
    chosen = [*delayed, *ended]
    first = await acts.start(RUN_NOW, chosen)
    assert (first.jobs, first.filter) == (3, {"chosen": 5})
    urgent = Change(action="set_priority", priority=7)
    second = await acts.start(urgent, chosen)
    assert (second.jobs, second.priority) == (3, 7)
    third = await acts.start(RETRY, chosen)
    # One of the frozen jobs ends meanwhile.
    await raw.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now() WHERE job_id = $1", delayed[0])
    await all_batches(store)
    for begun, changed in ((first, 2), (second, 2), (third, 2)):
        found = await acts.get(begun.bulk_id)
        assert (found.state, found.done, found.changed) == ("done", begun.jobs, changed)
    rows = await raw.fetch("SELECT priority, status::text FROM dl_jobs WHERE available_at <= now() ORDER BY 1, 2")
    assert [tuple(row) for row in rows] == [(7, "queued")] * 2 + [(100, "queued")] * 2
    assert await raw.fetchval("SELECT status::text FROM dl_jobs WHERE job_id = $1", delayed[0]) == "succeeded"


async def test_u15_an_act_that_is_sent_twice_begins_once(acts, add, raw):
    await add(3)
    mine = uuid7()
    begun = await acts.start(CANCEL, IN_Q, bulk_id=mine)
    await add(3)
    assert await acts.start(CANCEL, IN_Q, bulk_id=mine) == begun
    assert begun.bulk_id == mine
    with pytest.raises(BadRequest, match="belongs to another bulk operation"):
        await acts.start(RUN_NOW, IN_Q, bulk_id=mine)
    assert await raw.fetchval("SELECT count(*) FROM dl_audit") == 1


@pytest.mark.slow
async def test_u16_a_stopped_operation_changes_no_more_jobs(acts, store, add, statuses, raw):
    await add(800)
    begun = await acts.start(CANCEL, IN_Q)
    await do_batch(store)
    stopped = await acts.stop(begun.bulk_id)
    assert (stopped.state, stopped.stopped_by, stopped.done) == ("stopped", "chief", 500)
    assert await acts.stop(begun.bulk_id) == stopped
    assert await do_batch(store) is None
    assert await statuses() == {"canceled": 500, "queued": 300}
    assert [one["action"] for one in await raw.fetch("SELECT action FROM dl_audit ORDER BY audit_id")] == [
        "start_bulk",
        "stop_bulk",
    ]
    await prune_tables(store, {})
    assert await raw.fetchval("SELECT count(*) FROM dl_bulk_jobs") == 0


@pytest.mark.slow
async def test_u16_an_operation_with_too_many_jobs_or_without_a_filter_is_refused(acts, add):
    await add(3)
    with pytest.raises(BadRequest, match="which is over 2 now"):
        await acts.start(CANCEL, IN_Q, most=2)
    assert (await acts.find()).bulk == []
    nothing = await acts.start(RETRY, IN_Q)
    assert (nothing.jobs, nothing.state) == (0, "done")
    for chosen in (JobFilter(), []):
        with pytest.raises(BadRequest):
            await acts.count(CANCEL, chosen)
    with pytest.raises(BadRequest, match="priority"):
        await acts.start(Change(action="set_priority", priority=-1), IN_Q)
    for question in (acts.get, acts.stop):
        with pytest.raises(BulkNotFound):
            await question(uuid7())


async def test_u16_more_than_ten_thousand_are_at_least_so_many(own, add):
    await add(10_001)
    assert await own.count(CANCEL, IN_Q) == BulkCount(10_000, exact=False)


async def test_u16_a_count_that_takes_too_long_says_so(own, add, raw, monkeypatch):
    await add(1)
    await raw.execute("BEGIN; LOCK TABLE dl_jobs IN ACCESS EXCLUSIVE MODE")
    with monkeypatch.context() as soon:
        soon.setattr(bulk_operations, "COUNT_S", 0.05)
        assert await own.count(CANCEL, IN_Q) == BulkCount(0, exact=False)
    await raw.execute("ROLLBACK")
    assert await own.count(CANCEL, IN_Q) == BulkCount(1, exact=True)


async def test_u16_two_processes_never_do_the_same_batch(own, store, add, raw):
    await add(2_000)
    begun = await own.start(RETRY, IN_Q)
    assert begun.jobs == 0
    begun = await own.start(Change(action="set_priority", priority=1), IN_Q)
    batches = []

    async def work():
        while (await own.get(begun.bulk_id)).ended_at is None:
            if (batch := await do_batch(store)) is not None:
                batches.append(batch)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        nursery.start_soon(work)
    assert sum(batch.jobs for batch in batches) == 2_000
    assert (await own.get(begun.bulk_id)).changed == 2_000
    assert await raw.fetchval("SELECT count(*) FROM dl_audit WHERE action = 'end_bulk'") == 1


async def test_u16_locked_jobs_are_changed_when_their_lock_is_released(own, store, add, database, statuses):
    ids = await add(502)
    begun = await own.start(CANCEL, IN_Q)
    async with raw_connection(database.dsn) as other:
        await other.execute("BEGIN")
        await other.execute("SELECT FROM dl_jobs WHERE job_id = ANY ($1) FOR UPDATE", sorted(ids)[-3:])
        assert await do_batch(store) == BulkBatch(497, 497)
        assert await do_batch(store) == BulkBatch(2, 2)
        assert await do_batch(store) == BulkBatch(0, 0, waits=True)
        await other.execute("ROLLBACK")
        assert await all_batches(store) == [BulkBatch(3, 3)]
    assert (await own.get(begun.bulk_id)).changed == 502
    assert await statuses() == {"canceled": 502}

    [one] = await add(1, queue="p")
    begun = await own.start(CANCEL, JobFilter(queue="p"))
    async with raw_connection(database.dsn) as other:
        await other.execute("BEGIN")
        await other.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", one)
        assert len(await all_batches(store)) == MAX_TURNS + 1
    ended = await own.get(begun.bulk_id)
    assert (ended.state, ended.done, ended.changed) == ("done", 1, 0)


async def test_u16_a_batch_that_was_cut_off_is_done_anew(own, store, add, raw, until_blocked, statuses):
    ids = await add(600)
    begun = await own.start(CANCEL, IN_Q)
    # The batch has changed all its rows, and counts them: it waits there until its session is killed.
    async with trio.open_nursery() as nursery:

        async def cut_off():
            with pytest.raises(StoreUnavailable):
                await do_batch(store)

        await raw.execute("BEGIN")
        await raw.execute("LOCK TABLE dl_job_events IN EXCLUSIVE MODE")
        nursery.start_soon(cut_off)
        await until_blocked()
        await raw.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE NOT granted")
        await raw.execute("ROLLBACK")
    assert await statuses() == {"queued": 600}
    assert (await own.get(begun.bulk_id)).done == 0
    assert await all_batches(store) == [BulkBatch(500, 500), BulkBatch(100, 100)]
    assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'canceled'") == len(ids)


async def test_u16_what_the_database_refuses_ends_with_its_error(own, store, add, raw):
    await add(1)
    begun = await own.start(CANCEL, IN_Q)
    await add(1, queue="p")
    fine = await own.start(Change(action="set_priority", priority=3), JobFilter(queue="p"))
    await raw.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not on a Sunday'; END $$;"
        "CREATE TRIGGER refuse BEFORE UPDATE ON dl_jobs FOR EACH ROW WHEN (NEW.status = 'canceled')"
        " EXECUTE FUNCTION refuse()"
    )
    await all_batches(store)
    ended = await own.get(begun.bulk_id)
    assert (ended.state, ended.done) == ("failed", 0)
    assert "not on a Sunday" in ended.error
    assert (await own.get(fine.bulk_id)).state == "done"


async def test_u16_a_secret_in_a_filter_is_not_stored(own, raw):
    await own.start(CANCEL, JobFilter(lock_key="postgres://u:hunter2@h/d"))
    assert "hunter2" not in await raw.fetchval("SELECT filter::text FROM dl_bulk")


async def test_u16_old_acts_are_deleted_after_the_audits_days(own, store, add, raw):
    await add(1)
    begun = await own.start(CANCEL, IN_Q)
    open_one = await own.start(CANCEL, IN_Q)
    await raw.execute("UPDATE dl_bulk SET created_at = now() - interval '9 days'")
    await raw.execute("UPDATE dl_bulk SET ended_at = now() - interval '8 days' WHERE bulk_id = $1", begun.bulk_id)
    await prune_tables(store, {"dl_bulk": 7})
    assert [one.bulk_id for one in (await own.find()).bulk] == [open_one.bulk_id]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "path", "says"),
    [
        ({"action": "cancel"}, "$", "give job_ids or at least one of"),
        (
            {"action": "cancel", "queue": "q", "job_ids": [str(uuid7())]},
            "$",
            "give job_ids or criteria such as queue, not both",
        ),
        ({"action": "cancel", "queue": "q", "priority": 3}, "$", "priority is required for set_priority"),
        ({"action": "set_priority", "queue": "q"}, "$", "priority is required for set_priority"),
        ({"action": "cancel", "job_ids": []}, "job_ids", "1"),
        ({"action": "drop", "queue": "q"}, "action", "cancel"),
    ],
)
async def test_u16_a_request_that_does_not_go_together_is_told_so(database, body, path, says):
    async with open_server(database.dsn) as web:
        answer = await web.client.post("/api/v1/bulk", json=body)
        assert answer.status_code == 422, answer.text
        [error] = answer.json()["errors"]
        assert error["path"] == path
        assert says in error["message"]


async def test_u16_over_http_an_act_is_accepted_with_its_address(database, add):
    await add(2)
    async with open_server(database.dsn) as web:
        counted = await web.client.post("/api/v1/bulk", json={"action": "cancel", "queue": "q", "dry_run": True})
        assert (counted.status_code, counted.json()) == (200, {"jobs": 2, "exact": True, "left_out": 0})
        begun = await web.client.post("/api/v1/bulk", json={"action": "cancel", "queue": "q"})
        assert begun.status_code == 202
        found = await web.client.get(begun.headers["Location"])
        assert (found.status_code, found.json()["jobs"], found.json()["state"]) == (200, 2, "open")


async def test_an_act_of_no_known_kind_fails_alone(own, store, raw, add):
    """Another program may have stored it, with any number of faults."""
    await add(1)
    await own.start(CANCEL, IN_Q)
    await raw.execute(
        "INSERT INTO dl_bulk (bulk_id, action, filter, actor, worked_at, faults)"
        " SELECT gen_random_uuid(), 'melt', '[1]', 'x', '-infinity', n FROM unnest($1::int[]) AS n",
        [-(2**31), 2**31 - 1],
    )
    for _ in range(6):
        await do_batch(store)
    states = {record.action: (record.state, record.error) for record in (await own.find()).bulk}
    assert states["cancel"] == ("done", None)
    assert "action: must be one of cancel, retry, run_now, set_priority, not 'melt'" in states["melt"][1]
