"""Enqueueing (Q2): all or nothing, the same answer to the same request, and races for one key."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import trio
from conditions import patience_s
from databases import raw_connection

from dataloader.jobs.errors import BadRequest, IdempotencyConflict, StoreUnavailable, Unstorable
from dataloader.jobs.ids import uuid7
from dataloader.jobs.model import NewJob
from dataloader.jobs.states import Status
from dataloader.store.connection.gatherer import MAX_GROUP
from dataloader.store.queue.enqueue import aio_enqueue_within, enqueue, rows_of
from dataloader.store.queue.enqueuer import Enqueuer

COUNT = "SELECT count(*) FROM dl_jobs"


def new(**columns):
    return NewJob(**{"queue": "q", "task": "t"} | columns)


@pytest.mark.requirement("Q2")
async def test_a_job_is_stored_as_requested(store, row_of, journal_of):
    at = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    job = new(
        args={"a": ["ä", None, 1.5]}, idempotency_key="i", lock_key="k", partition_key="p", priority=7, available_at=at,
        max_attempts=2, lease_ttl_sec=9, producer="me", consumer_group="g",
    )  # fmt: skip
    [added] = await enqueue(store, [job])
    assert (added.job_id, added.status, added.created) == (job.job_id, Status.QUEUED, True)
    row = await row_of(job.job_id)
    names = ["queue", "task", "idempotency_key", "lock_key", "partition_key", "priority", "available_at"]
    names += ["max_attempts", "lease_ttl_sec", "producer", "consumer_group"]
    assert {name: row[name] for name in names} == {name: getattr(job, name) for name in names}
    assert row["args"] == '{"a": ["ä", null, 1.5]}'
    assert (row["status"], row["waits_for"], row["attempt"], row["token"]) == ("queued", "time", 0, 0)
    assert await journal_of(job.job_id) == ["queued"]


@pytest.mark.requirement("Q2")
async def test_missing_fields_get_their_defaults(store, raw, row_of):
    job = new()
    await enqueue(store, [job], default_lease_s=33)
    row = await row_of(job.job_id)
    assert (row["lock_key"], row["max_attempts"], row["lease_ttl_sec"]) == (str(job.job_id), 5, 33)
    assert (row["waits_for"], row["available_at"]) == (None, row["created_at"])


@pytest.mark.requirement("Q2")
async def test_a_thousand_jobs_are_answered_in_their_order(store, raw):
    jobs = [new(args={"n": n}, idempotency_key=f"key {-n}" if n % 2 else None) for n in range(1_000)]
    added = await enqueue(store, jobs)
    assert [answer.job_id for answer in added] == [job.job_id for job in jobs]
    assert all(answer.created for answer in added)
    assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'queued'") == 1_000
    again = await enqueue(store, jobs[1::2])
    assert [answer.job_id for answer in again] == [job.job_id for job in jobs[1::2]]
    assert not any(answer.created for answer in again)
    assert await enqueue(store, []) == []


@pytest.mark.requirement("Q2")
async def test_the_same_request_with_the_same_key_is_answered_with_the_first_job(store, raw, row_of):
    first = new(idempotency_key="i", args={"b": 1, "a": 2})
    await enqueue(store, [first])
    # Later changes of the row, the order of the arguments, and other defaults do not matter.
    await raw.execute("UPDATE dl_jobs SET status = 'succeeded', priority = 1, args = '{}', max_attempts = 77")
    [answer] = await enqueue(store, [new(idempotency_key="i", args={"a": 2, "b": 1})], default_lease_s=99)
    assert (answer.job_id, answer.status, answer.created) == (first.job_id, Status.SUCCEEDED, False)
    assert await raw.fetchval(COUNT) == 1


OTHERS = [
    {"queue": "r"}, {"task": "u"}, {"args": {"a": 2}}, {"lock_key": "k"}, {"partition_key": "p"}, {"priority": 1},
    {"available_at": datetime(2030, 1, 1, tzinfo=UTC)}, {"max_attempts": 5}, {"lease_ttl_sec": 60},
    {"producer": "p"}, {"consumer_group": "g"},
]  # fmt: skip


@pytest.mark.requirement("Q2")
async def test_another_request_with_the_same_key_is_a_conflict(store, raw):
    first = new(idempotency_key="i", args={"a": 1})
    await enqueue(store, [first])
    for other in OTHERS:
        with pytest.raises(IdempotencyConflict) as caught:
            await enqueue(store, [new(**{"idempotency_key": "i", "args": {"a": 1}} | other)])
        assert (caught.value.key, caught.value.job_id) == ("i", first.job_id), other
        assert await raw.fetchval(COUNT) == 1, other


@pytest.mark.requirement("Q2")
@pytest.mark.parametrize("by", ["key", "id"])
@pytest.mark.parametrize("conflict", ["in the table", "in the batch"])
async def test_a_conflict_anywhere_in_a_batch_adds_nothing(store, raw, by, conflict):
    job_id = uuid7()
    same = {"idempotency_key": "i"} if by == "key" else {"job_id": job_id}
    first, second = new(**same), new(**same, args={"other": 1})
    if conflict == "in the table":
        await enqueue(store, [first])
        batch = [new(), second, new(idempotency_key="j")]
    else:
        batch = [new(), first, second]
    before = await raw.fetchval(COUNT)
    with pytest.raises(BadRequest if (by, conflict) == ("id", "in the batch") else IdempotencyConflict):
        await enqueue(store, batch)
    assert await raw.fetchval(COUNT) == before


@pytest.mark.requirement("Q2")
async def test_a_key_twice_in_a_batch_is_one_job_answered_twice(store, raw):
    jobs = [new(idempotency_key="i"), new(), new(idempotency_key="i")]
    answers = await enqueue(store, jobs)
    assert [answer.created for answer in answers] == [True, True, False]
    assert answers[0].job_id == answers[2].job_id == jobs[0].job_id
    assert await raw.fetchval(COUNT) == 2


@pytest.mark.requirement("Q2")
async def test_the_same_job_sent_again_by_its_id_is_one_job(store, raw):
    job = new(args={"a": 1})
    await enqueue(store, [job])
    [answer] = await enqueue(store, [job])
    assert (answer.job_id, answer.created) == (job.job_id, False)
    assert await raw.fetchval(COUNT) == 1


@pytest.mark.requirement("Q2")
@pytest.mark.parametrize("within", [False, True], ids=["alone", "in a transaction"])
async def test_a_list_with_a_known_id_answers_it_and_adds_the_others(store, raw, within):
    jobs = [new() for _ in range(3)]
    await enqueue(store, jobs[1:2])
    if within:
        await raw.execute("BEGIN")
        answers = await raw.run(aio_enqueue_within, jobs, rows_of(jobs, 60))
        await raw.execute("COMMIT")
    else:
        answers = await enqueue(store, jobs)
    assert [(answer.job_id, answer.created) for answer in answers] == [(job.job_id, job is not jobs[1]) for job in jobs]
    assert await raw.fetchval(COUNT) == 3


@pytest.mark.requirement("Q2")
@pytest.mark.requirement("S3")
async def test_a_list_with_a_refused_job_of_a_unique_task_adds_nothing(store, raw):
    await raw.execute(
        "INSERT INTO dl_tasks (task, uniqueness, layout, declared_by)"
        """ VALUES ('one', '{"key": ["year"], "duplicates": "waiting"}', 2, 'w')"""
    )
    with pytest.raises(BadRequest, match=r"^args\.year: is required"):
        await enqueue(store, [new(), new(task="one"), new()])
    assert await raw.fetchval(COUNT) == 0
    answers = await enqueue(store, [new(), new(task="one", args={"year": 1}), new(task="one", args={"year": 1})])
    assert [answer.did for answer in answers] == ["added", "added", "kept"]


@pytest.mark.requirement("Q1")
@pytest.mark.requirement("Q2")
async def test_a_key_of_a_foreign_services_row_is_compared_by_its_columns(store, add_job):
    job_id = await add_job(idempotency_key="'i'", lock_key="'k'", args="""'{"a": 1}'""")
    for same in (new(idempotency_key="i", lock_key="k", args={"a": 1}), new(idempotency_key="i", args={"a": 1})):
        [answer] = await enqueue(store, [same])
        assert (answer.job_id, answer.created) == (job_id, False)
    for other in ({"args": {"a": 2}}, {"lock_key": "l"}, {"task": "u"}, {"queue": "r"}, {"partition_key": "p"}):
        with pytest.raises(IdempotencyConflict):
            await enqueue(store, [new(**{"idempotency_key": "i", "lock_key": "k", "args": {"a": 1}} | other)])
    await add_job(idempotency_key="'deep'", args="(repeat('[', 990) || repeat(']', 990))::jsonb")
    with pytest.raises(IdempotencyConflict):
        await enqueue(store, [new(idempotency_key="deep")])


@pytest.mark.requirement("Q2")
@pytest.mark.parametrize("batch", [1, 2])
async def test_the_loser_of_a_race_for_a_key_is_given_the_winner(database, store, raw, until_blocked, batch):
    winner = uuid7()
    await raw.execute("BEGIN")
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, idempotency_key) VALUES ($1, 'q', 't', 'k', 'i')", winner
    )
    answers = []

    async def lose():
        answers.extend(await enqueue(store, [new(idempotency_key="i"), new()][:batch]))

    with trio.fail_after(patience_s()):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose)
            await until_blocked()
            await raw.execute("COMMIT")
    assert [(answer.job_id == winner, answer.created) for answer in answers] == [(True, False), (False, True)][:batch]


@pytest.mark.full
@pytest.mark.requirement("Q2")
@pytest.mark.parametrize("batch", [1, 2])
async def test_enqueue_gives_up_soon_on_a_key_that_another_transaction_holds(store, raw, batch):
    await raw.execute("BEGIN")
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, idempotency_key) VALUES ($1, 'q', 't', 'k', 'i')", uuid7()
    )
    jobs = [new(idempotency_key="i"), new()][:batch]
    with trio.fail_after(patience_s()), pytest.raises(StoreUnavailable, match="lock timeout"):
        await enqueue(store, jobs)
    assert await raw.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted") == 0
    await raw.execute("ROLLBACK")
    assert [answer.created for answer in await enqueue(store, jobs)] == [True] * batch
    assert await store.run(_lock_timeout) == "0"


async def _lock_timeout(connection):
    return await connection.fetchval("SHOW lock_timeout")


@pytest.mark.requirement("Q2")
async def test_when_the_winner_rolls_back_the_other_takes_its_place(store, raw, until_blocked):
    await raw.execute("BEGIN")
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, idempotency_key) VALUES ($1, 'q', 't', 'k', 'i')", uuid7()
    )
    answers = []

    async def wait():
        answers.extend(await enqueue(store, [new(idempotency_key="i")]))

    with trio.fail_after(patience_s()):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await until_blocked()
            await raw.execute("ROLLBACK")
    assert answers[0].created


@pytest.mark.slow
@pytest.mark.requirement("Q2")
@pytest.mark.parametrize("batch", [1, 2])
async def test_a_winner_that_is_deleted_meanwhile_is_replaced(store, raw, batch):
    await enqueue(store, [new(idempotency_key="i")])
    # A trigger deletes the winner between the first insertion and the read of the winner.
    await raw.execute("""
        CREATE SEQUENCE tries;
        CREATE FUNCTION delete_winner() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
          IF nextval('tries') = 1 THEN DELETE FROM dl_jobs WHERE idempotency_key = 'i'; END IF;
          RETURN NULL;
        END $$;
        CREATE TRIGGER delete_winner AFTER INSERT ON dl_jobs FOR EACH STATEMENT EXECUTE FUNCTION delete_winner();
    """)
    answers = await enqueue(store, [new(idempotency_key="i", priority=1 if batch == 1 else 100), new()][:batch])
    # In a batch the deletion is rolled back with the rest, so the winner is found the second time.
    assert [answer.created for answer in answers] == ([True] if batch == 1 else [False, True])
    assert await raw.fetchval("SELECT last_value FROM tries") > 1
    assert await raw.fetchval(COUNT) == batch


@pytest.mark.requirement("Q2")
async def test_batches_with_the_same_keys_in_any_order_do_not_deadlock(database, store, raw):
    jobs = [new(idempotency_key=f"key {n}") for n in range(300)]
    twins = [new(idempotency_key=f"key {n}") for n in reversed(range(300))]
    answers = {}

    async def send(name, batch):
        answers[name] = {
            job.idempotency_key: answer for job, answer in zip(batch, await enqueue(store, batch), strict=True)
        }

    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    before = await raw.fetchval(deadlocks)
    with trio.fail_after(patience_s()):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, "one", jobs)
            nursery.start_soon(send, "two", twins)
    assert await raw.fetchval(COUNT) == 300
    for key, answer in answers["one"].items():
        other = answers["two"][key]
        assert answer.job_id == other.job_id
        assert answer.created != other.created
    async with raw_connection(database.dsn) as fresh:
        assert await fresh.fetchval(deadlocks) == before


@pytest.mark.requirement("Q2")
async def test_many_concurrent_requests_with_one_key_make_one_job(store, raw):
    answers = []

    async def send():
        answers.extend(await enqueue(store, [new(idempotency_key="i")]))

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(send)
    assert sum(answer.created for answer in answers) == 1
    assert len({answer.job_id for answer in answers}) == 1
    assert await raw.fetchval(COUNT) == 1


@pytest.mark.requirement("Q2")
@pytest.mark.parametrize(
    "args", [{"a": {1, 2}.__class__}, {"a": "x\0y"}, {"a": "x" * 17_000_000}], ids=["no JSON", "NUL", "too big"]
)
async def test_arguments_that_cannot_be_stored_are_refused(store, raw, args):
    with pytest.raises(BadRequest, match="args"):
        await enqueue(store, [new(), new(args=args)])
    assert await raw.fetchval(COUNT) == 0


@pytest.mark.requirement("Q2")
async def test_an_instant_is_compared_as_an_instant(store):
    at = datetime(2030, 1, 1, 12, tzinfo=UTC)
    await enqueue(store, [new(idempotency_key="i", available_at=at)])
    from_elsewhere = at.astimezone(tz=datetime.strptime("+0530", "%z").tzinfo)
    [answer] = await enqueue(store, [new(idempotency_key="i", available_at=from_elsewhere)])
    assert not answer.created
    with pytest.raises(IdempotencyConflict):
        await enqueue(store, [new(idempotency_key="i", available_at=at + timedelta(microseconds=1))])


BLOCK = "BEGIN; LOCK TABLE dl_jobs IN EXCLUSIVE MODE"
STATEMENTS = "SELECT count(DISTINCT xmin::text) FROM dl_jobs"


async def gathered(enqueuer, jobs, raw, until_blocked):
    """Enqueue the first, and while it waits the others, each from a separate caller; return the answers."""
    answers = {}

    async def one(job):
        try:
            [answers[job.job_id]] = await enqueuer.enqueue([job])
        except Unstorable as error:
            answers[job.job_id] = error

    await raw.execute(BLOCK)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, jobs[0])
        await until_blocked()
        for job in jobs[1:]:
            nursery.start_soon(one, job)
        await trio.testing.wait_all_tasks_blocked()
        await raw.execute("COMMIT")
    return answers


async def test_jobs_that_come_one_by_one_during_a_statement_are_added_by_the_next(store, raw, until_blocked):
    jobs = [new() for _ in range(20)]
    answers = await gathered(Enqueuer(store), jobs, raw, until_blocked)
    assert all(answers[job.job_id].created for job in jobs)
    assert await raw.fetchval(COUNT) == len(jobs)
    assert await raw.fetchval(STATEMENTS) == 2


async def test_a_group_has_its_bound(store, raw, until_blocked):
    jobs = [new() for _ in range(MAX_GROUP + 11)]
    answers = await gathered(Enqueuer(store), jobs, raw, until_blocked)
    assert len(answers) == await raw.fetchval(COUNT) == len(jobs)
    assert await raw.fetchval(STATEMENTS) == 3


async def test_a_job_that_is_there_already_is_told_so_in_a_group_as_well(store, raw, until_blocked):
    enqueuer = Enqueuer(store)
    known, others = new(), [new() for _ in range(5)]
    await enqueuer.enqueue([known])
    answers = await gathered(enqueuer, [new(), known, *others], raw, until_blocked)
    assert {job_id for job_id, answer in answers.items() if not answer.created} == {known.job_id}
    assert await raw.fetchval(COUNT) == 7


async def test_a_job_that_cannot_be_stored_spoils_no_other_of_its_group(store, raw, until_blocked):
    await raw.execute("ALTER TABLE dl_jobs ADD CONSTRAINT no_bad_ones CHECK (task <> 'bad')")
    jobs = [new(), new(task="bad"), new()]
    answers = await gathered(Enqueuer(store), [new(), *jobs], raw, until_blocked)
    assert isinstance(answers[jobs[1].job_id], Unstorable)
    assert answers[jobs[0].job_id].created
    assert answers[jobs[2].job_id].created


async def test_the_callers_of_a_group_learn_that_the_database_is_away(store, raw, until_blocked):
    enqueuer = Enqueuer(store)
    errors = []

    async def one():
        with pytest.raises(StoreUnavailable) as error:
            await enqueuer.enqueue([new()])
        errors.append(error.value)

    await raw.execute(BLOCK)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(one)
        await until_blocked()
        await store.cut()
    assert len(set(map(id, errors))) == 3
    await raw.execute("ROLLBACK")
    assert await raw.fetchval(COUNT) == 0


async def test_a_cancelled_caller_removes_no_other_callers_job(store, raw, until_blocked):
    enqueuer = Enqueuer(store)
    first, second, third = new(), new(), new()
    await raw.execute(BLOCK)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(enqueuer.enqueue, [first])
        await until_blocked()
        leaving = trio.CancelScope()

        async def leave():
            with leaving:
                await enqueuer.enqueue([second])

        # It is the first of the next group, and sends the group's statement.
        nursery.start_soon(leave)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(enqueuer.enqueue, [third])
        await trio.testing.wait_all_tasks_blocked()
        leaving.cancel()
        await raw.execute("COMMIT")
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE job_id = $1", third.job_id) == 1


async def test_a_caller_that_is_already_cancelled_adds_nothing(store, raw):
    with trio.move_on_after(0) as scope:
        await Enqueuer(store).enqueue([new()])
    assert scope.cancelled_caught
    assert await raw.fetchval(COUNT) == 0
