"""Fields of a request for a job: stored, hashed and shown to handlers as `JOB_FIELDS` describes them.

A field that is added to `NewJob` is tested here without a change. A failure names the ways of adding, or of claiming, a
job that lose the field.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import attrs
import msgspec
import pytest

from dataloader.actors.handles import fields_of
from dataloader.jobs.errors import IdempotencyConflict
from dataloader.jobs.handler_calls import EnqueueJob
from dataloader.jobs.ids import uuid7
from dataloader.jobs.job import HANDLE_FIELDS
from dataloader.jobs.model import JOB_FIELDS, JobOptions, JobRecord, NewJob
from dataloader.jobs.tasks import Tasks
from dataloader.store.queue import enqueue, job_inserts, reads, unique_inserts
from dataloader.store.queue.enqueue import row_of
from dataloader.store.queue.enqueuer import Enqueuer
from dataloader.store.queue.job_inserts import ROW_COLUMNS, aio_insert_started
from dataloader.store.queue.task_rows import aio_declare
from dataloader.store.queue.unique_inserts import aio_add_planned

pytestmark = pytest.mark.requirement("Q2")

HASHES = Path(__file__).with_name("statement_hashes.json")
AT = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
ONE_ID = "0197a1b2-c3d4-7e5f-8a6b-9c0d1e2f3a4b"
VALUES = {
    "queue": ("q", "r"),
    "task": ("t", "u"),
    "args": ({"id": 1}, {"id": 2}),
    "available_at": (AT, AT + timedelta(days=1)),
    "lease_ttl_sec": (7, 8),
    "when_failed": ("run", "cancel"),
    "version": (5.0, 6.0),
}
"""Two values of fields whose type does not tell them."""
ASK = "SELECT job_id FROM dl_enqueue_job({})"


def values(name):
    """Return two values of a field."""
    texts = f"{name} 1", f"{name} 2"
    return VALUES.get(name) or {str: texts, int: (3, 4)}.get(JOB_FIELDS[name].kind) or (uuid7(), uuid7())


def whole(*left_out, **fields):
    """Return the first value of each field, besides `after`."""
    return {name: values(name)[0] for name in JOB_FIELDS if name not in {"after", *left_out}} | fields


def new(**fields):
    return NewJob(**{"queue": "q", "task": "t", "args": {"id": 1}} | fields)


@pytest.fixture
async def ways(store, raw):
    """Return functions that add a job of the given fields, and the names of the fields that a job so added can't have.

    Jobs of the task `unique` are unique.
    """
    tasks = Tasks()
    tasks.task("unique", queue="q", unique=("id",), duplicates="update")(print)
    await store.run(aio_declare, tasks.values(), "w")

    async def one(fields):
        [added] = await enqueue.enqueue(store, [NewJob(**fields)])
        return added.job_id

    async def many(fields):
        added, _ = await enqueue.enqueue(store, [NewJob(**fields), new()])
        return added.job_id

    async def group(fields):
        [added] = await Enqueuer(store).enqueue([NewJob(**fields)])
        return added.job_id

    async def graph(fields):
        first = new()
        _, added = await enqueue.enqueue(store, [first, NewJob(**fields, after=[first.job_id])])
        return added.job_id

    async def started(fields):
        [job_id], _, _ = await store.run(aio_insert_started, [row_of(NewJob(**fields), 60)], ["q"], "w")
        return job_id

    async def update(fields):
        [added] = await enqueue.enqueue(store, [new(task="unique")])
        [updated] = await enqueue.enqueue(store, [NewJob(**fields | {"version": 2.0**40})])
        assert (updated.job_id, updated.did) == (added.job_id, "updated")
        return added.job_id

    async def schedule(fields):
        rows = [row_of(NewJob(**fields), 60)]
        [job_id], _ = await store.run(aio_add_planned, rows, [("nightly", AT, None)])
        return job_id

    async def sql(fields):
        names = [name for name in fields if name != "job_id"]
        call = ASK.format(", ".join(f"{name} => ${n}" for n, name in enumerate(names, 1)))
        given = [json.dumps(fields[name]) if name == "args" else fields[name] for name in names]
        return await raw.fetchval(call, *given)

    async def sql_graph(fields):
        return await sql(fields | {"after": [(await enqueue.enqueue(store, [new()]))[0].job_id]})

    alone = "when_failed", "version"
    return {
        "one": (one, alone),
        "many": (many, alone),
        "group": (group, (*alone, "idempotency_key")),
        "graph": (graph, ("version", "available_at")),
        "started": (started, (*alone, "root", "available_at")),
        "unique": (one, ("when_failed", "task")),
        "unique of many": (many, ("when_failed", "task")),
        "update": (update, ("when_failed", "task", "job_id", "idempotency_key", "root", "version", "available_at")),
        "schedule": (schedule, (*alone, "root")),
        "sql": (sql, (*alone, "job_id")),
        "sql, unique": (sql, ("when_failed", "task", "job_id")),
        "sql, graph": (sql_graph, ("version", "job_id", "available_at")),
    }


COLUMNS = {"root": "root_id", "version": "requested_version"}


async def test_each_field_is_stored_whichever_way_a_job_is_added(ways, raw, row_of):
    lost = {}
    for way, (add, left_out) in ways.items():
        fields = whole(*left_out) | ({"task": "unique"} if "task" in left_out else {})
        row = await row_of(await add(fields))
        row["args"] = json.loads(row["args"])
        lost[way] = [name for name, value in fields.items() if row[COLUMNS.get(name, name)] != value and name != "task"]
        await raw.execute("TRUNCATE dl_jobs CASCADE")
    assert lost == {way: [] for way in ways}


async def test_two_requests_with_one_key_are_the_same_as_each_field_says(ways, store):
    """A field that is hashed only if it is given is left out of the first request."""
    others = [(await enqueue.enqueue(store, [new()]))[0].job_id for _ in range(2)]
    found = {}
    for way, name in itertools.product(("one", "sql"), JOB_FIELDS):
        if name == "idempotency_key" or (way, name) == ("sql", "job_id"):
            continue
        add, _ = ways[way]
        first = {"queue": "q", "task": "unique" if name == "version" else "t", "args": {"id": way}}
        first |= {"idempotency_key": f"{name} {way}"} | ({"after": others[:1]} if name == "when_failed" else {})
        # The second value of `when_failed` is its default.
        differ = {"after": others[1:]} if name == "after" else {name: values(name)[name != "when_failed"]}
        same = await add(first)
        try:
            found[way, name] = await add(first | differ) != same
        except (IdempotencyConflict, asyncpg.UniqueViolationError):
            found[way, name] = True
        assert await add(first) == same
    assert found == {(way, name): JOB_FIELDS[name].hashed != "never" for way, name in found}
    assert found.keys() >= {("sql", name) for name in JOB_FIELDS.keys() - {"idempotency_key", "job_id"}}


def test_requests_without_later_fields_keep_the_hash_that_the_database_has():
    first = NewJob(task="t")
    every = NewJob(
        task="t", queue="q", args={"b": [1, 2.5], "a": "x"}, lock_key="k", partition_key="p", priority=3,
        available_at=AT, max_attempts=4, lease_ttl_sec=9, producer="me", consumer_group="g",
        after=[ONE_ID], when_failed="run", version=5,
    )  # fmt: skip
    assert [enqueue._request_hash(job).hex()[:16] for job in (first, every)] == ["540326a8b5bd8574", "31a64e2338ba0774"]


async def test_a_handler_sees_the_fields_that_it_should_however_its_job_was_claimed(
    ways, store, start_worker, general_claims_only
):
    add, _ = ways["one"]
    worker, lost = start_worker(), {}
    for claim in ("started", "plain", "general"):
        # Only general claims serve jobs with a key, and those of unique tasks, which alone have a version.
        left_out = () if claim == "general" else ("lock_key", "version")
        fields = whole("when_failed", "available_at", "idempotency_key", *left_out, job_id=uuid7())
        if claim == "started":
            _, [job], _ = await store.run(aio_insert_started, [row_of(NewJob(**fields), 60)], ["q"], "w")
        else:
            if claim == "general":
                general_claims_only()
                fields["task"] = "unique"
            await add(fields)
            [job] = await worker.claim(tasks=("t", "unique"))
        seen = fields_of(job) | {"args": json.loads(job.args)}
        lost[claim] = [name for name in fields if JOB_FIELDS[name].is_seen and seen.get(name) != fields[name]]
    assert lost == {claim: [] for claim in lost}


def test_every_class_with_the_fields_of_a_job_has_all_of_them():
    assert {field.name for field in attrs.fields(NewJob)} == JOB_FIELDS.keys()
    assert JobOptions.__annotations__.keys() == JOB_FIELDS.keys() - {"task", "args"}
    assert {field.name for field in attrs.fields(JobRecord)} >= JOB_FIELDS.keys()
    assert {name for name, field in JOB_FIELDS.items() if field.is_seen} == set(HANDLE_FIELDS) & JOB_FIELDS.keys()


def test_a_handler_in_another_process_can_enqueue_a_job_with_every_field():
    call = EnqueueJob(NewJob(**whole(after=[uuid7()])))
    assert msgspec.json.decode(msgspec.json.encode(call), type=EnqueueJob).job == call.job


def test_a_row_has_the_values_of_its_columns_in_their_order():
    job = NewJob(**whole(after=[uuid7()]))
    row = dict(zip(ROW_COLUMNS, row_of(job, 60), strict=True))
    row["args"] = json.loads(row["args"])
    columns = {field.column: getattr(job, name) for name, field in JOB_FIELDS.items() if field.column is not None}
    assert {name: row[name] for name in columns} == columns


def test_statements_that_add_or_read_a_job_are_unchanged():
    """Their plans are tested and their speed is measured. A change is deliberate: write the new hashes."""
    statements = {
        f"{module.__name__.rpartition('.')[2]}.{name}": value
        for module in (job_inserts, unique_inserts, reads)
        for name, value in vars(module).items()
        if name.startswith(("_ADD_", "_SELECT_")) or (module is unique_inserts and name == "_ADD")
    }
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(statements.items())}
    assert hashes == json.loads(HASHES.read_text())
