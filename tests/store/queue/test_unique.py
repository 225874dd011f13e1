"""Unique tasks: one waiting job of a key represents all requests (S3), or takes the values of the newest (R5)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
import trio
from conditions import patience_s
from databases import raw_connection

from dataloader import Tasks
from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import BadRequest, Conflict, IdempotencyConflict
from dataloader.jobs.failures import GroupRetry
from dataloader.jobs.ids import uuid7
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.model import NewJob
from dataloader.jobs.new_job import new_job
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Status, Step
from dataloader.store.queue import control, failures
from dataloader.store.queue.enqueue import enqueue
from dataloader.store.queue.enqueuer import Enqueuer
from dataloader.store.queue.leases import reap
from dataloader.store.queue.task_rows import aio_declare

pytestmark = [pytest.mark.requirement("S3", "R5"), pytest.mark.filterwarnings("error")]
ME = Operator("me")


@pytest.fixture
async def declare(store):
    """Return a function that declares the task `t` of the queue `q`, like a starting process."""

    async def declare(task="t", **settings):
        tasks = Tasks()
        tasks.task(task, **{"queue": "q", "unique": ("id",)} | settings)(print)
        await store.run(aio_declare, tasks.values(), "w")

    return declare


@pytest.fixture
def ask(store):
    """Return a function that enqueues a job of `t` for an ID, and returns the effect and the job."""
    enqueuer = Enqueuer(store)

    async def ask(one=1, value=None, **options):
        [answer] = await enqueuer.enqueue([NewJob(task="t", args={"id": one, "value": value}, **options)])
        return answer.did, answer.job_id

    return ask


async def test_a_waiting_duplicate_is_kept_and_a_running_one_allows_another(
    declare, ask, start_worker, row_of, journal_of
):
    await declare()
    did, first = await ask(value="a")
    assert did == "added"
    assert await ask(value="b") == ("kept", first)
    assert (await ask(2))[0] == "added"
    row = await row_of(first)
    assert (row["args"], row["unique_key"], row["lock_key"], row["keyed"]) == (
        '{"id": 1, "value": "a"}', "t:[1]", "t:[1]", True,
    )  # fmt: skip
    worker = start_worker()
    claimed = {job.job_id: job for job in await worker.claim()}
    did, second = await ask(value="c")
    assert (did, await row_of(first, "superseded_by")) == ("added", second)
    assert await ask() == ("kept", second)
    # It starts when the first has ended, and not before.
    assert await worker.claim() == []
    await worker.end(claimed[first])
    assert [job.job_id for job in await worker.claim()] == [second]
    assert await journal_of(first) == ["queued", "picked", "superseded", "done"]


async def test_a_running_open_duplicate_is_returned_unless_it_is_being_canceled(store, declare, ask, start_worker):
    await declare(duplicates="open")
    _, first = await ask()
    [job] = await start_worker().claim()
    assert await ask() == ("kept", first)
    await control.cancel(store, job.job_id, ME)
    did, second = await ask()
    assert did == "added"
    assert second != first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unique", "args", "key"),
    [
        (True, '{"b": [1.50, 10.0, "1.0"], "a": 100}', 't:{"a": 100, "b": [1.5, 10, "1.0"]}'),
        (True, '{"a": "\\u2028"}', None),
        (("b", "a"), '{"a": 1.0, "b": "x", "c": 2}', 't:["x", 1]'),
        ("of {a}", '{"a": 7}', "t:of 7"),
    ],
)
async def test_a_key_is_made_of_the_task_and_its_args_in_one_form(raw, unique, args, key, declare):
    await declare(unique=unique)
    made = await raw.fetchval("SELECT dl_unique_key(uniqueness, task, $1::jsonb) FROM dl_tasks", args)
    assert made == key or (key is None and made.startswith("t:sha256:") and len(made) == 73)


async def test_long_args_make_a_key_of_their_hash(declare, ask):
    await declare(unique=True)
    first = await ask(value="x" * 100_000)
    assert first[0] == "added"
    assert await ask(value="x" * 100_000) == ("kept", first[1])
    assert (await ask(value="x" * 100_001))[0] == "added"


async def test_every_way_to_add_a_job_obeys_and_the_same_request_sent_again_is_told_apart(store, raw, declare, ask):
    await declare()
    _, first = await ask(value="a", idempotency_key="i")
    assert await ask(value="a", idempotency_key="i") == ("again", first)
    with pytest.raises(IdempotencyConflict):
        await ask(value="b", idempotency_key="i")
    assert await ask(value="b", idempotency_key="j") == ("kept", first)
    assert await raw.fetchval("SELECT dl_enqueue('t', '{\"id\": 1}')") == first
    [row] = await raw.fetch("SELECT * FROM dl_enqueue_job('t', '{\"id\": 1}')")
    assert tuple(row) == (first, "kept")
    [row] = await raw.fetch(
        "SELECT did FROM dl_enqueue_job('t', '{\"id\": 1, \"value\": \"a\"}', idempotency_key => 'i')"
    )
    assert row["did"] == "again"
    jobs = [NewJob(task="t", args={"id": one}) for one in (3, 1, 3, 2)]
    jobs += [NewJob(task="plain", queue="q"), *[NewJob(task="t", args={"id": 9}, idempotency_key="k") for _ in "ab"]]
    answers = await enqueue(store, jobs)
    assert [answer.did for answer in answers] == ["added", "kept", "kept", "added", "added", "added", "again"]
    assert answers[2].job_id == answers[0].job_id
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs") == 5
    assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'queued'") == 5


async def test_options_that_a_unique_task_forbids_are_refused(store, raw, declare, ask):
    await declare()
    _, first = await ask()
    with pytest.raises(BadRequest, match="after: is not supported"):
        await ask(2, after=[first])
    with pytest.raises(BadRequest, match="version: is not supported"):
        await ask(2, version=1)
    with pytest.raises(BadRequest, match=r"args\.id: is required"):
        await enqueue(store, [NewJob(task="t")])
    with pytest.raises(BadRequest, match="version: is not supported"):
        await enqueue(store, [NewJob(task="plain", queue="q", version=1)])
    with pytest.raises(asyncpg.FeatureNotSupportedError, match="READ COMMITTED"):
        await raw.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT dl_enqueue('t', '{\"id\": 5}')")
    await raw.execute("ROLLBACK")
    for version in (datetime(2026, 1, 1), datetime.now(UTC) + timedelta(hours=2), True, float("nan"), "1"):  # noqa: DTZ001
        with pytest.raises(BadRequest, match="version: must"):
            NewJob(task="t", version=version)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"duplicates": "update"}, "duplicates: needs unique"),
        ({"unique": True, "duplicates": "all"}, "duplicates: must be waiting or open or update, not 'all'"),
        ({"unique": ("nothing",)}, "unique: has the unknown field 'nothing'"),
        ({"unique": True, "keep_time": True}, 'keep_time: needs duplicates="update"'),
        ({"unique": True, "duplicates": "update", "when_running": "stop"}, "when_running: must be None or cancel"),
        ({"unique": 5}, "unique: must be True, field names or a template, not 5"),
    ],
)
def test_settings_that_mean_nothing_are_refused_when_declared(settings, message):
    class Args:
        id: int

    import attrs  # noqa: PLC0415

    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Tasks().task("t", args=attrs.define(Args), **settings)(print)


async def test_an_update_changes_the_job_that_waits_and_cuts_its_retrys_wait(declare, ask, start_worker, row_of, raw):
    await declare(duplicates="update")
    _, first = await ask(value="a", priority=7)
    worker = start_worker()
    [job] = await worker.claim()
    await worker.end(job, Step.RETRY, error="broken", delay_s=3_600.0)
    assert await row_of(first, "waits_for") == "time"
    assert await ask(value="b") == ("updated", first)
    row = await row_of(first)
    assert (row["args"], row["attempt"], row["error"], row["priority"]) == ('{"id": 1, "value": "b"}', 0, None, 100)
    [job] = await worker.claim()
    assert job.args == '{"id": 1, "value": "b"}'
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs") == 1
    later = datetime.now(UTC) + timedelta(hours=1)
    did, second = await ask(value="c", available_at=later)
    assert (did, await row_of(second, "available_at")) == ("added", later)
    await declare(duplicates="update", keep_time=True)
    assert await ask(value="d") == ("updated", second)
    assert await row_of(second, "available_at") == later


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fails", "expires", "is drained", "fails for good", "is requeued by others"])
async def test_a_run_that_is_superseded_does_not_run_again_and_the_newer_one_does(
    store, raw, declare, ask, start_worker, row_of, until, how
):
    await declare(duplicates="update")
    _, first = await ask(value="a")
    worker = start_worker()
    [job] = await worker.claim()
    did, second = await ask(value="b")
    assert did == "added"
    assert await ask(value="c") == ("updated", second)
    match how:
        case "fails":
            await worker.end(job, Step.RETRY, error="broken", delay_s=3_600.0)
        case "fails for good":
            await worker.end(job, Step.FAIL, error="broken")
        case "is drained":
            await worker.end(job, Step.RETURN)
        case "expires":
            await worker.locks.close()
            await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE job_id = $1", first)
            assert (await reap(store, 10)).became == [("q", "canceled")]
            worker = start_worker()
        case "is requeued by others":
            # Like the document's reaper and its backoff.
            await raw.execute("UPDATE dl_jobs SET status = 'queued', available_at = now() WHERE job_id = $1", first)
            worker.locks.forget(job.token)
            await worker.locks.release()
    row = await row_of(first)
    assert (row["status"], row["waits_for"], row["finished_at"] is None) == ("canceled", None, False)
    assert [(job.job_id, job.args) for job in await worker.claim()] == [(second, '{"id": 1, "value": "c"}')]


async def test_a_version_that_is_not_newer_loses_also_against_one_that_has_ended(declare, ask, start_worker, row_of):
    await declare(duplicates="update")
    worker = start_worker()
    _, first = await ask(version=5)
    assert await ask(version=5) == ("older", first)
    assert await ask(value="newer", version=5.5) == ("updated", first)
    [job] = await worker.claim()
    assert await ask(version=5.5) == ("older", first)
    did, second = await ask(version=6)
    assert did == "added"
    await worker.end(job)
    [job] = await worker.claim()
    await worker.end(job)
    assert await ask(version=5.7) == ("older", second)
    assert await row_of(second, "status") == "succeeded"
    # Timestamps are numbers, too; a request without a version counts as a version of now.
    did, third = await ask(version=datetime.now(UTC))
    assert did == "added"
    assert await ask(version=datetime.now(UTC) - timedelta(hours=1)) == ("older", third)
    assert await ask() == ("updated", third)


async def test_an_older_one_that_finds_the_key_free_looks_for_a_newer_that_has_ended(
    database, declare, ask, raw, until_blocked
):
    """It has checked, and waits to be added, while a newer one arrives, runs and ends."""
    await declare(duplicates="update")
    answers = []

    async def older():
        answers.append(await ask(version=1))

    async with raw_connection(database.dsn) as other:
        await raw.execute("BEGIN")
        newer = await raw.fetchval("SELECT job_id FROM dl_enqueue_job('t', '{\"id\": 1}', version => 2)")
        with trio.fail_after(patience_s()):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(older)
                await until_blocked()
                await raw.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now()")
                await raw.execute("COMMIT")
        assert answers == [("older", newer)]
        assert await other.fetchval("SELECT count(*) FROM dl_jobs") == 1


async def test_an_update_beside_the_end_of_the_run_adds_a_job_or_supersedes_the_run(
    declare, ask, start_worker, raw, until_blocked, row_of
):
    """The run's end is not committed when the request arrives: it waits, and decides by the row at that time."""
    await declare(duplicates="update")
    _, first = await ask()
    await start_worker().claim()
    answers = []

    async def update():
        answers.append(await ask(value="new"))

    await raw.execute("BEGIN")
    await raw.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now(), lease_expires_at = NULL")
    with trio.fail_after(patience_s()):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(update)
            await until_blocked()
            await raw.execute("COMMIT")
    [(did, second)] = answers
    assert did == "added"
    assert second != first
    assert await row_of(first, "superseded_by") is None


async def test_a_job_that_stands_for_a_request_does_not_start_before_that_is_committed(raw, declare, ask, start_worker):
    """Otherwise the job would read before the request's transaction has written."""
    await declare()
    _, first = await ask()
    worker = start_worker()
    await raw.execute("BEGIN")
    assert await raw.fetchval("SELECT did FROM dl_enqueue_job('t', '{\"id\": 1}')") == "kept"
    assert await worker.claim() == []
    await raw.execute("COMMIT")
    assert [job.job_id for job in await worker.claim()] == [first]


async def test_a_running_job_is_asked_to_stop_or_its_failure_delays_the_newer_one(
    declare, ask, start_worker, row_of, raw
):
    await declare(duplicates="update", when_running="cancel", after_error="delay")
    _, first = await ask()
    worker = start_worker()
    [job] = await worker.claim()
    _, second = await ask(value="b")
    assert await row_of(first, "cancel_requested") is True
    await raw.execute("UPDATE dl_jobs SET cancel_requested = false WHERE job_id = $1", first)
    before = datetime.now(UTC)
    await worker.end(job, Step.RETRY, error="broken", delay_s=3_600.0)
    row = await row_of(second)
    assert row["waits_for"] == "time"
    assert row["available_at"] > before + timedelta(seconds=3_500)
    assert await row_of(first, "status") == "canceled"
    assert await ask(value="c") == ("updated", second)
    assert await row_of(second, "waits_for") is None


@pytest.mark.slow
async def test_a_retry_is_refused_while_its_unique_key_is_taken_and_plain_updates_work(
    store, raw, declare, ask, start_worker, row_of
):
    await declare(duplicates="update")
    worker = start_worker()
    _, first = await ask(version=1)
    [job] = await worker.claim()
    await worker.end(job, Step.FAIL, error="broken")
    _, second = await ask(version=2)
    with pytest.raises(Conflict, match="a newer job of its unique key is queued or running"):
        await control.retry(store, first, ME)
    assert await control.retry_many(store, JobFilter(task="t"), ME) == 0
    [broken] = (await failures.list_error_groups(store)).groups
    assert (await failures.retry_group(store, GroupRetry(group=broken.group), ME)).changed == 0
    # By hand, or by another service: it runs, and is not a job of the key any more.
    await raw.execute(
        "UPDATE dl_jobs SET status = 'queued', available_at = now(), finished_at = NULL WHERE attempt = 1"
    )
    row = await row_of(first)
    assert (row["status"], row["unique_key"]) == ("queued", None)
    assert await ask(version=2.5) == ("updated", second)
    # If the key is free, our job gets it again.
    await control.cancel(store, second, ME)
    assert (await control.retry(store, second, ME)).status is Status.QUEUED
    assert await row_of(second, "unique_key") == "t:[1]"
    await control.cancel(store, second, ME)
    assert await control.retry_many(store, JobFilter(task="t"), ME) == 1
    assert await ask(version=3) == ("updated", second)


async def test_a_job_that_is_being_canceled_is_no_duplicate_of_a_request(raw, declare, ask, row_of):
    await declare()
    _, first = await ask()
    await raw.execute("UPDATE dl_jobs SET cancel_requested = true")
    did, second = await ask()
    assert did == "added"
    assert second != first
    assert await row_of(first, "status") == "canceled"


async def test_jobs_of_a_task_that_is_no_longer_unique_are_added_as_usual(declare, ask, raw):
    await declare()
    _, first = await ask()
    assert await ask() == ("kept", first)
    await declare(unique=False)
    assert [(await ask())[0] for _ in range(3)] == ["added"] * 3
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE unique_key IS NULL AND NOT keyed") == 3


async def test_a_repeated_request_is_distinguished_from_a_duplicate(declare, ask):
    await declare(duplicates="update")
    await ask(2)
    job_id = uuid7()
    assert await ask(job_id=job_id, version=1) == ("added", job_id)
    assert await ask(job_id=job_id, version=1) == ("again", job_id)


async def test_a_key_with_a_long_history_costs_as_much_as_any_other(declare, raw):
    """This also holds for plans that were made when there was no history."""
    await declare(duplicates="update")
    call = "SELECT did FROM dl_enqueue_job('t', '{\"id\": 1}', version => $1)"
    for version in range(8):
        await raw.fetchval(call, float(version))
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, unique_key, version, finished_at) SELECT"
        " gen_random_uuid(), 'q', 't', 't:[1]', 'succeeded', 't:[1]', -i, now() FROM generate_series(1, 5000) AS i"
    )
    for version, did in ((100.0, "updated"), (50.0, "older"), (None, "updated")):
        await raw.execute("BEGIN")
        assert await raw.fetchval(call, version) == did
        read = "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_xact_user_tables WHERE relid = 'dl_jobs'::regclass"
        assert await raw.fetchval(read) < 50
        await raw.execute("COMMIT")


async def test_a_late_finish_of_a_superseded_run_counts_as_sent_before(store, declare, ask, start_worker):
    await declare()
    await ask()
    worker = start_worker()
    [job] = await worker.claim()
    await ask()
    outcome = Outcome(job.job_id, job.token, Step.RETRY, error="broken", delay_s=1.0)
    assert (await worker.record(outcome)).written == {job.token: Status.CANCELED}
    again = await worker.record(outcome)
    assert (again.written, again.void) == ({}, [])


def test_a_typed_request_takes_a_version():
    assert new_job("t", {}, version=7).version == 7
