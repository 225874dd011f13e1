"""A job that runs after others waits until all of them have ended, however they end, in any order of the commits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
import trio
from conditions import patience_s
from databases import raw_connection
from foreign import BACK_OFF, CLAIM, FINISH

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import BadRequest, Conflict, IdempotencyConflict, StoreUnavailable
from dataloader.jobs.ids import uuid7
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.model import MAX_AFTER, NewJob
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Status, Step, WaitsFor
from dataloader.store.queue import control, make_ready
from dataloader.store.queue import enqueue as adding
from dataloader.store.queue.enqueue import enqueue
from dataloader.store.queue.enqueuer import Enqueuer
from dataloader.store.queue.finish import aio_finish
from dataloader.store.queue.leases import reap
from dataloader.store.queue.make_ready import ready_after, ready_due
from dataloader.store.queue.reads import get_job, list_jobs, list_queues, results_of
from dataloader.store.queue.retention import prune

OPERATOR = Operator("operator")
SUCCEEDED, FAILED, CANCELED, LOST = Status.SUCCEEDED, Status.FAILED, Status.CANCELED, Status.LOST


def a_job(**options):
    return NewJob(**{"queue": "q", "task": "t"} | options)


@pytest.fixture
def add(store):
    """Return a function that adds a job and returns its ID."""

    async def add(**options):
        [added] = await enqueue(store, [a_job(**options)])
        return added.job_id

    return add


@pytest.fixture
def judge(store):
    """Return a function that evaluates jobs that run after others until none is left, and returns their number."""

    async def judge():
        judged = 0
        with trio.fail_after(patience_s()):
            while (found := await ready_after(store)).jobs:
                judged += found.jobs
        return judged

    return judge


@pytest.fixture
def stands(row_of):
    """Return a function that reads a job's status, or its waiting reason while it is queued; None: it is ready."""

    async def stands(job_id):
        row = await row_of(job_id)
        return row["waits_for"] if row["status"] == "queued" else Status(row["status"])

    return stands


@pytest.fixture
def end(raw):
    """Return a function that ends a job with the same row as our finish."""

    async def end(job_id, status=SUCCEEDED):
        await raw.execute(
            "UPDATE dl_jobs SET status = $2::text::dl_status, finished_at = now(), waits_for = NULL WHERE job_id = $1",
            job_id,
            status,
        )

    return end


async def test_a_job_runs_when_all_that_it_runs_after_have_succeeded(store, raw, start_worker, add, judge, stands):
    first, second = await add(), await add()
    last = await add(after=[first, second])
    await judge()
    worker = start_worker()
    for body in await worker.claim():
        assert await stands(last) == "after"
        assert await raw.fetch(CLAIM) == []
        await worker.end(body)
        await judge()
    assert await stands(last) is None
    [body] = await worker.claim()
    assert body.job_id == last


async def test_a_job_without_dependencies_is_ready_immediately(add, judge, stands):
    job_id = await add(after=[])
    assert await stands(job_id) is None
    assert await judge() == 0


@pytest.mark.slow
@pytest.mark.parametrize("when_failed", ["cancel", "run"])
@pytest.mark.parametrize("status", [FAILED, CANCELED, LOST, "deleted"])
async def test_one_that_did_not_succeed_cancels_the_job_or_lets_it_run_once_all_have_ended(
    store, raw, add, judge, stands, end, row_of, journal_of, when_failed, status
):
    jobs = [await add() for _ in range(3)]
    last = await add(after=jobs, when_failed=when_failed)
    await judge()
    if status == "deleted":
        await raw.execute("DELETE FROM dl_jobs WHERE job_id = $1", jobs[1])
    else:
        await end(jobs[1], status)
    await end(jobs[0])
    await judge()
    assert await stands(last) == "after"
    await end(jobs[2])
    await judge()
    if when_failed == "run":
        assert await stands(last) is None
        return
    assert await stands(last) is CANCELED
    verb = "failed" if status == "failed" else f"was {status}"
    assert await row_of(last, "error") == (
        f"1 of the 3 jobs that this job depends on did not succeed: job {jobs[1]}, which this job depends on, {verb}"
    )
    assert (await journal_of(last))[-1] == "canceled: after"
    job = await get_job(store, last)
    assert (job.finished_at is not None, job.available_at) == (True, job.created_at)


@pytest.mark.parametrize("status", [SUCCEEDED, FAILED])
async def test_the_last_status_of_a_deleted_dependency_counts(store, raw, add, judge, stands, end, status):
    """Another service may keep ended jobs for a shorter time than we do."""
    first, second = await add(), await add()
    last = await add(after=[first, second])
    await judge()
    await end(first, status)
    await raw.execute("DELETE FROM dl_jobs WHERE job_id = $1", first)
    await end(second)
    await judge()
    assert await stands(last) is (None if status is SUCCEEDED else CANCELED)
    assert (await results_of(store, last))[first].status == (SUCCEEDED if status is SUCCEEDED else None)


async def test_a_lost_or_canceled_job_ends_the_jobs_that_wait_for_it(store, raw, start_worker, add, judge, stands):
    lost, waiting = await add(max_attempts=1), await add(available_at=datetime.now(UTC) + timedelta(hours=1))
    after_lost, after_waiting = await add(after=[lost]), await add(after=[waiting])
    await judge()
    await start_worker().claim()
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE job_id = $1", lost)
    await reap(store, 10)
    await control.cancel(store, waiting, OPERATOR)
    await judge()
    assert (await stands(lost), await stands(after_lost), await stands(after_waiting)) == (LOST, CANCELED, CANCELED)


async def test_a_job_restored_without_one_of_its_dependencies_waits_for_the_others(raw, add, judge, stands, end):
    first, second = sorted([await add(), await add()])
    last = await add(after=[first, second])
    await judge()
    await raw.execute("CREATE TABLE copy AS SELECT * FROM dl_jobs; CREATE TABLE edges AS SELECT * FROM dl_job_after")
    await raw.execute("DELETE FROM copy WHERE job_id = (SELECT waits_on FROM copy WHERE waits_on IS NOT NULL)")
    await raw.execute("UPDATE edges SET was = 'succeeded'")
    await raw.execute(
        "BEGIN; TRUNCATE dl_jobs CASCADE; INSERT INTO dl_jobs SELECT * FROM copy;"
        "INSERT INTO dl_job_after SELECT * FROM edges; COMMIT"
    )
    await judge()
    assert await stands(last) == "after"
    await end(first)
    await judge()
    assert await stands(last) is None


async def test_a_job_without_when_failed_is_canceled_by_a_failed_dependency(raw, add, judge, stands, end):
    """A row that was written by hand may have no `when_failed`."""
    first = await add()
    last = await add(after=[first])
    await raw.execute("UPDATE dl_jobs SET when_failed = NULL WHERE job_id = $1", last)
    await end(first, FAILED)
    await judge()
    assert await stands(last) is CANCELED


# Every order of the insert's commit, the end's and the check.


@pytest.fixture
async def adding_transaction(database):
    """Return another connection, in a transaction that adds a job that runs after others."""
    async with raw_connection(database.dsn) as connection:

        async def begin(**options):
            job = a_job(**options)
            await connection.execute("BEGIN")
            await connection._cross(adding._aio_add_graph, connection.asyncpg, [job], [adding.row_of(job, 60)], [0])
            return job.job_id

        yield begin, connection.execute


@pytest.fixture
async def ending_transaction(database):
    """Return another connection, in a transaction that ends a run, by our statement or by another service's."""
    async with raw_connection(database.dsn) as connection:

        async def begin(body, who, step=Step.SUCCEED):
            await connection.execute("BEGIN")
            if who == "foreign":
                await connection.execute(FINISH, body.job_id)
            else:
                outcome = Outcome(body.job_id, body.token, step)
                finished = await connection._cross(aio_finish, connection.asyncpg, [outcome])
                assert finished.written

        yield begin, connection.execute


ORDERS = [
    # The run has ended before the job is added.
    ("end", "end commits", "add", "add commits"),
    ("add", "end", "end commits", "add commits"),
    ("add", "end", "add commits", "end commits"),
    ("add", "add commits", "end", "end commits"),
    ("end", "add", "end commits", "add commits"),
    ("end", "add", "add commits", "end commits"),
]


@pytest.mark.slow
@pytest.mark.parametrize("who", ["ours", "foreign"])
@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
@pytest.mark.parametrize("looks", ["once", "between"])
async def test_an_ending_and_the_job_that_waits_for_it_never_miss_each_other(
    start_worker, add, judge, stands, adding_transaction, ending_transaction, order, who, looks
):
    first = await add()
    [body] = await start_worker().claim()
    begin_add, in_adding = adding_transaction
    begin_end, in_ending = ending_transaction
    last = None
    for step in order:
        match step:
            case "add":
                last = await begin_add(after=[first])
            case "add commits":
                await in_adding("COMMIT")
            case "end":
                await begin_end(body, who)
            case "end commits":
                await in_ending("COMMIT")
        if looks == "between":
            await judge()
            if step != order[-1] and last is not None and "add commits" in order[: order.index(step) + 1]:
                assert await stands(last) == ("after" if "end commits" not in order[: order.index(step) + 1] else None)
    await judge()
    assert await stands(last) is None


@pytest.mark.parametrize("looks", ["once", "between"])
async def test_two_concurrent_ends_that_each_see_the_other_running_ready_the_job(
    database, store, start_worker, add, judge, stands, ending_transaction, looks
):
    first, second = await add(), await add()
    last = await add(after=[first, second])
    await judge()
    bodies = await start_worker().claim()
    begin_end, in_ending = ending_transaction
    await begin_end(bodies[0], "ours")
    async with raw_connection(database.dsn) as other:
        await other.execute("BEGIN")
        outcome = Outcome(bodies[1].job_id, bodies[1].token, Step.SUCCEED)
        assert (await other._cross(aio_finish, other.asyncpg, [outcome])).written
        for commit in (in_ending, other.execute):
            if looks == "between":
                await judge()
                assert await stands(last) == "after"
            await commit("COMMIT")
    await judge()
    assert await stands(last) is None


async def test_a_rolled_back_end_readies_no_job(start_worker, add, judge, stands, ending_transaction):
    first = await add()
    last = await add(after=[first])
    [body] = await start_worker().claim()
    begin_end, in_ending = ending_transaction
    await begin_end(body, "ours")
    await judge()
    await in_ending("ROLLBACK")
    await judge()
    assert await stands(last) == "after"


@pytest.mark.parametrize("which", ["the job that waits", "the job that it waits for"])
async def test_a_locked_row_delays_no_other_job_and_is_checked_again(database, store, add, judge, stands, end, which):
    first, other = await add(), await add()
    last, others = await add(after=[first]), await add(after=[other])
    async with raw_connection(database.dsn) as psql:
        await psql.execute("BEGIN")
        locked = last if which == "the job that waits" else first
        await psql.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", locked)
        await end(other)
        with trio.fail_after(5):
            await judge()
            left = await ready_after(store)
        assert (left.jobs, left.more) == (0, True)
        assert (await stands(last), await stands(others)) == ("after", None)
        await psql.execute("ROLLBACK")
    await judge()
    assert not (await ready_after(store)).more
    await end(first)
    await judge()
    assert await stands(last) is None


@pytest.mark.slow
async def test_a_locked_table_of_dependencies_is_abandoned_within_seconds(database, store, add, judge, stands):
    """The stager also readies jobs that wait for their time."""
    last = await add(after=[await add()])
    async with raw_connection(database.dsn) as psql:
        await psql.execute("BEGIN; LOCK TABLE dl_job_after IN ACCESS EXCLUSIVE MODE")
        began = trio.current_time()
        with pytest.raises(StoreUnavailable):
            await ready_after(store)
        assert trio.current_time() - began < 5
        await psql.execute("ROLLBACK")
    await judge()
    assert await stands(last) == "after"


# Retry.


async def test_one_that_is_retried_before_the_others_end_counts_by_what_it_comes_to(store, add, judge, stands, end):
    first, second = sorted([await add(), await add()])
    last = await add(after=[first, second])
    await judge()
    await end(second, FAILED)
    await judge()
    await control.retry(store, second, OPERATOR)
    await end(first)
    await judge()
    assert await stands(last) == "after"
    await end(second)
    await judge()
    assert await stands(last) is None


async def test_a_retry_judges_the_job_again(store, add, judge, stands, end, row_of):
    first = await add()
    last = await add(after=[first])
    await end(first, FAILED)
    await judge()
    assert await stands(last) is CANCELED
    await control.retry(store, last, OPERATOR)
    await judge()
    assert await stands(last) is CANCELED
    await control.retry(store, first, OPERATOR)
    assert (await control.retry(store, last, OPERATOR)).waits_for is WaitsFor.AFTER
    await judge()
    assert await stands(last) == "after"
    assert await row_of(last, "error") is None
    await end(first)
    await judge()
    assert await stands(last) is None


async def test_a_retried_job_waits_again_for_one_that_has_been_retried(store, add, judge, stands, end):
    first = await add()
    last = await add(after=[first])
    await end(first)
    await judge()
    await end(last, FAILED)
    await end(first, FAILED)
    await control.retry_many(store, JobFilter(queue="q"), OPERATOR)
    await judge()
    assert await stands(last) == "after"


# Allowed and rejected requests.


async def test_ids_that_no_job_has_are_named(store, raw, add):
    known, unknown = await add(), uuid7()
    with pytest.raises(BadRequest, match=f"no job has the ID {unknown}$") as refused:
        await enqueue(store, [a_job(), a_job(after=[known, unknown])])
    assert refused.value.field == "after"
    with pytest.raises(BadRequest, match=r"and others$"):
        await add(after=[uuid4() for _ in range(9)])
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs") == 1


async def test_jobs_that_wait_for_each_other_in_a_circle_are_refused(store, raw):
    one = a_job()
    two = a_job(after=[one.job_id])
    for circle in ([two, one], [a_job(job_id=one.job_id, after=[two.job_id]), two]):
        with pytest.raises(BadRequest, match="must refer to earlier jobs in the list"):
            await enqueue(store, circle)
    with pytest.raises(BadRequest, match="the ID of the job itself"):
        a_job(job_id=one.job_id, after=[one.job_id])
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs") == 0


def test_the_number_of_jobs_that_one_runs_after_is_bounded():
    with pytest.raises(BadRequest, match="at most 10,000 IDs"):
        a_job(after=[uuid4() for _ in range(MAX_AFTER + 1)])
    with pytest.raises(BadRequest, match="must be cancel or run, not 'stop'"):
        a_job(when_failed="stop")


async def test_a_batch_may_have_jobs_that_run_after_others_of_it(store, judge, stands, end):
    first = a_job()
    second = a_job(after=[first.job_id, first.job_id])
    third = a_job(after=[second.job_id, first.job_id], when_failed="run")
    await enqueue(store, [first, second, third])
    for job in (first, second):
        await judge()
        assert await stands(third.job_id) == "after"
        await end(job.job_id)
    await judge()
    assert await stands(third.job_id) is None


async def test_the_same_request_with_the_same_key_is_the_same_job(store, raw, add):
    one, two = await add(), await add()
    request = {"idempotency_key": "i", "after": [one, two]}
    first = await add(**request)
    assert await add(**request | {"after": [two, one]}) == first
    for other in ({"after": [one]}, {"after": None}, {"when_failed": "run"}):
        with pytest.raises(IdempotencyConflict):
            await add(**request | other)
    same = a_job(after=[one])
    await enqueue(store, [same])
    [again] = await enqueue(store, [same])
    assert (again.job_id, again.created) == (same.job_id, False)
    assert await raw.fetchval("SELECT count(*) FROM dl_job_after") == 3


async def test_a_list_that_is_sent_again_with_its_keys_is_the_same_graph(store, raw):
    def graph():
        first = a_job(idempotency_key="first")
        second = a_job(idempotency_key="second", after=[first.job_id])
        return [first, second, a_job(idempotency_key="third", after=[first.job_id, second.job_id])]

    once = await enqueue(store, graph())
    again = await enqueue(store, graph())
    assert [job.job_id for job in again] == [job.job_id for job in once]
    assert not any(job.created for job in again)
    # Part of the graph existed before.
    await raw.execute("DELETE FROM dl_jobs WHERE idempotency_key = 'third'")
    third = (await enqueue(store, graph()))[2]
    assert third.created
    edges = await raw.fetch("SELECT after_id FROM dl_job_after WHERE job_id = $1", third.job_id)
    assert {edge["after_id"] for edge in edges} == {once[0].job_id, once[1].job_id}


async def test_jobs_added_one_by_one_by_many_callers_keep_their_dependencies(store, add, judge, stands):
    first = await add()
    enqueuer = Enqueuer(store)
    ids = []

    async def add_one(after):
        [added] = await enqueuer.enqueue([a_job(after=after)])
        ids.append((added.job_id, after))

    async with trio.open_nursery() as nursery:
        for n in range(10):
            nursery.start_soon(add_one, [first] if n % 2 else None)
    assert [await stands(job_id) for job_id, _ in ids] == ["after" if after else None for _, after in ids]


# Together with all other waiting reasons.


async def test_both_the_time_and_the_others_hold(store, raw, add, judge, stands, end):
    at = datetime.now(UTC) + timedelta(hours=1)
    first = await add()
    last = await add(after=[first], available_at=at)
    assert (await get_job(store, last)).available_at == at
    assert not (await ready_due(store)).readied
    await end(first)
    await judge()
    job = await get_job(store, last)
    assert (job.waits_for, job.available_at) == (WaitsFor.TIME, at)
    gone = await add(after=[first], available_at=datetime.now(UTC) - timedelta(hours=1))
    await judge()
    assert await stands(gone) is None
    # Its wait for the other jobs does not count as a delay of the queue.
    assert await raw.fetchval("SELECT now() - available_at < '1 min' FROM dl_jobs WHERE job_id = $1", gone)


async def test_a_key_a_pause_and_an_unknown_task_hold_once_the_others_have_ended(
    store, add, judge, stands, end, start_worker
):
    worker = start_worker()
    holder = await add(lock_key="k")
    [body] = await worker.claim()
    first = await add()
    keyed = await add(after=[first], lock_key="k")
    unknown = await add(after=[first], task="u")
    await end(first)
    await judge()
    await control.pause(store, "q", OPERATOR)
    assert await worker.claim() == []
    assert await stands(keyed) is None
    await control.resume(store, "q", OPERATOR)
    assert await worker.claim() == []
    assert (await stands(keyed), await stands(unknown)) == ("lock", None)
    await worker.end(body)
    assert [one.job_id for one in await worker.claim()] == [keyed]
    assert holder == body.job_id


async def test_a_waiting_job_can_be_canceled_and_reprioritized_but_not_run_now(store, add, judge, stands, end):
    first = await add()
    last, others = await add(after=[first]), await add(after=[first])
    await judge()
    with pytest.raises(Conflict, match="it depends on other jobs that have not ended"):
        await control.run_now(store, last, OPERATOR)
    assert await control.run_now_many(store, JobFilter(queue="q"), OPERATOR) == 0
    assert (await control.set_priority(store, last, 7, OPERATOR)).priority == 7
    canceled = await control.cancel(store, others, OPERATOR)
    assert (canceled.status, canceled.available_at) == (CANCELED, canceled.created_at)
    await end(first)
    await judge()
    assert (await stands(last), await stands(others)) == (None, CANCELED)


async def test_an_attempt_that_goes_back_does_not_wait_for_the_others_again(
    store, add, judge, stands, end, start_worker
):
    first = await add()
    last = await add(after=[first])
    await end(first)
    await judge()
    worker = start_worker()
    [body] = await worker.claim()
    await control.retry_many(store, JobFilter(queue="q"), OPERATOR)
    await worker.end(body, Step.RETRY)
    assert await stands(last) is None


# Services that do not support dependencies.


async def test_another_service_that_writes_a_job_that_waits_does_not_make_it_run(raw, add, judge, stands, end, row_of):
    first = await add()
    last = await add(after=[first])
    await judge()
    for statement in (
        "UPDATE dl_jobs SET available_at = now() - interval '1 min' WHERE job_id = $1",
        "UPDATE dl_jobs SET waits_for = NULL WHERE job_id = $1",
        "UPDATE dl_jobs SET waits_for = NULL, available_at = now() WHERE job_id = $1",
        "UPDATE dl_jobs SET waits_for = 'time', available_at = now() + interval '1 h' WHERE job_id = $1",
        "UPDATE dl_jobs SET status = 'canceled', waits_for = NULL WHERE job_id = $1",
        "UPDATE dl_jobs SET status = 'queued', available_at = now() - interval '1 min' WHERE job_id = $1",
    ):
        await raw.execute(statement, last)
        await judge()
        if "canceled" not in statement:
            assert await stands(last) == "after", statement
        claimable = "SELECT job_id FROM dl_jobs WHERE status = 'queued' AND available_at <= now()"
        assert [row["job_id"] for row in await raw.fetch(claimable)] == [first]
    await end(first)
    await judge()
    assert await stands(last) is None


async def test_a_job_that_another_service_runs_and_postpones_readies_no_dependent(raw, add, judge, stands):
    first = await add()
    last = await add(after=[first])
    await judge()
    [claimed] = await raw.fetch(CLAIM)
    assert claimed["job_id"] == first
    await raw.execute(BACK_OFF, first, 0.0)
    await judge()
    assert await stands(last) == "after"
    await raw.execute(CLAIM)
    await raw.execute(FINISH, first)
    await judge()
    assert await stands(last) is None


@pytest.mark.parametrize("columns", [{"waits_for": "'after'"}, {"waits_for": "'after'", "available_at": "'infinity'"}])
async def test_a_job_that_says_it_waits_for_others_and_names_none_does_not_wait_for_ever(add_job, stands, columns):
    assert await stands(await add_job(**columns)) == ("time" if "available_at" in columns else None)


async def test_a_job_whose_edges_were_deleted_by_hand_does_not_wait_for_ever(raw, add, judge, stands, end):
    first, second = await add(), await add()
    last, watching = await add(after=[first]), await add(after=[second])
    await raw.execute("DELETE FROM dl_job_after WHERE job_id = $1", last)
    await judge()
    assert await stands(last) is None
    await raw.execute("DELETE FROM dl_job_after")
    await end(second)
    await judge()
    assert await stands(watching) is None


# Notifications.


@pytest.fixture
async def told(database):
    """Return a function that returns the notifications to the stager since its last call."""
    heard = []
    async with raw_connection(database.dsn) as listener:
        await listener._cross(listener.asyncpg.add_listener, "dl_after", lambda *event: heard.append(event[3]))

        async def told():
            await listener.fetchval("SELECT 1")
            payloads = heard.copy()
            heard.clear()
            return payloads

        yield told


async def test_the_stager_is_notified_only_of_waiting_jobs_and_of_awaited_ends(store, raw, add, judge, end, told):
    first, second, unrelated = await add(), await add(), await add()
    assert await told() == []
    last = await add(after=[first, second])
    assert await told() == [""]
    await judge()
    await end(unrelated, FAILED)
    await end(min(first, second))
    assert await told() == []
    await end(max(first, second), FAILED)
    assert await told() == ["ended"]
    await judge()
    await control.retry(store, last, OPERATOR)
    await raw.execute("UPDATE dl_jobs SET status = 'queued', finished_at = NULL WHERE job_id = $1", first)
    await judge()
    assert await told() == [""]
    await raw.execute("DELETE FROM dl_jobs WHERE job_id = $1", unrelated)
    assert await told() == []
    await raw.execute("DELETE FROM dl_jobs WHERE job_id = $1", first)
    assert await told() == [""]


async def test_the_mark_of_an_awaited_job_is_removed_when_no_job_waits_for_it(store, raw, add, judge, end):
    first = await add()
    last = await add(after=[first])
    await judge()
    await control.cancel(store, last, OPERATOR)
    assert await raw.fetchval("SELECT awaited FROM dl_jobs WHERE job_id = $1", first)
    await end(first)
    await judge()
    assert not await raw.fetchval("SELECT bool_or(awaited) FROM dl_jobs")
    assert not (await ready_after(store)).more


# Views of readers.


async def test_a_job_shows_after_which_it_runs_and_what_those_came_to(store, raw, start_worker, add, judge):
    worker = start_worker()
    first, second = sorted([await add(), await add()])
    for body in await worker.claim():
        good = body.job_id == first
        await worker.end(body, Step.SUCCEED if good else Step.FAIL, result='{"rows": 3}' if good else None)
    last = await add(after=[first, second], when_failed="run")
    [job] = (await list_jobs(store, JobFilter(status=frozenset({Status.QUEUED})))).jobs
    assert job == await get_job(store, last)
    assert (job.after, job.when_failed, job.waits_for) == ([first, second], "run", WaitsFor.AFTER)
    plain = await get_job(store, first)
    assert (plain.after, plain.when_failed) == (None, None)
    results = await results_of(store, last)
    assert {job_id: (one.status, one.result) for job_id, one in results.items()} == {
        first: (SUCCEEDED, {"rows": 3}),
        second: (FAILED, None),
    }
    [queue] = await list_queues(store)
    assert (queue.dependent, queue.ready, queue.delayed) == (1, 0, 0)
    assert await results_of(store, first) == {}


async def test_all_jobs_of_a_root_are_found_together(store, add):
    root = await add()
    children = [await add(root=root) for _ in range(3)]
    last = await add(root=root, after=children)
    await add()
    found = await list_jobs(store, JobFilter(root=root))
    assert {job.job_id for job in found.jobs} == {root, *children, last}
    page = await list_jobs(store, JobFilter(root=root), limit=2)
    assert page.next is not None
    assert await control.cancel_many(store, JobFilter(root=root, status=frozenset({Status.QUEUED})), OPERATOR) == 5


async def test_retention_keeps_jobs_that_others_wait_for(store, raw, add, judge, end):
    first, second = await add(), await add()
    last = await add(after=[first, second])
    await end(first)
    await raw.execute("UPDATE dl_jobs SET finished_at = now() - interval '9 days' WHERE job_id = $1", first)
    assert await prune(store, {SUCCEEDED: 1, CANCELED: 1}) == 0
    await control.cancel(store, last, OPERATOR)
    assert await prune(store, {SUCCEEDED: 1, CANCELED: 1}) == 1


# The work is proportional to the number of jobs and edges.


@pytest.mark.slow
async def test_jobs_that_take_long_to_judge_are_left_for_the_next_look(store, raw, add):
    first = await add()
    for _ in range(25):
        await add(after=[first])
    await raw.execute(
        "CREATE FUNCTION take_long() RETURNS trigger LANGUAGE plpgsql"
        " AS $$ BEGIN PERFORM pg_sleep(0.06); RETURN NEW; END $$;"
        "CREATE TRIGGER take_long BEFORE UPDATE ON dl_jobs FOR EACH ROW"
        " WHEN (OLD.waits_for = 'after') EXECUTE FUNCTION take_long()"
    )
    looks = [await ready_after(store), await ready_after(store)]
    assert [(look.jobs, look.more) for look in looks] == [(20, True), (5, False)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1_200])
async def test_a_failure_ends_a_long_chain_in_batches(store, raw, add, end, number):
    jobs = [a_job()]
    for _ in range(number):
        jobs.append(a_job(after=[jobs[-1].job_id]))
    await enqueue(store, jobs)
    with trio.fail_after(60):
        while (await ready_after(store)).jobs:
            pass
        await end(jobs[0].job_id, FAILED)
        judged = []
        while found := (await ready_after(store)).jobs:
            judged.append(found)
    assert sum(judged) == number
    assert max(judged) <= make_ready.JUDGED
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'canceled'") == number
    error = await raw.fetchval("SELECT error FROM dl_jobs WHERE job_id = $1", jobs[-1].job_id)
    assert error == f"job {jobs[-2].job_id}, which this job depends on, was canceled"
