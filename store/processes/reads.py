"""Reads of a process: its record, its events, its tasks. They need no worker and write nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import trio

from dataloader.jobs.failures import group_id
from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.model import check_between
from dataloader.jobs.page_cursor import BY_NUMBER, After
from dataloader.jobs.process_listings import (
    ProcessAnswer,
    ProcessEvent,
    ProcessEventPage,
    ProcessRecord,
    ProcessTask,
    ProcessTaskPage,
    ProcessTimer,
    RunningStep,
)
from dataloader.jobs.processes import HistoryChanged, ProcessNotFound, check_process_id, check_type
from dataloader.jobs.text import as_object, shown_json
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.reads import MAX_PAGE_PAYLOADS, aio_fetch_page, shown

RECORD: Final = f"""
SELECT key, type, process_id, version, status, previous_status, status_changed_at, created_at, detail, error_group,
       corrupted_by, {shown("aux_state")}, metadata::text AS metadata, last_event_id,
       timer_task, timer_kind, timer_at, timer_attempt, {shown("timer_context")}, running_task, running_kind, running_at
FROM dl_processes
"""
"""Rows of processes. `aux_state` and `timer_context` may be long."""
LONG: Final = ("aux_state", "timer_context", "detail")
_ONE: Final = f"{RECORD} WHERE type = $1 AND process_id = $2 AND removed_at IS NULL"
_KEY: Final = "SELECT key FROM dl_processes WHERE type = $1 AND process_id = $2 AND removed_at IS NULL"

# {behind} and {order} are the page's direction.
_EVENTS: Final = f"""
SELECT event_id, task_id, at, {shown("payload")} FROM dl_process_events
WHERE key = $1 AND event_id {{behind}} $2 ORDER BY key {{order}}, event_id {{order}} LIMIT $3
"""
_TASK_COLUMNS: Final = f"""
task_id, kind, method, {shown("args")}, {shown("context")}, idempotency_key, {shown("response")}, error, attempt,
first_task, created_at, scheduled_at, started_at, finished_at, expires_at, ident
"""
# The process's mark identifies the running task. A live timer is in the process's row; here it is a task like the
# others.
_TASKS: Final = f"""
SELECT * FROM (
  SELECT * FROM (
    SELECT {_TASK_COLUMNS}, status FROM dl_process_tasks
    WHERE key = $1 AND task_id {{behind}} $2 ORDER BY key {{order}}, task_id {{order}} LIMIT $3
  ) AS asked
  UNION ALL
  SELECT timer_task, timer_kind, NULL, NULL, {shown("timer_context").removesuffix(" AS timer_context")}, NULL, NULL,
         NULL, timer_attempt, timer_first, timer_at, timer_at, NULL, NULL, NULL, timer_ident,
         CASE WHEN running_task IS NOT NULL
                OR EXISTS (SELECT FROM dl_process_tasks w WHERE w.key = p.key AND w.status = 'waiting') THEN 'blocked'
              ELSE 'waiting' END
  FROM dl_processes p WHERE key = $1 AND timer_task {{behind}} $2
) AS tasks ORDER BY task_id {{order}} LIMIT $3
"""
_MARK: Final = "SELECT type, process_id, running_task, running_at FROM dl_processes WHERE key = $1"
_ONE_TASK: Final = f"""
SELECT {_TASK_COLUMNS}, t.status, p.type, p.process_id, p.running_task, p.running_at
FROM (SELECT * FROM dl_process_tasks WHERE task_id = $1) AS t
CROSS JOIN LATERAL (SELECT type, process_id, running_task, running_at FROM dl_processes WHERE key = t.key) AS p
"""
_ANSWERS: Final = f"""
SELECT task_id, status, {shown("response")}, error, expires_at, ident
FROM dl_process_tasks WHERE task_id = ANY ($1::bigint[])
"""
_TEXTS: Final = ("args", "context", "response", "error")


async def get_process(database: Database, process_type: str, process_id: str) -> ProcessRecord:
    """Return the current process. Raises `ProcessNotFound`, `BadRequest`."""
    check_type("type", process_type)
    check_process_id("process_id", process_id)
    return await database.run(aio_get_process, process_type, process_id)


async def aio_get_process(connection: Any, process_type: str, process_id: str) -> ProcessRecord:
    """Return the process, see `get_process`, in another operation (asyncio-flavored)."""
    row = await connection.fetchrow(_ONE, process_type, process_id)
    if row is None:
        raise not_found(process_type, process_id)
    return record_of(row)


def not_found(process_type: str, process_id: str) -> ProcessNotFound:
    """Return the error for a process that does not exist."""
    return ProcessNotFound(f"there is no process {process_type}/{process_id}")


def record_of(row: Mapping[str, Any]) -> ProcessRecord:
    """Return the record of a row of `RECORD`."""
    timer = running = None
    if row["timer_task"] is not None:
        timer = ProcessTimer(
            task_id=row["timer_task"],
            kind=row["timer_kind"],
            at=row["timer_at"],
            attempt=row["timer_attempt"],
            context=_shown_json_or_none(row["timer_context"]),
        )
    if row["running_task"] is not None:
        running = RunningStep(task_id=row["running_task"], kind=row["running_kind"], since=row["running_at"])
    same = (
        "type", "process_id", "version", "status", "previous_status", "status_changed_at", "created_at", "detail",
        "corrupted_by", "last_event_id",
    )  # fmt: skip
    return ProcessRecord(
        **{name: row[name] for name in same},
        error_group=None if row["error_group"] is None else group_id(row["error_group"], None),
        state=_shown_json_or_none(row["aux_state"]),
        metadata=as_object(_shown_json_or_none(row["metadata"])),
        timer=timer,
        running=running,
    )


async def list_process_events(
    database: Database,
    process_type: str,
    process_id: str,
    *,
    limit: int = 200,
    after: After = None,
    newest_first: bool = False,
) -> ProcessEventPage:
    """Return a page of a process's events. Raises `ProcessNotFound`, `BadRequest`."""
    rows, more = await _page(
        database, _EVENTS, ("payload",), (process_type, process_id), limit=limit, after=after, newest_first=newest_first
    )
    events = []
    for row in rows:
        event = ProcessEvent(
            event_id=row["event_id"], task_id=row["task_id"], at=row["at"], payload=shown_json(row["payload"])
        )
        events.append(event)
        # Each may be long, so other tasks of the event loop must run in between.
        await trio.lowlevel.checkpoint()
    return ProcessEventPage(events, BY_NUMBER.text(events[-1].event_id) if more else None)


async def list_process_tasks(
    database: Database,
    process_type: str,
    process_id: str,
    *,
    limit: int = 200,
    after: After = None,
    newest_first: bool = False,
) -> ProcessTaskPage:
    """Return a page of a process's tasks, including its timer. Raises `ProcessNotFound`, `BadRequest`."""
    rows, more = await _page(
        database, _TASKS, _TEXTS, (process_type, process_id), limit=limit, after=after, newest_first=newest_first
    )
    tasks = []
    for row in rows:
        tasks.append(process_task_of(row))
        await trio.lowlevel.checkpoint()
    return ProcessTaskPage(tasks, BY_NUMBER.text(tasks[-1].task_id) if more else None)


async def _page(
    database: Database,
    sql: str,
    texts: Sequence[str],
    process: tuple[str, str],
    *,
    limit: int,
    after: After,
    newest_first: bool,
) -> tuple[list[dict[str, Any]], bool]:
    check_between("limit", limit, 1, MAX_PAGE)
    process_type, process_id = process
    check_type("type", process_type)
    check_process_id("process_id", process_id)
    statement = sql.format(behind="<" if newest_first else ">", order="DESC" if newest_first else "ASC")
    first = 2**63 - 1 if newest_first else 0
    behind = first if after is None else BY_NUMBER.key(after)
    return await database.run(_aio_page, statement, texts, process, limit=limit, behind=behind)


async def _aio_page(
    connection: Any, sql: str, texts: Sequence[str], process: tuple[str, str], *, limit: int, behind: int
) -> tuple[list[dict[str, Any]], bool]:
    """Return the rows of a page, each with its process's mark, from one snapshot."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        key = await connection.fetchval(_KEY, *process)
        if key is None:
            raise not_found(*process)
        rows, more = await aio_fetch_page(
            connection, sql, (key, behind, limit + 1), limit, texts=texts, most=MAX_PAGE_PAYLOADS
        )
        mark = dict(await connection.fetchrow(_MARK, key))
        return [mark | dict(row) for row in rows], more


async def get_process_task(database: Database, task_id: int, ident: UUID | None = None) -> ProcessTask:
    """Return a request to a process, or a timer that has ended. Raises `ProcessNotFound`, `HistoryChanged`."""
    row = await database.run(_aio_task, task_id) if 0 < task_id < 2**63 else None
    if row is None:
        raise no_task(task_id)
    check_ident(task_id, row["ident"], ident)
    return process_task_of(row)


async def _aio_task(connection: Any, task_id: int) -> Any:
    return await connection.fetchrow(_ONE_TASK, task_id)


def check_ident(task_id: int, found: UUID | None, wanted: UUID | None) -> None:
    """Raise `HistoryChanged` if the task with this ID is not the caller's."""
    if found is not None and wanted is not None and found != wanted:
        message = f"the task {task_id} does not have the ident {wanted}: the database was restored in the meantime"
        raise HistoryChanged(message)


def no_task(task_id: int) -> ProcessNotFound:
    """Return the error for a task that does not exist."""
    return ProcessNotFound(f"there is no process task {task_id}")


async def aio_answers(connection: Any, task_ids: Sequence[int]) -> dict[int, tuple[ProcessAnswer, datetime | None]]:
    """Return the states of the existing tasks among these, and when they expire (asyncio-flavored)."""
    found = {}
    for row in await connection.fetch(_ANSWERS, task_ids):
        answer = ProcessAnswer(
            task_id=row["task_id"],
            status=row["status"],
            response=_shown_json_or_none(row["response"]),
            error=row["error"],
            ident=row["ident"],
        )
        found[answer.task_id] = answer, row["expires_at"]
    return found


def process_task_of(row: Mapping[str, Any]) -> ProcessTask:
    """Return the task of a row with its process's mark."""
    fields = dict(row)
    is_running = fields.pop("running_task") == fields["task_id"]
    running_at = fields.pop("running_at")
    if is_running and fields["status"] in {"waiting", "blocked"}:
        fields |= {"status": "running", "started_at": running_at}
    for name in ("args", "context", "response"):
        fields[name] = _shown_json_or_none(fields[name])
    return ProcessTask(**fields)


def _shown_json_or_none(text: str | None) -> Any:
    return None if text is None else shown_json(text)
