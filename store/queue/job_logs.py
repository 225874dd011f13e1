"""A job's log (E11): the lines that it has logged, and between them the beginning and end of each attempt.

Both are events of its history, in order, filtered by load and level. A page reads a bounded number of events, whatever
the filter: the next page continues the search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.errors import JobNotFound
from dataloader.jobs.listings import LEVELS, MAX_PAGE, Level, LogLine, LogPage
from dataloader.jobs.model import MAX_NAME, check_between, check_text
from dataloader.jobs.page_cursor import BY_NUMBER, After
from dataloader.jobs.states import Status
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.reads import (
    MAX_PAGE_PAYLOADS,
    MAX_PAYLOAD,
    aio_fetch_page,
    read_payload,
    shown,
)

MAX_SCANNED: Final = 10_000
"""Maximum number of a job's events that one page reads."""

ATTEMPTS: Final = ("picked", "requeue", "done", "moved", "failed", "canceled", "lost")
"""Kinds of events that mark the beginning and the end of an attempt."""
_FAILED: Final = ("retry", "lease expired")
"""Reasons for queueing a job again after a failed attempt."""

_EVENTS: Final = "FROM dl_job_events WHERE job_id = $1 AND event_id > $2 ORDER BY event_id"
LEVEL_OF_EVENT: Final = f"""
CASE WHEN kind = 'log' THEN payload ->> 'level'
     WHEN kind IN ('failed', 'lost') OR kind = 'requeue' AND payload ->> 'reason' IN {_FAILED} THEN 'error'
     ELSE 'info' END
"""
# No index serves the content of a line, so one text for all filters loses none. Parking because of a held lock key is
# left out: the job has not run, and each check of the key would be a line.
_LINES: Final = f"""
SELECT event_id, ts, kind, {LEVEL_OF_EVENT} AS level, {shown("payload", MAX_PAYLOAD)}
FROM (SELECT event_id, ts, kind, payload {_EVENTS} LIMIT {MAX_SCANNED}) AS scanned
WHERE (kind = 'log' AND ($4::text IS NULL OR payload -> 'fields' ->> 'load' = $4)
       OR kind IN {ATTEMPTS} AND payload ->> 'reason' IS DISTINCT FROM 'lock_key')
  AND ($3::text[] IS NULL OR {LEVEL_OF_EVENT} = ANY ($3))
ORDER BY event_id LIMIT $5
"""
_END: Final = f"""
SELECT task, status::text AS status, CASE WHEN $3 THEN (SELECT event_id {_EVENTS} OFFSET {MAX_SCANNED - 1} LIMIT 1) END
  AS scanned
FROM dl_jobs WHERE job_id = $1
"""


@attrs.frozen
class JobLogPage:
    """Page of a job's log, and the job's status."""

    task: str
    status: Status
    page: LogPage


async def list_log(
    database: Database,
    job_id: UUID,
    *,
    after: After = None,
    limit: int = 200,
    level: Level | None = None,
    load: str | None = None,
    most_text: int = MAX_PAGE_PAYLOADS,
) -> LogPage:
    """Return at most `limit` (1 to 1,000) lines of a job's log in order, behind `after`.

    A page has at most `most_text` characters, so a page of long lines, which other services may write, has fewer lines.

    `level` leaves out lower levels, and `load` leaves out lines about other loads of a flow. A failed attempt has level
    error; its beginning, and any other end, have level info.

    Raises `JobNotFound`, and `BadRequest` if `limit` or `load` is not allowed.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    if load is not None:
        check_text("load", load, MAX_NAME)
    wanted = (_levels(level), load)
    page, _ = await database.run(
        _aio_list_log, job_id, _behind(after), wanted, limit, is_told=False, most_text=most_text
    )
    return page


async def read_job_log(
    database: Database, job_id: UUID, *, after: After = None, limit: int = 200, level: Level | None = None
) -> JobLogPage:
    """Return the result of `list_log` with the job's status, which tells whether more lines will follow."""
    check_between("limit", limit, 1, MAX_PAGE)
    page, job = await database.run(_aio_list_log, job_id, _behind(after), (_levels(level), None), limit, is_told=True)
    return JobLogPage(job["task"], Status(job["status"]), page)


def _behind(after: After) -> int:
    return 0 if after is None else BY_NUMBER.key(after)


def _levels(level: Level | None) -> Sequence[Level] | None:
    return None if level is None else LEVELS[LEVELS.index(level) :]


async def _aio_list_log(
    connection: Any,
    job_id: UUID,
    after: int,
    wanted: tuple[object, ...],
    limit: int,
    *,
    is_told: bool,
    most_text: int = MAX_PAGE_PAYLOADS,
) -> tuple[LogPage, Any]:
    """Return a page, and the job's row if `is_told` or if it was read anyway."""
    async with connection.transaction(readonly=True):
        rows, more = await aio_fetch_page(
            connection,
            _LINES,
            (job_id, after, *wanted, limit + 1),
            limit,
            texts=("payload",),
            most=most_text,
        )
    lines = [line_of(row) for row in rows]
    last, job = lines[-1].event_id if more else None, None
    if is_told or not more:
        job = await connection.fetchrow(_END, job_id, after, not more)
        if job is None and (is_told or not rows):
            raise JobNotFound(f"no job has the ID {job_id}")
        if job is not None:
            last = last or job["scanned"]
    return LogPage(lines, None if last is None else BY_NUMBER.text(last)), job


def line_of(row: Mapping[str, Any]) -> LogLine:
    """Return a row as a line: ours, ours cut because it was too long, or any text that another service wrote."""
    payload = read_payload(row)
    if row["kind"] != "log":
        fields = payload if isinstance(payload, dict) else {}
        return LogLine(
            event_id=row["event_id"],
            ts=row["ts"],
            kind=row["kind"],
            level=row["level"],
            message=_said(row["kind"], fields),
            fields=fields,
        )
    ours = payload if isinstance(payload, dict) and isinstance(payload.get("message"), str) else {}
    level, fields = ours.get("level"), ours.get("fields", {}) if ours else {"payload": payload}
    return LogLine(
        event_id=row["event_id"],
        ts=row["ts"],
        level=level if isinstance(level, str) else None,
        message=ours.get("message", ""),
        fields=fields if isinstance(fields, dict) else {"fields": fields},
    )


def _said(kind: str, payload: Mapping[str, Any]) -> str:
    """Return the sentence for an event of an attempt; `error` has the failure. Other services may omit any field."""
    if kind == "canceled" and (others := payload.get("failed")) and isinstance(others, dict):
        shown = [f"{job_id} {'failed' if end == 'failed' else f'was {end}'}" for job_id, end in others.items()]
        return f"the job was canceled, because of jobs that it depends on: {', '.join([*shown[:3], '…'][: len(shown)])}"
    attempt = f"attempt {payload['attempt']}" if isinstance(payload.get("attempt"), int) else "the attempt"
    event = f"{kind}: {payload.get('reason')}" if kind == "requeue" else kind
    return _SAID.get(event, "the job was queued again").format(attempt=attempt)


# An event that uses up no attempt has the number of the previous attempt in its payload.
_SAID: Final = {
    "picked": "{attempt} began",
    "done": "the job succeeded",
    "moved": "{attempt} succeeded; the job goes on with its next stage",
    "failed": "{attempt} failed for good",
    "lost": "{attempt} ended for good: worker lost",
    "canceled": "the job was canceled",
    "requeue: retry": "{attempt} failed",
    "requeue: lease expired": "{attempt} ended: worker lost",
    "requeue: snooze": "the attempt was snoozed",
    "requeue: return": "the attempt was released",
    "requeue: period_end": "the attempt was stopped at the end of a work period",
    "requeue: the claim's reply was lost": "the attempt was released",
    "requeue: operator": "an operator queued the job again",
}
