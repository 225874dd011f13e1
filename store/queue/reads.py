"""Reads for callers: jobs, pages of jobs, event histories, queues, workers, the operators' log. Nothing here writes.

Lists are paged by key, newest first: an offset would read all rows that it skips. `job_filters` builds the conditions.

A page filtered by `task` alone scans the index by age until it is full. The scan is rarely long, and the statement
timeout ends it; an index would add more than that to every claim and finish. Ended jobs of a `lock_key` have an index;
its other jobs are searched among all jobs that have not ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import attrs
import trio

from dataloader.jobs.errors import JobNotFound, StoreError, StoreUnavailable
from dataloader.jobs.listings import MAX_PAGE, AuditPage, AuditRecord, EventPage, JobFilter, JobPage
from dataloader.jobs.model import AfterResult, JobEvent, JobRecord, QueueRecord, WorkerRecord, check_between
from dataloader.jobs.page_cursor import BY_INSTANT, BY_NUMBER, After
from dataloader.jobs.states import QueueState, Status, WaitsFor
from dataloader.jobs.text import MAX_BEGINNING, MAX_ERROR, MAX_JSON, shown_json, stored_object
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.job_filters import OF_ROOT, THE_ROOT, condition
from dataloader.store.queue.queue_states import aio_queue_states
from dataloader.store.queue.worker_rows import ALIVE_WITHIN_S

MAX_PAGE_TEXT: Final = 1_000_000
"""Maximum number of characters in a page's rows: args, results, errors, details. One row always fits."""
MAX_LISTED_NAME: Final = 2_000
"""Maximum length of listed names of queues and tasks, in bytes. Only other services write longer ones."""
MAX_SHOWN: Final = 2 * MAX_JSON
"""Longer args, progress or results are truncated. PostgreSQL writes JSON with more spaces than we do."""
MAX_PAYLOAD: Final = 128 << 10
"""A longer payload of an event is truncated. Ours are shorter."""
MAX_PAGE_PAYLOADS: Final = 8 << 20
"""Maximum number of characters in a page's events, which is the length of a page of our longest lines."""
PLAN_OF_A_LIST: Final = "SET LOCAL plan_cache_mode = force_custom_plan; SET LOCAL enable_sort = on"
"""Settings for a list: the best index depends on the values.

A plan for any values scans by age to find the three jobs of a queue, and it is faster to sort three jobs.
"""
_MOST_FETCHED: Final = 16
"""Number of rows fetched together: their length is not known before."""


def shown(column: str, most: int = MAX_SHOWN) -> str:
    """Return the SELECT expression of a JSON column as text, truncated above `most` bytes. `shown_json` reads it."""
    text = f"{column}::text"
    beginning = f"jsonb_build_object('truncated', left({text}, {MAX_BEGINNING}), 'bytes', octet_length({text}))::text"
    return f"CASE WHEN octet_length({text}) > {most} THEN {beginning} ELSE {text} END AS {column}"


# Rows from before the triggers cleared values of other services may have any text there.
_REASONS: Final = frozenset(WaitsFor)
_JSON: Final = ("args", "progress", "result", "previous")
_NAMES: Final = ("queue", "task", "lock_key", "partition_key", "idempotency_key")
_SHORT: Final = [
    field.name
    for field in attrs.fields(JobRecord)
    if field.name not in {*_JSON, "error", "changed_at"} | {"queue_state"}  # the last one is not in the row
]
_EXPRESSIONS: Final = {
    "lock_key": "CASE WHEN keyed THEN lock_key END",
    "available_at": """CASE WHEN waits_on IS NOT NULL AND available_at = 'infinity' THEN coalesce(wanted_at, created_at)
       ELSE available_at END""",
    "root": "root_id",
    "run_started_at": "greatest(run_started_at, started_at)",  # claims of other services do not write it
    "after": """CASE WHEN when_failed IS NOT NULL THEN ARRAY(
         SELECT a.after_id FROM dl_job_after a WHERE a.job_id = dl_jobs.job_id LIMIT 100
       ) END""",
}
"""Fields of `JobRecord` whose value is not that of the column with the field's name."""
_COLUMNS: Final = ", ".join(f"{_EXPRESSIONS[name]} AS {name}" if name in _EXPRESSIONS else name for name in _SHORT)
# As text, so that the length of a page is known before it is decoded, and bounded, whichever program wrote it: 1 MB of
# 1e308 has 50 MB when PostgreSQL writes it.
_ERROR: Final = f"left(error, {4 * MAX_ERROR}) AS error"
_CHANGED: Final = "created_at, started_at, heartbeat_at, finished_at"


def select_job(*texts: str) -> str:
    """Return `SELECT … FROM dl_jobs` with the columns for `job_of`, and only `texts` of the long columns `_JSON`."""
    columns = [shown(name) if name in texts else f"NULL AS {name}" for name in _JSON]
    return f"SELECT {_COLUMNS}, greatest({_CHANGED}) AS changed_at, {', '.join(columns)}, {_ERROR} FROM dl_jobs "


_SELECT_JOB: Final = select_job(*_JSON)
# The end of an attempt that another one follows is in no column: the last event has its time.
_SELECT_ONE_JOB: Final = _SELECT_JOB.replace(
    f"greatest({_CHANGED})",
    f"greatest({_CHANGED},"
    " (SELECT e.ts FROM dl_job_events e WHERE e.job_id = dl_jobs.job_id ORDER BY e.event_id DESC LIMIT 1))",
)
_SELECT_JOB_BRIEFLY: Final = select_job("progress")

_RESULTS: Final = f"""
SELECT a.after_id, a.was, p.status, p.result
FROM dl_job_after a LEFT JOIN LATERAL (
  SELECT status::text AS status, {shown("result")} FROM dl_jobs WHERE job_id = a.after_id
) AS p ON true
WHERE a.job_id = $1 ORDER BY a.after_id
"""

_ENDED: Final = "status IN ('succeeded', 'failed', 'canceled', 'lost')"
_NOT_ENDED: Final = "status IN ('queued', 'running')"

_EVENTS: Final = f"""
SELECT event_id, job_id, queue, ts, kind, {shown("payload", MAX_PAYLOAD)} FROM dl_job_events
WHERE job_id = $1 AND event_id > $2 ORDER BY event_id LIMIT $3
"""

# Waiting jobs are grouped by task, so that the check for a live worker of their queue that knows it runs once per task.
_OPEN: Final = """
served AS MATERIALIZED (
  SELECT q.queue, q.slots::int AS slots, w.tasks, w.only_tasks -> q.queue AS only_tasks
  FROM dl_workers w CROSS JOIN LATERAL jsonb_each_text(w.queues) AS q (queue, slots)
  WHERE w.seen_at > now() - make_interval(secs => $1)
), open AS MATERIALIZED (
  SELECT queue, task, status, waits_for, count(*) AS jobs,
         min(available_at) AS available_at, min(created_at) AS created_at
  FROM dl_jobs WHERE status IN ('queued', 'running') GROUP BY queue, task, status, waits_for
), judged AS MATERIALIZED (
  SELECT o.queue, o.task, o.jobs, o.available_at, o.created_at,
         CASE WHEN o.status = 'running' THEN 'running'
              WHEN coalesce(o.waits_for, 'limit') = 'limit' AND (
                SELECT NOT bool_or(coalesce(s.only_tasks ? o.task, o.task = ANY (s.tasks), true))
                FROM served s WHERE s.queue = o.queue) THEN 'task'
              ELSE coalesce(o.waits_for, 'ready') END AS kind
  FROM open o
)
"""
_QUEUES: Final = """
SELECT queue, bool_or(paused) AS paused, count(slots) AS workers, coalesce(sum(slots), 0) AS slots,
       coalesce(sum(jobs) FILTER (WHERE kind = 'ready'), 0)::bigint AS ready,
       coalesce(sum(jobs) FILTER (WHERE kind = 'time'), 0)::bigint AS delayed,
       coalesce(sum(jobs) FILTER (WHERE kind = 'lock'), 0)::bigint AS blocked,
       coalesce(sum(jobs) FILTER (WHERE kind = 'task'), 0)::bigint AS unknown_task,
       coalesce(sum(jobs) FILTER (WHERE kind = 'after'), 0)::bigint AS dependent,
       coalesce(sum(jobs) FILTER (WHERE kind = 'limit'), 0)::bigint AS limited,
       coalesce(sum(jobs) FILTER (WHERE kind = 'running'), 0)::bigint AS running,
       min(available_at) FILTER (WHERE kind = 'ready') AS oldest_ready_at
FROM (
  SELECT queue, false AS paused, kind, jobs, available_at, NULL::int AS slots FROM judged
  UNION ALL
  SELECT queue, true, NULL, NULL, NULL, NULL FROM dl_queues WHERE paused
  UNION ALL
  SELECT queue, false, NULL, NULL, NULL, slots FROM served
) AS work
GROUP BY queue
"""
QUEUES: Final = f"WITH {_OPEN} {_QUEUES} ORDER BY queue"

_QUEUE_PAGE: Final = f"""
SELECT * FROM ({QUEUES}) AS page
WHERE ($2::text IS NULL OR queue > $2) AND octet_length(queue) <= {MAX_LISTED_NAME} ORDER BY queue LIMIT $3
"""

# Every caller that may trigger jobs can invent queues, so those with workers come first, then those with the most jobs.
MOST_UNKNOWN: Final = 10
"""Maximum number of unknown tasks named for a queue."""
DEPTHS: Final = f"""
WITH {_OPEN}, queues AS ({_QUEUES}),
     named AS (SELECT queue FROM queues WHERE octet_length(queue) <= {MAX_LISTED_NAME}
               ORDER BY workers > 0 DESC,
                        ready + delayed + blocked + unknown_task + dependent + limited + running DESC, queue
               LIMIT $2)
SELECT c.*, (
  SELECT coalesce(jsonb_agg(u), '[]') FROM (
    SELECT j.task, sum(j.jobs) AS jobs,
           min(CASE WHEN j.created_at BETWEEN '0001-01-02Z' AND '9999-12-30Z' THEN j.created_at END) AS since
    FROM judged j WHERE j.kind = 'task' AND j.queue = c.queue AND octet_length(j.task) <= {MAX_LISTED_NAME}
    GROUP BY j.task ORDER BY jobs DESC, task LIMIT {MOST_UNKNOWN}
  ) AS u) AS unknown
FROM (
  SELECT CASE WHEN queue IN (SELECT queue FROM named) THEN queue ELSE $3 END AS queue, bool_or(paused) AS paused,
         sum(ready)::bigint AS ready, sum(delayed)::bigint AS delayed, sum(blocked)::bigint AS blocked,
         sum(unknown_task)::bigint AS unknown_task, sum(dependent)::bigint AS dependent,
         sum(limited)::bigint AS limited, sum(running)::bigint AS running,
         min(oldest_ready_at) AS oldest_ready_at, sum(workers)::bigint AS workers, sum(slots)::bigint AS slots
  FROM queues GROUP BY 1
) AS c
ORDER BY queue
"""

_WORKERS: Final = """
SELECT worker, host, pid, version, started_at, seen_at, queues, tasks, only_tasks FROM dl_workers
WHERE seen_at > now() - make_interval(secs => $1) AND worker > $2 ORDER BY worker LIMIT $3
"""

_AUDIT: Final = """
SELECT audit_id, ts, actor, action, job_id, detail::text AS detail FROM dl_audit
WHERE audit_id < $1 ORDER BY audit_id DESC LIMIT $2
"""


async def _aio_states(connection: Any, records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], QueueState]:
    """Return what keeps the queued ones of these jobs waiting, by queue and task."""
    queued = {(row["queue"], row["task"]) for row in records if row["status"] == Status.QUEUED}
    return await aio_queue_states(connection, queued)


def job_of(record: Mapping[str, Any], states: Mapping[tuple[str, str], QueueState]) -> JobRecord:
    """Return the record of a row with the columns of `select_job`."""
    status, waits_for = Status(record["status"]), record["waits_for"]
    derived = {
        "status": status,
        "waits_for": WaitsFor(waits_for) if waits_for in _REASONS else None,
        "after": None if record["after"] is None else sorted(record["after"]),
        "queue_state": states.get((record["queue"], record["task"])) if status is Status.QUEUED else None,
    }
    values = {name: None if record[name] is None else shown_json(record[name]) for name in _JSON}
    return JobRecord(**dict(record) | values | derived)


async def get_job(database: Database, job_id: UUID) -> JobRecord:
    """Return the job (Q3). Raises `JobNotFound`.

    Args, progress, a result, or the result of a stage that is longer than `MAX_SHOWN` or nested deeper than `MAX_DEPTH`
    is replaced by an object with its beginning (`truncated`) and its length (`bytes`).
    """
    return await database.run(aio_get_job, job_id)


async def aio_get_job(connection: Any, job_id: UUID) -> JobRecord:
    """Do the same as `get_job` inside another operation (asyncio-flavored)."""
    record = await connection.fetchrow(_SELECT_ONE_JOB + "WHERE job_id = $1", job_id)
    if record is None:
        raise JobNotFound(f"no job has the ID {job_id}")
    return job_of(record, await _aio_states(connection, [record]))


async def aio_get_job_briefly(connection: Any, job_id: UUID) -> JobRecord:
    """Do the same as `aio_get_job`, without args and result, which may be long, and without the state of its queue."""
    record = await connection.fetchrow(_SELECT_JOB_BRIEFLY + "WHERE job_id = $1", job_id)
    if record is None:
        raise JobNotFound(f"no job has the ID {job_id}")
    return job_of(record, {})


async def results_of(database: Database, job_id: UUID) -> dict[UUID, AfterResult]:
    """Return the results of the jobs that the job runs after, by their IDs."""
    return await database.run(_aio_results, job_id)


async def _aio_results(connection: Any, job_id: UUID) -> dict[UUID, AfterResult]:
    found = {}
    for record in await connection.fetch(_RESULTS, job_id):
        status = record["status"] or (record["was"] if record["was"] == Status.SUCCEEDED else None)
        result = None if record["result"] is None else shown_json(record["result"])
        found[record["after_id"]] = AfterResult(None if status is None else Status(status), result)
    return found


async def list_jobs(database: Database, job_filter: JobFilter, *, limit: int = 50, after: After = None) -> JobPage:
    """Return a page of jobs, newest first.

    The page has at most `limit` (1 to 1,000) jobs after `after`, the `next` of the previous page. A page of long
    jobs has fewer: see `MAX_PAGE_TEXT`.

    Raises `BadRequest` if `limit` is not allowed.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    key = None if after is None else BY_INSTANT.key(after)
    sql, values = list_statement(_SELECT_JOB, job_filter, limit + 1, key)
    records, states, more = await database.run(_aio_list_jobs, sql, values, limit)
    jobs = []
    for record in records:
        jobs.append(job_of(record, states))
        # Each row may be long, so other Trio tasks must run in between.
        await trio.lowlevel.checkpoint()
    return JobPage(jobs, BY_INSTANT.text((jobs[-1].created_at, jobs[-1].job_id)) if more else None)


def list_statement(
    select: str, job_filter: JobFilter, limit: int, after: tuple[datetime, UUID] | None
) -> tuple[str, list[Any]]:
    """Return the statement of a page, newest first, and its values.

    `select` is `SELECT … FROM dl_jobs`, with `created_at`.
    """
    roots = (OF_ROOT, THE_ROOT) if job_filter.root is not None else (OF_ROOT,)
    conditions = [condition(job_filter, root=root) for root in roots]
    _, values = conditions[0]
    wheres = [where for where, _ in conditions]
    if job_filter.lock_key is not None:
        wheres = [f"{where} AND {half}" for where in wheres for half in (_ENDED, _NOT_ENDED)]
    behind = ""
    if after is not None:
        values += after
        behind = f" AND (created_at, job_id) < (${len(values) - 1}, ${len(values)})"
    values.append(limit)
    newest = f"ORDER BY created_at DESC, job_id DESC LIMIT ${len(values)}"
    parts = [f"{select} WHERE {where}{behind} {newest}" for where in wheres]
    if len(parts) == 1:
        return parts[0], values
    return f"{' UNION ALL '.join(f'({part})' for part in parts)} {newest}", values


async def _aio_list_jobs(
    connection: Any, sql: str, values: list[Any], limit: int
) -> tuple[list[Any], dict[tuple[str, str], QueueState], bool]:
    """Return the rows of a page, the states of their queues, and whether there are more."""
    async with connection.transaction(readonly=True):
        await connection.execute(PLAN_OF_A_LIST)
        records, more = await aio_fetch_page(
            connection, sql, values, limit, texts=(*_JSON, "error", *_NAMES), most=MAX_PAGE_TEXT
        )
    return records, await _aio_states(connection, records), more


async def aio_fetch_page(
    connection: Any, sql: str, values: Sequence[Any], limit: int, *, texts: Sequence[str], most: int
) -> tuple[list[Any], bool]:
    """Return at most `limit` rows of a statement, and whether there are more (asyncio-flavored).

    It must run in a transaction. The columns `texts` of all rows have at most `most` characters together; one row
    always fits.
    """
    records: list[Any] = []
    size = 0
    cursor = await connection.cursor(sql, *values)
    while fetched := await cursor.fetch(min(_MOST_FETCHED, limit + 1 - len(records))):
        for record in fetched:
            size += sum(len(record[name] or "") for name in texts)
            if records and (size > most or len(records) == limit):
                return records, True
            records.append(record)
    return records, False


async def aio_read_page(
    connection: Any, sql: str, values: Sequence[Any], limit: int, *, texts: Sequence[str]
) -> tuple[list[Any], bool]:
    """Do the same as `aio_fetch_page` in its own transaction, with `MAX_PAGE_TEXT` characters (asyncio-flavored)."""
    async with connection.transaction(readonly=True):
        return await aio_fetch_page(connection, sql, values, limit, texts=texts, most=MAX_PAGE_TEXT)


async def list_events(
    database: Database,
    job_id: UUID,
    *,
    after: After = None,
    limit: int = 200,
    most_text: int = MAX_PAGE_PAYLOADS,
) -> EventPage:
    """Return the job's event history (Q11), oldest first: at most `limit` (1 to 1,000) events, after `after`.

    A payload longer than `MAX_PAYLOAD`, or nested deeper than `MAX_DEPTH`, is replaced by an object with its beginning
    (`truncated`) and its length (`bytes`). A page of long payloads has fewer events, but at least one: together they
    have at most `most_text` characters.

    Raises `JobNotFound` if the job does not exist, `BadRequest` if `limit` is not allowed.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    events = []
    behind = 0 if after is None else BY_NUMBER.key(after)
    records, more = await database.run(_aio_list_events, job_id, behind, limit, most_text)
    for record in records:
        events.append(JobEvent(**dict(record) | {"payload": read_payload(record)}))
        # Each row may be long, so other Trio tasks must run in between.
        await trio.lowlevel.checkpoint()
    return EventPage(events, BY_NUMBER.text(events[-1].event_id) if more else None)


async def _aio_list_events(
    connection: Any, job_id: UUID, after: int, limit: int, most_text: int
) -> tuple[list[Any], bool]:
    async with connection.transaction(readonly=True):
        records, more = await aio_fetch_page(
            connection, _EVENTS, (job_id, after, limit + 1), limit, texts=("payload",), most=most_text
        )
    if not records:
        await aio_get_job(connection, job_id)
    return records, more


def read_payload(record: Mapping[str, Any]) -> Any:
    """Return the `payload` of an event. The row has it as JSON text."""
    return None if record["payload"] is None else shown_json(record["payload"])


async def list_queues(database: Database, *, limit: int | None = None, after: str | None = None) -> list[QueueRecord]:
    """Return every queue that has jobs or workers or is paused, by name.

    Only jobs that have not ended are counted, so the length of the history does not matter. At most `limit` queues are
    returned, after the name `after`.
    """
    return await database.run(_aio_queues, _QUEUE_PAGE, ALIVE_WITHIN_S, after, limit)


async def count_queues(database: Database, *, most: int, rest: str) -> list[QueueRecord]:
    """Return the same for at most `most` queues, those with workers first, and the sum of all others named `rest`."""
    return await database.run(_aio_queues, DEPTHS, ALIVE_WITHIN_S, most, rest)


_QUEUE_FIELDS: Final = [field.name for field in attrs.fields(QueueRecord)]


async def _aio_queues(connection: Any, sql: str, *values: Any) -> list[QueueRecord]:
    rows = await connection.fetch(sql, *values)
    return [QueueRecord(**{name: row[name] for name in _QUEUE_FIELDS}) for row in rows]


async def list_workers(database: Database, *, limit: int | None = None, after: str = "") -> list[WorkerRecord]:
    """Return the live processes by name: those with a process heartbeat in the last `ALIVE_WITHIN_S` seconds.

    At most `limit` of them are returned, after the name `after`.
    """
    return await database.run(_aio_workers, after, limit)


async def _aio_workers(connection: Any, after: str, limit: int | None) -> list[WorkerRecord]:
    return [WorkerRecord(**record) for record in await connection.fetch(_WORKERS, ALIVE_WITHIN_S, after, limit)]


async def list_audit(database: Database, *, limit: int = 100, after: After = None) -> AuditPage:
    """Return the latest actions of operators: at most `limit` (1 to 1,000) rows, after the cursor `after`.

    A page of long details has fewer: see `MAX_PAGE_TEXT`.

    Raises `BadRequest` if `limit` is not allowed.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    newest = 2**63 - 1 if after is None else BY_NUMBER.key(after)
    rows, more = await database.run(aio_read_page, _AUDIT, (newest, limit + 1), limit, texts=("detail",))
    return AuditPage(list(map(audit_record, rows)), BY_NUMBER.text(rows[-1]["audit_id"]) if more else None)


def audit_record(row: Mapping[str, Any]) -> AuditRecord:
    """Return a row of the audit log as a record. The row has `detail` as JSON text."""
    return AuditRecord(**{**row, "detail": stored_object(row["detail"])})


async def ping(database: Database, timeout_s: float) -> None:
    """Return if the database answers within `timeout_s` seconds, otherwise raise `StoreUnavailable`.

    If the server hangs without closing connections, asyncpg takes up to `connect_timeout_s` of the options longer.
    """
    with trio.move_on_after(timeout_s):
        await database.run(_aio_ping, timeout_s)
        return
    raise StoreUnavailable(f"the database did not answer within {timeout_s:g} s")


async def answers(database: Database, timeout_s: float) -> bool:
    """Return whether the database answers within `timeout_s` seconds, as `ping` checks it."""
    try:
        await ping(database, timeout_s)
    except StoreError:
        return False
    return True


async def _aio_ping(connection: Any, timeout_s: float) -> None:
    await connection.fetchval("SELECT 1", timeout=timeout_s)
