"""Enqueue jobs (Q2): one statement adds one job or a thousand, with their first events.

Values that a request leaves out are those of the task in `dl_tasks`, or else those of the queue. Only this statement
and `dl_enqueue` fill them in, so that a job does not depend on the way in which it is enqueued.

A job that is sent again, by its `idempotency_key` or by its own ID, is answered with the first one. This takes two
statements: insert … on conflict do nothing, and then one with a new snapshot that reads the winner (in one statement,
the loser of a race sees nothing). Compared is a hash of the request as sent, kept in the row, since the row itself
changes later. Rows of other services have no such hash, and the hash of `dl_enqueue` is made of JSON as PostgreSQL
writes it: these rows are compared by their columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from operator import attrgetter
from typing import Any, Final
from uuid import UUID

import attrs
import msgspec
import trio

from dataloader.jobs.errors import BadRequest, IdempotencyConflict, StoreUnavailable
from dataloader.jobs.json_values import args_json
from dataloader.jobs.model import AS_GIVEN, DEFAULT_LEASE_S, DEFAULT_PRIORITY, JOB_FIELDS, Enqueued, NewJob
from dataloader.jobs.states import Status
from dataloader.jobs.task import check_task
from dataloader.jobs.text import shown_json
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.job_edges import aio_add_edges, check_order
from dataloader.store.queue.job_inserts import (
    ARGS,
    HASH,
    IDEMPOTENCY_KEY,
    JOB_ID,
    VERSION,
    Row,
    aio_insert,
    aio_insert_all,
)
from dataloader.store.queue.unique_inserts import KeyTaken, Stand, aio_add_unique

ANSWER_S: Final = 12.0
"""Seconds after which a trigger has an answer in any case."""

_ROWS_IN_A_TURN: Final = 50
"""Number of jobs of a long list that are converted to rows before other Trio tasks run."""
_given: Final = attrgetter(*AS_GIVEN)
_HASHED: Final = [name for name, field in JOB_FIELDS.items() if field.hashed == "always"]
_PRIORITY, _AVAILABLE_AT = map(_HASHED.index, ("priority", "available_at"))
_hashed: Final = attrgetter(*_HASHED)
_HASHED_IF_GIVEN: Final = [
    name
    for name, field in JOB_FIELDS.items()
    if field.hashed == "if given" and name not in {"after", "when_failed", "version"}
]
"""Fields that are hashed with their names if they are given. Requests without them keep the hashes in the database."""
# With a synchronous standby: write a message to the log. The answer waits until the standby has it, and with it all
# earlier commits.
_REPLICATE: Final = """
SELECT pg_logical_emit_message(true, 'dataloader', '') WHERE current_setting('synchronous_standby_names') <> ''
"""
_WINNERS: Final = """
SELECT idempotency_key, job_id, status::text AS status, request_hash, queue, task, lock_key, keyed, partition_key,
       args::text AS args
FROM dl_jobs WHERE idempotency_key = ANY ($1::text[]) OR job_id = ANY ($2::uuid[])
"""


async def enqueue(
    database: Database,
    jobs: Sequence[NewJob],
    *,
    default_lease_s: int = DEFAULT_LEASE_S,
) -> list[Enqueued]:
    """Add `jobs`, all or none; return the answers in their order.

    A job with a known `idempotency_key` is not added: its answer is the first job with the key, if the request is the
    same. Raises `IdempotencyConflict` if it differs. Raises `BadRequest` if args are not valid JSON or do not yield a
    key, if neither the job nor its task has a queue, or if an ID occurs twice. Raises `StoreUnavailable` if the
    database does not answer; send the jobs again with the same keys or IDs.
    """
    if not jobs:
        return []
    if len({job.job_id for job in jobs}) < len(jobs):
        raise BadRequest("jobs", "contains two jobs with the same job_id")
    check_order(jobs)
    rows = []
    for job in jobs:
        rows.append(row_of(job, default_lease_s))
        if len(rows) % _ROWS_IN_A_TURN == 0:
            await trio.lowlevel.checkpoint()
    return await database.write_with_deadline(ANSWER_S, _aio_enqueue, list(jobs), rows)


async def enqueue_unique(database: Database, job: NewJob, *, default_lease_s: int = DEFAULT_LEASE_S) -> Enqueued | None:
    """Add a job of a task that is assumed to be unique, without an idempotency key, in one statement.

    Returns None, and does nothing, if its task is not unique or its ID is known. Raises the errors of `enqueue`.
    """
    row = row_of(job, default_lease_s)
    stands = await database.write_with_deadline(ANSWER_S, aio_add_unique, [row])
    return _stand_in(stands[job.job_id], is_first=True) if stands else None


def row_of(job: NewJob, default_lease_s: int, *, is_ours: bool = False) -> Row:
    """Return the row of a job. Raises `BadRequest` for invalid args, and for built-in tasks unless it `is_ours`."""
    if not is_ours:
        check_task(job.task)
    args = args_json("args", job.args)
    return (
        job.job_id,
        job.queue,
        job.task,
        args,
        job.idempotency_key,
        job.lock_key,
        job.partition_key,
        job.priority,
        job.available_at,
        job.max_attempts,
        job.lease_ttl_sec,
        default_lease_s,
        *_given(job),
        _request_hash(job) if job.idempotency_key is not None or job.after is not None else None,
        job.when_failed if job.after is not None else None,
        job.root,
        _number_of(job.version),
    )


def _request_hash(job: NewJob) -> bytes:
    """Return the SHA-256 of the request as sent. Omitted fields are not included, so changed defaults do not matter."""
    request = list(_hashed(job))
    if job.priority is None:
        request[_PRIORITY] = DEFAULT_PRIORITY
    if job.available_at is not None:
        request[_AVAILABLE_AT] = job.available_at.timestamp()
    if job.after is not None:
        request += (sorted(map(str, job.after)), job.when_failed)
    if job.version is not None:
        request.append(_number_of(job.version))
    for name in _HASHED_IF_GIVEN:
        if (value := getattr(job, name)) is not None:
            request.append((name, value))
    return hashlib.sha256(msgspec.json.encode(request, order="deterministic")).digest()


def _number_of(version: datetime | float | None) -> float | None:
    if isinstance(version, datetime):
        return version.timestamp()
    return None if version is None else float(version)


def _aio_transaction(connection: Any) -> Any:
    return connection.transaction()


class _WinnerGoneError(Exception):
    """The first job of a key was deleted between two statements, so the key is free now, or was added then."""


async def _aio_enqueue(
    connection: Any, jobs: list[NewJob], rows: list[Row], *, begin: Callable[[Any], Any] = _aio_transaction
) -> list[Enqueued]:
    # Of several jobs with one key, only the first is added. Sorted by key, so that batches with the same keys do not
    # deadlock.
    firsts: dict[str, int] = {}
    to_add = [
        index
        for index, job in enumerate(jobs)
        if job.idempotency_key is None or firsts.setdefault(job.idempotency_key, index) == index
    ]
    to_add.sort(key=lambda index: jobs[index].idempotency_key or "")
    waits = any(job.after is not None for job in jobs)
    if begin is _aio_transaction and len(jobs) > 1 and not firsts:
        added = await aio_insert_all(connection, rows)
        if len(added) == len(jobs):
            return _added(jobs, added)
    for _ in range(3):
        try:
            if len(jobs) == 1 and not waits and (begin is _aio_transaction or not firsts):
                return await _aio_add(connection, jobs, rows, rows)
            async with begin(connection):
                if waits:
                    return await _aio_add_graph(connection, jobs, rows, to_add)
                return await _aio_add(connection, jobs, rows, [rows[index] for index in to_add])
        except (_WinnerGoneError, KeyTaken):
            continue
    raise StoreUnavailable("the first job of the idempotency key was repeatedly deleted while this job was being added")


def rows_of(jobs: Sequence[NewJob], default_lease_s: int) -> list[Row]:
    """Return the jobs as rows for `aio_enqueue_within`. Raises `BadRequest`."""
    check_order(jobs)
    return [row_of(job, default_lease_s) for job in jobs]


async def aio_enqueue_within(connection: Any, jobs: list[NewJob], rows: list[Row]) -> list[Enqueued]:
    """Add `jobs`, all or none, in the transaction that is open on the connection (asyncio-flavored).

    A rejected request leaves the transaction as it was. The exception is a single job without an idempotency key that
    the database rejects: it ends the transaction.
    """
    return await _aio_enqueue(connection, jobs, rows, begin=_aio_savepoint)


@asynccontextmanager
async def _aio_savepoint(connection: Any) -> AsyncIterator[None]:
    """Open a savepoint that acts like a transaction and keeps the settings of the outer one."""
    before = await connection.fetchval("SELECT current_setting('lock_timeout')")
    await connection.execute("SAVEPOINT dl_enqueue")
    try:
        yield
    except Exception:
        await connection.execute("ROLLBACK TO SAVEPOINT dl_enqueue")  # noqa: ASYNC120 - asyncio's, within one crossing
        raise
    await connection.execute("RELEASE SAVEPOINT dl_enqueue")
    await connection.execute("SELECT set_config('lock_timeout', $1, true)", before)


async def _aio_add_graph(connection: Any, jobs: list[NewJob], rows: list[Row], to_add: list[int]) -> list[Enqueued]:
    """Add jobs that run after others, with their edges.

    A job of the list that an earlier request has added, or that another job of the list replaces, is referred to by its
    actual ID: the same list sent again is then the same request.
    """
    stand_ins = await _aio_stand_ins(connection, jobs)
    jobs = [_after_stand_ins(job, stand_ins) for job in jobs]
    rows = [
        (*row[:HASH], _request_hash(job), *row[HASH + 1 :]) if job.after is not None else row
        for job, row in zip(jobs, rows, strict=True)
    ]
    answers = await _aio_add(connection, jobs, rows, [rows[index] for index in to_add])
    named = {after_id for job in jobs for after_id in job.after or ()}
    for job, answer in zip(jobs, answers, strict=True):
        if answer.did in {"kept", "updated", "older"} and job.job_id in named:
            raise BadRequest("after", f"must not refer to a job of the unique task {job.task!r} in the same list")
        if answer.job_id != stand_ins.get(job.job_id, job.job_id) and job.job_id in named:
            raise _WinnerGoneError
    edges = {job.job_id: sorted(job.after or ()) for job, answer in zip(jobs, answers, strict=True) if answer.created}
    await aio_add_edges(connection, {job_id: after for job_id, after in edges.items() if after})
    return answers


async def _aio_stand_ins(connection: Any, jobs: list[NewJob]) -> dict[UUID, UUID]:
    """Map IDs of jobs that other jobs of the list depend on to the existing jobs with their idempotency keys."""
    named = {after_id for job in jobs for after_id in job.after or ()}
    keyed = {job.job_id: job.idempotency_key for job in jobs if job.idempotency_key is not None and job.job_id in named}
    if not keyed:
        return {}
    found = await connection.fetch(_WINNERS, sorted(set(keyed.values())), [])
    ids = {record["idempotency_key"]: record["job_id"] for record in found}
    for job in jobs:
        if job.idempotency_key is not None:
            ids.setdefault(job.idempotency_key, job.job_id)
    return {job_id: ids[key] for job_id, key in keyed.items()}


def _after_stand_ins(job: NewJob, stand_ins: dict[UUID, UUID]) -> NewJob:
    if job.after is None or job.after.isdisjoint(stand_ins):
        return job
    return attrs.evolve(job, after=[stand_ins.get(after_id, after_id) for after_id in job.after])


async def _aio_add(connection: Any, jobs: list[NewJob], rows: list[Row], new: list[Row]) -> list[Enqueued]:
    plain = [row for row in new if row[VERSION] is None]
    with_keys = any(job.idempotency_key is not None for job in jobs)
    added = await aio_insert(connection, plain, with_keys=with_keys) if plain else {}
    if len(added) == len(jobs):
        return _added(jobs, added)
    others = [job for job in jobs if job.job_id not in added]
    found = await connection.fetch(_WINNERS, [job.idempotency_key for job in others], [job.job_id for job in others])
    if found:
        await connection.execute(_REPLICATE)
    winners = {record["idempotency_key"]: record for record in found if record["idempotency_key"] is not None}
    winners |= {record["job_id"]: record for record in found}
    left = [row for row in new if row[JOB_ID] not in added and winners.get(row[IDEMPOTENCY_KEY] or row[JOB_ID]) is None]
    stands = await aio_add_unique(connection, left) if left else {}
    by_key = {row[IDEMPOTENCY_KEY]: row for row in left if row[IDEMPOTENCY_KEY] is not None}
    answers = []
    for job, row in zip(jobs, rows, strict=True):
        first = row if job.job_id in stands else by_key.get(job.idempotency_key)
        if first is not None and first[JOB_ID] in stands and first[HASH] == row[HASH]:
            answers.append(_stand_in(stands[first[JOB_ID]], is_first=first is row))
        else:
            answers.append(_answer(job, row, added, winners))
    return answers


def _added(jobs: list[NewJob], queues: Mapping[UUID, str]) -> list[Enqueued]:
    return [Enqueued(job.job_id, Status.QUEUED, created=True, queue=queues[job.job_id]) for job in jobs]


def _stand_in(stand: Stand, *, is_first: bool) -> Enqueued:
    did = stand.did if is_first else "again"
    return Enqueued(stand.job_id, stand.status, created=did == "added", queue=stand.queue, did=did)


def _answer(job: NewJob, row: Row, added: Mapping[UUID, str], winners: dict[Any, Any]) -> Enqueued:
    if job.job_id in added:
        return Enqueued(job.job_id, Status.QUEUED, created=True, queue=added[job.job_id])
    winner = winners.get(job.idempotency_key or job.job_id)
    if winner is None:
        raise _WinnerGoneError
    ours = row[HASH]
    if ours is not None and winner["request_hash"] is not None and len(winner["request_hash"]) == len(ours):
        same = winner["request_hash"] == ours
    else:
        same = (
            winner["partition_key"] == job.partition_key
            # A job with stages has the task of its stage.
            and (winner["task"] == job.task or winner["task"].startswith(f"{job.task}."))
            and (job.queue is None or winner["queue"] == job.queue)
            and (job.lock_key is None or (winner["keyed"] and winner["lock_key"] == job.lock_key))
            and shown_json(winner["args"]) == msgspec.json.decode(row[ARGS])
        )
    if not same:
        raise IdempotencyConflict(job.idempotency_key or str(job.job_id), winner["job_id"])
    return Enqueued(winner["job_id"], Status(winner["status"]), created=False, queue=winner["queue"], did="again")
