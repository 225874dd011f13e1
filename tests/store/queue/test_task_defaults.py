"""Settings of a task apply to its jobs in every way of enqueueing; only the database fills them in."""

from __future__ import annotations

import attrs
import msgspec
import pytest
import trio

from dataloader import Tasks
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.ids import uuid7
from dataloader.jobs.model import NewJob
from dataloader.store.queue.enqueue import enqueue
from dataloader.store.queue.enqueuer import Enqueuer
from dataloader.store.queue.task_rows import aio_declare

pytestmark = pytest.mark.requirement("Q2")

OWN = {"queue": "own", "priority": 7, "lock_key": "rates:{year}", "max_attempts": 2, "lease_ttl_sec": 9}
ROWS = "SELECT task, queue, priority, lock_key, max_attempts, lease_ttl_sec FROM dl_tasks ORDER BY task"


def declared(**settings):
    tasks = Tasks()
    tasks.task("t", **settings)(print)
    return tasks.values()


@pytest.fixture
def declare(store):
    async def declare(worker="w", **settings):
        await store.run(aio_declare, declared(**settings), worker)

    return declare


@pytest.fixture
def enqueue_by(store, raw, row_of):
    """Return a function that adds a job from Python, singly or not, or by SQL, and returns its comparable columns."""

    async def by(way, args=None, **options):
        if way == "sql":
            names = ", ".join(f"{name} => ${n}" for n, name in enumerate(options, 3))
            call = f"SELECT dl_enqueue($1, $2{', ' + names if names else ''})"
            job_id = await raw.fetchval(call, "t", msgspec.json.encode(args or {}).decode(), *options.values())
        else:
            job = NewJob(task="t", args=args or {}, **options)
            others = [NewJob(task="other", queue="q")] if way == "among others" else []
            job_id = (await enqueue(store, [*others, job]))[-1].job_id
        row = await row_of(job_id)
        assert row["available_at"] == row["created_at"]
        own = row["lock_key"] == str(job_id)
        for name in ("job_id", "created_at", "available_at"):
            del row[name]
        return row | {"lock_key": None if own else row["lock_key"]}

    return by


WAYS = ("alone", "among others", "sql")


async def test_a_job_is_the_same_however_it_is_enqueued(declare, enqueue_by):
    await declare(**OWN)
    for options in ({}, {"queue": "q", "priority": 3, "lock_key": "k", "max_attempts": 4, "lease_ttl_sec": 33}):
        rows = [await enqueue_by(way, {"year": 1999}, **options) for way in WAYS]
        assert rows[0] == rows[1] == rows[2]
        assert {name: rows[0][name] for name in OWN} == OWN | {"lock_key": "rates:1999"} | options
        assert rows[0]["keyed"]


async def test_a_task_without_defaults_has_those_of_the_queue(declare, enqueue_by):
    await declare()
    rows = [await enqueue_by(way, queue="q") for way in WAYS]
    assert rows[0] == rows[1] == rows[2]
    expected = {"queue": "q", "priority": 100, "lock_key": None, "max_attempts": 5, "lease_ttl_sec": 60}
    assert {name: rows[0][name] for name in OWN} == expected
    assert not rows[0]["keyed"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_a_job_without_a_queue_is_refused_where_its_task_has_none(way, declare, enqueue_by, raw):
    with pytest.raises(
        Exception, match=r'the task "t" has no queue; no process has declared it yet: start .* or set queue'
    ):
        await enqueue_by(way)
    await declare(max_attempts=3)
    with pytest.raises(Exception, match=r'queue: is required, because the task "t" has no queue($|\n)'):
        await enqueue_by(way)
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "args", "key"),
    [
        ("rates:{year}", {"year": 1999}, "rates:1999"),
        ("{a}{b}{a}", {"a": "{b}", "b": True}, "{b}true{b}"),
        ("{n}", {"n": 1.50}, "1.5"),
        ("{n}", {"n": 7.0}, "7"),
        ("all", {}, "all"),
        (("source", "year"), {"source": 'a", "b', "year": 7.0}, 't:["a\\", \\"b", 7]'),
        (("a",), {"a": "two\nlines"}, 't:["two\\nlines"]'),
    ],
)
async def test_a_lock_key_is_made_of_the_args(spec, args, key, declare, enqueue_by):
    await declare(queue="q", lock_key=spec)
    assert [(await enqueue_by(way, args))["lock_key"] for way in WAYS] == [key] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "refusal"),
    [
        ({}, r'args\.year: is required as a string, a number or a boolean for the lock_key of the task "t"'),
        ({"year": None}, r"args\.year: is required as a string"),
        ({"year": [1]}, r"args\.year: is required as a string"),
        ({"year": "two\nlines"}, r'lock_key: must have 1 to 512 characters on one line.* not "rates:two\\nlines"'),
        ({"year": "x" * 600}, r'lock_key: must have 1 to 512 characters .* not "rates:xxxx'),
    ],
    ids=["missing", "null", "a list", "two lines", "too long"],
)  # fmt: skip
async def test_args_that_make_no_key_are_refused_by_the_field_s_name(args, refusal, declare, enqueue_by):
    await declare(queue="q", lock_key="rates:{year}")
    for way in WAYS:
        with pytest.raises(Exception, match=refusal):
            await enqueue_by(way, args)
        assert (await enqueue_by(way, args, lock_key="k"))["lock_key"] == "k", way


async def test_one_that_is_refused_does_not_keep_those_out_that_came_with_it(store, declare, raw):
    await declare(queue="own", lock_key="rates:{year}")
    enqueuer, answers = Enqueuer(store), []

    async def add(args):
        try:
            [answer] = await enqueuer.enqueue([NewJob(task="t", args=args)])
            answers.append(answer.queue)
        except BadRequest as error:
            answers.append(error.field)

    async with trio.open_nursery() as nursery:
        for year in (1, None, 2, 3):
            nursery.start_soon(add, {"year": year})
    assert sorted(answers) == ["args.year", "own", "own", "own"]


async def test_many_jobs_are_added_in_their_order(store, raw, declare):
    await declare(queue="own")
    jobs = [NewJob(task="t" if n % 3 else f"u{n}", queue="q") for n in range(300)]
    await enqueue(store, jobs)
    rows = await raw.fetch("SELECT job_id FROM dl_job_events ORDER BY event_id")
    assert [row["job_id"] for row in rows] == [job.job_id for job in jobs]


async def test_the_last_process_to_start_wins_and_unchanged_defaults_are_not_written(declare, raw):
    await declare(**OWN)
    [before] = await raw.fetch("SELECT xmin, * FROM dl_tasks")
    await declare("another", **OWN)
    assert await raw.fetch("SELECT xmin, * FROM dl_tasks") == [before]
    await declare("another", queue="other", lock_key=["a", "b"])
    assert await raw.fetch(ROWS) == [("t", "other", None, '["a", "b"]', None, None)]
    assert await raw.fetchval("SELECT declared_by FROM dl_tasks") == "another"


async def test_a_program_that_knows_fewer_settings_leaves_the_row_of_a_newer_one_alone(declare, raw):
    await declare(**OWN)
    await raw.execute("UPDATE dl_tasks SET layout = layout + 1")
    await declare(queue="older")
    assert await raw.fetchval("SELECT queue FROM dl_tasks") == "own"


async def test_the_same_key_without_the_queue_is_another_request(store, declare):
    await declare(**OWN)
    first = NewJob(task="t", args={"year": 1}, idempotency_key="i")
    await enqueue(store, [first])
    [again] = await enqueue(store, [attrs.evolve(first, job_id=uuid7())])
    assert (again.job_id, again.created, again.queue) == (first.job_id, False, "own")
