"""Statements that add rows to the queue with their first events: one row or a thousand.

Values that a row leaves out are those of the task in `dl_tasks`. A row with a known key or ID is not added. Rows of
unique tasks are added by unique_inserts.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from dataloader.jobs.model import AS_GIVEN, DEFAULT_MAX_ATTEMPTS, DEFAULT_PRIORITY, JOB_FIELDS, UNCHOSEN, ClaimedJob
from dataloader.store.connection.error_meanings import TAKEN
from dataloader.store.queue.lease_clock import lease_time

Row = tuple[Any, ...]
"""Values of `ROW_COLUMNS`, in their order. A plain tuple: creating a class with attributes is several times slower."""

KEY_WAIT_S: Final = 5.0
"""Seconds to wait for a key that another transaction has added, since other callers need the connection."""

_TYPES: Final = {field.column: field.sql for field in JOB_FIELDS.values() if field.column is not None}
_COLUMNS_OF_GRAPHS: Final = {name: _TYPES[name] for name in ("when_failed", "root_id")}
_RULED: Final = [name for name in _TYPES if name not in {*AS_GIVEN, *_COLUMNS_OF_GRAPHS, "version"}]
_COLUMNS: Final = (
    {name: _TYPES[name] for name in ("job_id", *_RULED)}
    | {"lease_s": "int"}
    | {name: _TYPES[name] for name in AS_GIVEN}
    | {"request_hash": "bytea"}
)
ROW_COLUMNS: Final = _COLUMNS | _COLUMNS_OF_GRAPHS | {"version": _TYPES["version"]}
"""Columns of a row with their types. Most jobs have no values in the columns after the plain ones."""
JOB_ID, TASK, ARGS, IDEMPOTENCY_KEY, AVAILABLE_AT, HASH, WHEN_FAILED, VERSION = (
    list(ROW_COLUMNS).index(name)
    for name in (
        "job_id", "task", "args", "idempotency_key", "available_at", "request_hash", "when_failed", "version",
    )
)  # fmt: skip
"""Positions of these columns in a row."""
_PLAIN: Final = len(_COLUMNS)
GIVEN: Final = ", ".join(f"r.{name}" for name in AS_GIVEN)
"""Values of a row that the table gets unchanged."""
_ADD: Final = """
WITH added AS (
  INSERT INTO dl_jobs (job_id, queue, task, args, idempotency_key, lock_key, keyed, partition_key, priority,
                       available_at, max_attempts, lease_ttl_sec, {given}, request_hash, lane{columns})
  SELECT r.job_id,
         coalesce(r.queue, t.queue,
                  dl_refuse('queue', format('is required, because the task %s has no queue', to_json(r.task))
                    || CASE WHEN t.task IS NULL THEN '; no process has declared it yet: start `dataloader serve` '
                                                  || 'with it once, or set queue' ELSE '' END)),
         coalesce(t.first_stage, r.task), r.args::jsonb, r.idempotency_key,
         coalesce(r.lock_key, CASE WHEN t.lock_key IS NOT NULL
                                   THEN dl_key('lock_key', t.lock_key, r.task, r.args::jsonb) END, r.job_id::text),
         r.lock_key IS NOT NULL OR t.lock_key IS NOT NULL,
         r.partition_key, coalesce(r.priority, t.priority, {priority}), {available_at},
         coalesce(r.max_attempts, t.max_attempts, {max_attempts}),
         coalesce(r.lease_ttl_sec, t.lease_ttl_sec, r.lease_s), {given_values}, r.request_hash,
         CASE WHEN t.first_stage IS NOT NULL
              THEN (SELECT s.task FROM dl_tasks s WHERE s.task = t.first_stage AND s.limited)
              WHEN t.limited THEN r.task END{values}
  FROM {rows} LEFT JOIN dl_tasks t ON t.task = r.task {join} WHERE t.uniqueness IS NULL {where} {order}
  {conflict}
  RETURNING job_id, queue{returning}
), journal AS (
  INSERT INTO dl_job_events (job_id, queue, kind{journal}
)
SELECT job_id, queue{result} FROM added
"""


# The server ends the wait: a statement that is cancelled from here continues until the server receives the request.
_BRIEFLY: Final = f"AND (SELECT set_config('lock_timeout', '{KEY_WAIT_S * 1000:.0f}', true)) IS NOT NULL"


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


def _add(
    rows: str,
    parameter: str,
    order: str,
    where: str = "",
    *,
    conflict: str = "ON CONFLICT DO NOTHING",
    join: str = "",
    more: Mapping[str, Any] = _QUEUED,
) -> str:
    """Return the statement for rows, with one parameter for each column: of its type, or of an array of it."""
    names = _COLUMNS | more["names"]
    parameters = ", ".join(parameter.format(n, kind) for n, kind in enumerate(names.values(), 1))
    return _ADD.format(
        rows=rows.format(parameters, ", ".join(names)),
        join=join,
        where=where,
        conflict=conflict,
        order=order,
        given=", ".join(AS_GIVEN),
        given_values=GIVEN,
        priority=DEFAULT_PRIORITY,
        max_attempts=DEFAULT_MAX_ATTEMPTS,
        **more,
    )


# Jobs that run after others wait, and their time is kept for later (see 0002_job_columns.sql).
_OF_GRAPHS: Final = _QUEUED | {
    "names": _COLUMNS_OF_GRAPHS,
    "columns": ", when_failed, root_id, waits_for, waits_on, wanted_at",
    "values": ", r.when_failed, coalesce((SELECT p.root_id FROM dl_jobs p WHERE p.job_id = r.root_id), r.root_id),"
    " CASE WHEN r.when_failed IS NOT NULL THEN 'after' END,"
    f" CASE WHEN r.when_failed IS NOT NULL THEN '{UNCHOSEN}'::uuid END,"
    " CASE WHEN r.when_failed IS NOT NULL THEN r.available_at END",
    "available_at": f"CASE WHEN r.when_failed IS NOT NULL THEN 'infinity' ELSE {_AVAILABLE} END",
}


# In the order of the list, regardless of the join, so that two lists with the same keys do not deadlock.
_MANY: Final = "unnest({}) WITH ORDINALITY AS r ({}, number)", "${}::{}[]", "ORDER BY r.number"
_ONE: Final = "(VALUES ({})) AS r ({})", "${}::{}", ""
"""For single jobs, the most common case: arrays with one element make a quarter of the cost of the statement."""
_ADD_MANY: Final = _add(*_MANY)
_ADD_ONE: Final = _add(*_ONE)
_ADD_ALL: Final = _add(
    *_MANY,
    "AND NOT EXISTS (SELECT FROM dl_tasks u WHERE u.task = ANY ($3::text[]) AND u.uniqueness IS NOT NULL)",
    conflict="",
)
"""For lists without conflicts, the most common case: all rows or none.

ON CONFLICT would search each unique index for each row before it is added.
"""
_ADD_MANY_WITH_KEYS: Final = _add(*_MANY, _BRIEFLY)
_ADD_ONE_WITH_KEY: Final = _add(*_ONE, _BRIEFLY)
_ADD_GRAPH: Final = _add(*_MANY, _BRIEFLY, more=_OF_GRAPHS)
_ADD_TO_WHOLE: Final = _add(*_MANY, more=_OF_GRAPHS)
"""For jobs that a handler adds without a key: they wait for no lock, and set nothing in the handler's transaction."""

# A job that this process can run immediately is added as claimed: `slot` is the queue in which it has a free slot,
# `worker` its name. The database decides here whether the queue is paused, and adds the task's queue and key.
_STARTS: Final = """
LEFT JOIN LATERAL (
  SELECT now() AS at, greatest(uuid_hash_extended(gen_random_uuid(), 0) & 9007199254740991, 1) AS token
  WHERE r.slot = coalesce(r.queue, t.queue) AND t.lock_key IS NULL AND t.limited IS NOT TRUE
    AND NOT EXISTS (SELECT FROM dl_tasks s WHERE s.task = t.first_stage AND s.limited)
    AND NOT EXISTS (SELECT FROM dl_queues q WHERE q.queue = r.slot AND q.paused)
) AS started ON true
"""
_STARTED: Final = _QUEUED | {
    "names": {"slot": "text", "worker": "text"},
    "columns": ", status, attempt, token, claimed_by, lease_expires_at, heartbeat_at, started_at, run_started_at",
    "values": ", CASE WHEN started.at IS NULL THEN 'queued' ELSE 'running' END::dl_status,"
    " CASE WHEN started.at IS NULL THEN 0 ELSE 1 END, coalesce(started.token, 0),"
    " CASE WHEN started.at IS NOT NULL THEN r.worker END,"
    " started.at + make_interval(secs => coalesce(r.lease_ttl_sec, t.lease_ttl_sec, r.lease_s)),"
    " started.at, started.at, started.at",
    "returning": ", status, token, claimed_by, task, args, partition_key, max_attempts, lease_ttl_sec",
    "journal": ", payload) SELECT job_id, queue, 'queued', NULL FROM added UNION ALL"
    " SELECT job_id, queue, 'picked', jsonb_build_object('attempt', 1, 'worker', claimed_by) FROM added"
    " WHERE status = 'running'",
    "result": ", status = 'running' AS is_running, token, task, partition_key, max_attempts, lease_ttl_sec,"
    " CASE WHEN status = 'running' THEN args::text END AS args",
}
_ADD_ONE_STARTED: Final = _add(*_ONE, join=_STARTS, more=_STARTED)
_ADD_MANY_STARTED: Final = _add(*_MANY, join=_STARTS, more=_STARTED)


# Jobs of schedules: there is one for each planned time.
_PLANNED: Final = _QUEUED | {
    "names": {"schedule": "text", "planned_at": "timestamptz", "backfill": "uuid"},
    "columns": ", schedule, planned_at, backfill",
    "values": ", r.schedule, r.planned_at, r.backfill",
}
_ADD_PLANNED: Final = _add(*_MANY, more=_PLANNED)


def by_column(rows: Sequence[Row]) -> list[Sequence[Any]]:
    """Return the values of each column; a column without values is empty, and `unnest` fills it with NULL.

    The driver reads each value of a list twice, which takes 10 % of the process's CPU time for a thousand jobs.
    """
    return [() if all(value is None for value in column) else column for column in zip(*rows, strict=True)]


async def aio_insert_planned(
    connection: Any, rows: list[Row], planned: list[tuple[str, datetime | None, UUID | None]]
) -> dict[UUID, str]:
    """Add plain rows as jobs of schedules; `planned` has the name, the planned time and the backfill of each.

    Returns the IDs of the added jobs with their queues. Jobs whose planned time already has a job are not added.
    """
    given = [(*row[:_PLAIN], *more) for row, more in zip(rows, planned, strict=True)]
    records = await connection.fetch(_ADD_PLANNED, *by_column(given))
    return {record["job_id"]: record["queue"] for record in records}


async def aio_insert(connection: Any, rows: list[Row], *, with_keys: bool = False) -> dict[UUID, str]:
    """Add the rows without a conflict; return the IDs of the added jobs with their queues."""
    plain = [row[:_PLAIN] for row in rows]
    if any(value is not None for row in rows for value in row[_PLAIN:VERSION]):
        may_wait = with_keys or any(row[WHEN_FAILED] is not None for row in rows)
        whole = [row[:VERSION] for row in rows]
        records = await connection.fetch(_ADD_GRAPH if may_wait else _ADD_TO_WHOLE, *by_column(whole))
    elif len(rows) == 1:
        records = await connection.fetch(_ADD_ONE_WITH_KEY if with_keys else _ADD_ONE, *plain[0])
    else:
        records = await connection.fetch(_ADD_MANY_WITH_KEYS if with_keys else _ADD_MANY, *by_column(plain))
    return {record["job_id"]: record["queue"] for record in records}


async def aio_insert_all(connection: Any, rows: list[Row]) -> dict[UUID, str]:
    """Add all rows, which have no idempotency key, or none; return the IDs of the added jobs with their queues.

    None is added if one is of a unique task, if an ID is known, or if one has columns that most jobs leave empty. Do
    not call this within a transaction: a known ID would end it.
    """
    if any(value is not None for row in rows for value in row[_PLAIN:]):
        return {}
    try:
        records = await connection.fetch(_ADD_ALL, *by_column([row[:_PLAIN] for row in rows]))
    except TAKEN:
        return {}
    return {record["job_id"]: record["queue"] for record in records}


async def aio_insert_started(
    connection: Any, rows: list[Row], slots: list[str | None], worker: str
) -> tuple[dict[UUID, str], list[ClaimedJob], float]:
    """Add plain rows like `aio_insert`, some of them as claimed; `slots` has the queue of each job's free slot.

    Also returns the jobs that `worker` has claimed: not those of another or paused queue, or of a task with a key. The
    last value is the time at which the statement was sent; their leases count from it.
    """
    given = [(*row[:_PLAIN], slot, worker) for row, slot in zip(rows, slots, strict=True)]
    sent_at = lease_time()
    if len(given) == 1:
        records = await connection.fetch(_ADD_ONE_STARTED, *given[0])
    else:
        records = await connection.fetch(_ADD_MANY_STARTED, *by_column(given))
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
    return {record["job_id"]: record["queue"] for record in records}, started, sent_at
