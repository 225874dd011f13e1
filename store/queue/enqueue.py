"""Puts jobs into the queue (Q2): one statement for one job or a thousand, their journal's first line included.

What a request leaves out is the task's own, as `dl_tasks` has it, or else the queue's: that is filled in by this
statement alone, and by `dl_enqueue`, so that a job is the same whoever enqueues it.

A job that is sent again, by its `idempotency_key` or by its own id, is answered with the first one. That takes two
statements: insert … on conflict do nothing, then a second one, with a new snapshot, that reads the winner (in one
statement the loser of a race sees nothing). What is compared is a hash of the request as sent, kept in the row, since
the row itself changes later. Rows without such a hash are a foreign service's, or `dl_enqueue`'s, whose hash is made of
JSON as PostgreSQL writes it: they are compared by their columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import UUID

import attrs
import msgspec
import trio

from dataloader.jobs.errors import BadRequest, IdempotencyConflict, StoreUnavailable
from dataloader.jobs.model import DEFAULT_MAX_ATTEMPTS, DEFAULT_PRIORITY, UNCHOSEN, ClaimedJob, Enqueued, NewJob
from dataloader.jobs.states import Status
from dataloader.jobs.text import growth, has_long_number, shown_json, storable_json
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.job_edges import aio_add_edges, check_order

Row = tuple[Any, ...]

MAX_ARGS_BYTES: Final = 16_777_216
ANSWER_S: Final = 12.0
"""Whoever triggers has an answer within this time, whatever the database does."""
KEY_WAIT_S: Final = 5.0
"""How long a key is waited for that a transaction of somebody else has added: others need the connection."""

_ROWS_IN_A_TURN: Final = 50
"""Jobs of a long list that are written as rows before the loop has its turn."""
_COLUMNS: Final = {
    "job_id": "uuid",
    "queue": "text",
    "task": "text",
    "args": "text",
    "idempotency_key": "text",
    "lock_key": "text",
    "partition_key": "text",
    "priority": "int",
    "available_at": "timestamptz",
    "max_attempts": "int",
    "lease_ttl_sec": "int",
    "lease_s": "int",
    "producer": "text",
    "consumer_group": "text",
    "request_hash": "bytea",
}
_COLUMNS_OF_GRAPHS: Final = {"when_failed": "text", "root_id": "uuid"}
"""Those that stand behind them in a row, and that most jobs do without."""
_HASH: Final = list(_COLUMNS).index("request_hash")
_PLAIN: Final = len(_COLUMNS)
_ADD: Final = """
WITH added AS (
  INSERT INTO dl_jobs (job_id, queue, task, args, idempotency_key, lock_key, keyed, partition_key, priority,
                       available_at, max_attempts, lease_ttl_sec, producer, consumer_group, request_hash{columns})
  SELECT r.job_id,
         coalesce(r.queue, t.queue,
                  dl_refuse('queue', format('must be given: the task %s has no queue of its own', to_json(r.task))
                    || CASE WHEN t.task IS NULL THEN '; no process has declared it yet: start `dataloader serve` '
                                                  || 'with it once, or give queue' ELSE '' END)),
         r.task, r.args::jsonb, r.idempotency_key,
         coalesce(r.lock_key, CASE WHEN t.lock_key IS NOT NULL
                                   THEN dl_key('lock_key', t.lock_key, r.task, r.args::jsonb) END, r.job_id::text),
         r.lock_key IS NOT NULL OR t.lock_key IS NOT NULL,
         r.partition_key, coalesce(r.priority, t.priority, {priority}), {available_at},
         coalesce(r.max_attempts, t.max_attempts, {max_attempts}),
         coalesce(r.lease_ttl_sec, t.lease_ttl_sec, r.lease_s), r.producer, r.consumer_group, r.request_hash{values}
  FROM {rows} LEFT JOIN dl_tasks t ON t.task = r.task {where} {order}
  ON CONFLICT DO NOTHING
  RETURNING job_id, queue{returning}
), journal AS (
  INSERT INTO dl_job_events (job_id, queue, kind{journal}
)
SELECT job_id, queue{result} FROM added
"""


# The server ends the wait by itself: one that is told to stop from here goes on until it has heard of it.
_BRIEFLY: Final = f"WHERE (SELECT set_config('lock_timeout', '{KEY_WAIT_S * 1000:.0f}', true)) IS NOT NULL"


_AVAILABLE: Final = "coalesce(r.available_at, now())"


_QUEUED: Final = {
    "names": {},
    "columns": "",
    "values": "",
    "available_at": _AVAILABLE,
    "returning": "",
    "journal": ") SELECT job_id, queue, 'queued' FROM added",
    "result": "",
}


def _add(rows: str, parameter: str, order: str, where: str = "", more: Mapping[str, Any] = _QUEUED) -> str:
    """The statement for rows as one parameter for each column: of its type, or of a list of it."""
    names = _COLUMNS | more["names"]
    parameters = ", ".join(parameter.format(n, kind) for n, kind in enumerate(names.values(), 1))
    return _ADD.format(
        rows=rows.format(parameters, ", ".join(names)),
        where=where,
        order=order,
        priority=DEFAULT_PRIORITY,
        max_attempts=DEFAULT_MAX_ATTEMPTS,
        **more,
    )


# Jobs that run after others wait, their time put aside (see 0013_after.sql).
_OF_GRAPHS: Final = _QUEUED | {
    "names": _COLUMNS_OF_GRAPHS,
    "columns": ", when_failed, root_id, waits_for, waits_on, wanted_at",
    "values": ", r.when_failed, coalesce((SELECT p.root_id FROM dl_jobs p WHERE p.job_id = r.root_id), r.root_id),"
    " CASE WHEN r.when_failed IS NOT NULL THEN 'after' END,"
    f" CASE WHEN r.when_failed IS NOT NULL THEN '{UNCHOSEN}'::uuid END,"
    " CASE WHEN r.when_failed IS NOT NULL THEN r.available_at END",
    "available_at": f"CASE WHEN r.when_failed IS NOT NULL THEN 'infinity' ELSE {_AVAILABLE} END",
}


# In the list's order, whatever the join makes of it: two lists with the same keys wait for each other in one order.
_MANY: Final = "unnest({}) WITH ORDINALITY AS r ({}, number)", "${}::{}[]", "ORDER BY r.number"
_ONE: Final = "(VALUES ({})) AS r ({})", "${}::{}", ""
"""For the common single job: lists of one cost a quarter of the statement."""
_ADD_MANY: Final = _add(*_MANY)
_ADD_ONE: Final = _add(*_ONE)
_ADD_MANY_WITH_KEYS: Final = _add(*_MANY, _BRIEFLY)
_ADD_ONE_WITH_KEY: Final = _add(*_ONE, _BRIEFLY)
_ADD_GRAPH: Final = _add(*_MANY, _BRIEFLY, more=_OF_GRAPHS)
_ADD_TO_WHOLE: Final = _add(*_MANY, more=_OF_GRAPHS)
"""For jobs that a handler adds without a key: they wait for nobody, and set nothing in the handler's transaction."""

# A job that this process can run at once is added as claimed: `slot` is the queue in which it has a free slot, `worker`
# its name. What only the database knows is decided here: whether the queue is paused, and the task's queue and key.
_STARTS: Final = """
CROSS JOIN LATERAL (
  SELECT coalesce(r.queue, t.queue) = r.slot AND r.lock_key IS NULL AND t.lock_key IS NULL
         AND NOT EXISTS (SELECT FROM dl_queues q WHERE q.queue = r.slot AND q.paused) AS here
) AS starts
"""
_STARTED: Final = {
    "names": {"slot": "text", "worker": "text"},
    "columns": ", status, attempt, token, claimed_by, lease_expires_at, heartbeat_at, started_at",
    "values": ", CASE WHEN starts.here THEN 'running' ELSE 'queued' END::dl_status,"
    " CASE WHEN starts.here THEN 1 ELSE 0 END,"
    " CASE WHEN starts.here THEN nextval('dl_token_seq') ELSE 0 END,"
    " CASE WHEN starts.here THEN r.worker END,"
    " CASE WHEN starts.here"
    " THEN now() + make_interval(secs => coalesce(r.lease_ttl_sec, t.lease_ttl_sec, r.lease_s)) END,"
    " CASE WHEN starts.here THEN now() END, CASE WHEN starts.here THEN now() END",
    "available_at": _AVAILABLE,
    "returning": ", status, token, claimed_by, task, args, partition_key, max_attempts, lease_ttl_sec",
    "journal": ", payload) SELECT job_id, queue, line.kind, line.payload FROM added CROSS JOIN LATERAL (VALUES"
    " ('queued', NULL::jsonb), ('picked', jsonb_build_object('attempt', 1, 'worker', claimed_by)))"
    " AS line (kind, payload)"
    " WHERE line.kind = 'queued' OR status = 'running'",
    "result": ", token, task, CASE WHEN status = 'running' THEN args::text END AS args, partition_key, max_attempts,"
    " lease_ttl_sec, status = 'running' AS is_running",
}
_ADD_ONE_STARTED: Final = _add(*_ONE, _STARTS, more=_STARTED)
_ADD_MANY_STARTED: Final = _add(*_MANY, _STARTS, more=_STARTED)

_WINNERS: Final = """
SELECT idempotency_key, job_id, status::text AS status, request_hash, queue, task, lock_key, keyed, partition_key,
       args::text AS args
FROM dl_jobs WHERE idempotency_key = ANY ($1::text[]) OR job_id = ANY ($2::uuid[])
"""


async def enqueue(
    database: Database,
    jobs: Sequence[NewJob],
    *,
    default_lease_s: int = 60,
) -> list[Enqueued]:
    """Add `jobs`, all or none; the answers come in their order.

    A job whose `idempotency_key` is known is not added: its answer is the first job with the key, if that was requested
    alike. Raises `IdempotencyConflict` if it was requested differently, `BadRequest` for arguments that are no JSON or
    that make no key, for a queue that nobody gives or an id that stands twice, `StoreUnavailable` when the database
    can't say (send it again with the same keys or ids).
    """
    if not jobs:
        return []
    if len({job.job_id for job in jobs}) < len(jobs):
        raise BadRequest("jobs", "two of them have the same job_id")
    check_order(jobs)
    rows = []
    for job in jobs:
        rows.append(row_of(job, default_lease_s))
        if len(rows) % _ROWS_IN_A_TURN == 0:
            await trio.lowlevel.checkpoint()
    return await database.write_with_deadline(ANSWER_S, _aio_enqueue, list(jobs), rows)


def row_of(job: NewJob, default_lease_s: int) -> Row:
    """The job's row. Raises `BadRequest` for args that can't be stored."""
    try:
        args = msgspec.json.encode(job.args)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest("args", f"is not JSON: {error}") from error
    if has_long_number(args):
        raise BadRequest("args", "must have no integer of more than 308 digits; send it as a text")
    length = len(args) + growth(args)
    if length > MAX_ARGS_BYTES:
        message = f"must have at most {MAX_ARGS_BYTES:,} bytes as PostgreSQL writes it, not {length:,}"
        raise BadRequest("args", message)
    if b"\\u0000" in args and storable_json(job.args, MAX_ARGS_BYTES) != args.decode():
        raise BadRequest("args", "has a NUL in a text, which PostgreSQL can't store")
    return (
        job.job_id,
        job.queue,
        job.task,
        args.decode(),
        job.idempotency_key,
        job.lock_key,
        job.partition_key,
        job.priority,
        job.available_at,
        job.max_attempts,
        job.lease_ttl_sec,
        default_lease_s,
        job.producer,
        job.consumer_group,
        _request_hash(job) if job.idempotency_key is not None or job.after is not None else None,
        job.when_failed if job.after is not None else None,
        job.root,
    )


def _request_hash(job: NewJob) -> bytes:
    """SHA-256 over the request as sent: what was left out stays out, so that a changed default is no other request."""
    request: tuple[object, ...] = (
        job.queue,
        job.task,
        job.args,
        job.lock_key,
        job.partition_key,
        DEFAULT_PRIORITY if job.priority is None else job.priority,
        job.available_at.timestamp() if job.available_at is not None else None,
        job.max_attempts,
        job.lease_ttl_sec,
        job.producer,
        job.consumer_group,
    )
    if job.after is not None:
        request += (sorted(map(str, job.after)), job.when_failed)
    return hashlib.sha256(msgspec.json.encode(request, order="deterministic")).digest()


async def aio_insert(connection: Any, rows: list[Row], *, with_keys: bool = False) -> dict[UUID, str]:
    """Add the rows that nothing stands against; the ids of those that were added, with their queues."""
    plain = [row[:_PLAIN] for row in rows]
    if any(value is not None for row in rows for value in row[_PLAIN:]):
        may_wait = with_keys or any(row[_PLAIN] is not None for row in rows)
        records = await connection.fetch(_ADD_GRAPH if may_wait else _ADD_TO_WHOLE, *zip(*rows, strict=True))
    elif len(rows) == 1:
        records = await connection.fetch(_ADD_ONE_WITH_KEY if with_keys else _ADD_ONE, *plain[0])
    else:
        records = await connection.fetch(_ADD_MANY_WITH_KEYS if with_keys else _ADD_MANY, *zip(*plain, strict=True))
    return {record["job_id"]: record["queue"] for record in records}


async def aio_insert_started(
    connection: Any, rows: list[Row], slots: list[str | None], worker: str
) -> tuple[dict[UUID, str], list[ClaimedJob]]:
    """As `aio_insert`, for plain rows, some of which `worker` has a slot for, in the queue that stands in `slots`.

    The jobs that are its own now come back too: each whose queue it is, that has no key, and whose queue is not paused.
    """
    given = [(*row[:_PLAIN], slot, worker) for row, slot in zip(rows, slots, strict=True)]
    if len(given) == 1:
        records = await connection.fetch(_ADD_ONE_STARTED, *given[0])
    else:
        records = await connection.fetch(_ADD_MANY_STARTED, *zip(*given, strict=True))
    started = [
        ClaimedJob(
            job_id=record["job_id"],
            token=record["token"],
            queue=record["queue"],
            task=record["task"],
            args=record["args"],
            lock_key=None,
            lock_hash=None,
            partition_key=record["partition_key"],
            attempt=1,
            max_attempts=record["max_attempts"],
            lease_s=record["lease_ttl_sec"],
        )
        for record in records
        if record["is_running"]
    ]
    return {record["job_id"]: record["queue"] for record in records}, started


def _aio_transaction(connection: Any) -> Any:
    return connection.transaction()


class _WinnerGoneError(Exception):
    """The first job of a key was deleted between two statements, so that nobody has the key now, or was added then."""


async def _aio_enqueue(
    connection: Any, jobs: list[NewJob], rows: list[Row], *, begin: Callable[[Any], Any] = _aio_transaction
) -> list[Enqueued]:
    # The first of several jobs with one key stands for them all. Sorted by key, so that two batches with the same keys
    # wait for each other in one order.
    firsts: dict[str, int] = {}
    to_add = [
        index
        for index, job in enumerate(jobs)
        if job.idempotency_key is None or firsts.setdefault(job.idempotency_key, index) == index
    ]
    to_add.sort(key=lambda index: jobs[index].idempotency_key or "")
    waits = any(job.after is not None for job in jobs)
    for _ in range(3):
        try:
            if len(jobs) == 1 and not waits and (begin is _aio_transaction or not firsts):
                return await _aio_add(connection, jobs, rows, rows)
            async with begin(connection):
                if waits:
                    return await _aio_add_graph(connection, jobs, rows, to_add)
                return await _aio_add(connection, jobs, rows, [rows[index] for index in to_add])
        except _WinnerGoneError:
            continue
    raise StoreUnavailable("the first job of an idempotency key was deleted again and again while this one was added")


def rows_of(jobs: Sequence[NewJob], default_lease_s: int) -> list[Row]:
    """The jobs as rows, for `aio_enqueue_within`. Raises `BadRequest`."""
    check_order(jobs)
    return [row_of(job, default_lease_s) for job in jobs]


async def aio_enqueue_within(connection: Any, jobs: list[NewJob], rows: list[Row]) -> list[Enqueued]:
    """Add `jobs`, all or none, in the transaction that is open on the connection (asyncio-flavoured).

    What is refused leaves the transaction as it was, but for one job without an idempotency key that the database
    refuses: that one ends it.
    """
    return await _aio_enqueue(connection, jobs, rows, begin=_aio_savepoint)


@asynccontextmanager
async def _aio_savepoint(connection: Any) -> AsyncIterator[None]:
    """As a transaction of its own, within another one that keeps its settings."""
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
    """Add jobs that run after others with their edges.

    A job of the list that has been added before, as another request's, or that stands for another one of the list, is
    meant by the id that it has: so the same list sent again is the same request.
    """
    stand_ins = await _aio_stand_ins(connection, jobs)
    jobs = [_after_stand_ins(job, stand_ins) for job in jobs]
    rows = [
        (*row[:_HASH], _request_hash(job), *row[_HASH + 1 :]) if job.after is not None else row
        for job, row in zip(jobs, rows, strict=True)
    ]
    answers = await _aio_add(connection, jobs, rows, [rows[index] for index in to_add])
    named = {after_id for job in jobs for after_id in job.after or ()}
    for job, answer in zip(jobs, answers, strict=True):
        if answer.job_id != stand_ins.get(job.job_id, job.job_id) and job.job_id in named:
            raise _WinnerGoneError
    edges = {job.job_id: sorted(job.after or ()) for job, answer in zip(jobs, answers, strict=True) if answer.created}
    await aio_add_edges(connection, {job_id: after for job_id, after in edges.items() if after})
    return answers


async def _aio_stand_ins(connection: Any, jobs: list[NewJob]) -> dict[UUID, UUID]:
    """By the id of a job that others of the list run after: the job that has its idempotency key already."""
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
    added = await aio_insert(connection, new, with_keys=any(job.idempotency_key is not None for job in jobs))
    if len(added) == len(jobs):
        return [Enqueued(job.job_id, Status.QUEUED, created=True, queue=added[job.job_id]) for job in jobs]
    others = [job for job in jobs if job.job_id not in added]
    found = await connection.fetch(_WINNERS, [job.idempotency_key for job in others], [job.job_id for job in others])
    winners = {record["idempotency_key"]: record for record in found if record["idempotency_key"] is not None}
    winners |= {record["job_id"]: record for record in found}
    return [_answer(job, row, added, winners) for job, row in zip(jobs, rows, strict=True)]


def _answer(job: NewJob, row: Row, added: Mapping[UUID, str], winners: dict[Any, Any]) -> Enqueued:
    if job.job_id in added:
        return Enqueued(job.job_id, Status.QUEUED, created=True, queue=added[job.job_id])
    winner = winners.get(job.idempotency_key or job.job_id)
    if winner is None:
        raise _WinnerGoneError
    ours = row[_HASH]
    if ours is not None and winner["request_hash"] is not None and len(winner["request_hash"]) == len(ours):
        same = winner["request_hash"] == ours
    else:
        same = (
            (winner["task"], winner["partition_key"]) == (job.task, job.partition_key)
            and (job.queue is None or winner["queue"] == job.queue)
            and (job.lock_key is None or (winner["keyed"] and winner["lock_key"] == job.lock_key))
            and shown_json(winner["args"]) == msgspec.json.decode(row[3])
        )
    if not same:
        raise IdempotencyConflict(job.idempotency_key or str(job.job_id), winner["job_id"])
    return Enqueued(winner["job_id"], Status(winner["status"]), created=False, queue=winner["queue"])
