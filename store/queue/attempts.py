"""Data for a job's page beside its row: its attempts, from its event history, and the args of the last success."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.secrets.record_masks import Sensitive
from dataloader.jobs.text import shown_json
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.reads import shown

MOST_EVENTS: Final = 200
"""Maximum number of events read from a history, the latest ones; log lines and heartbeats are not counted."""
_SCANNED: Final = 10_000
_SUCCESSES: Final = 5_000
"""Number of the latest succeeded jobs searched for one of the task: no index has the task."""
_MOST_TEXT: Final = 4_000

# Other services may write timestamps that Python cannot represent; they are moved to the nearest that it can.
JOURNAL: Final = f"""
SELECT event_id, least(greatest(ts, '0001-01-02Z'), '9999-12-30Z') AS ts, kind, payload ->> 'reason' AS reason, payload ->> 'by' AS by, payload ->> 'worker' AS worker, payload ->> 'attempt' AS attempt,
       left(payload ->> 'error', {_MOST_TEXT}) AS error,
       CASE WHEN jsonb_typeof(payload -> 'delay_s') = 'number' THEN least((payload ->> 'delay_s')::numeric, 1e9)::float8 END
         AS delay_s
FROM (SELECT event_id, ts, kind, payload FROM dl_job_events WHERE job_id = $1 ORDER BY event_id DESC LIMIT {_SCANNED}) AS e
WHERE kind NOT IN ('log', 'heartbeat') ORDER BY event_id DESC LIMIT {MOST_EVENTS}
"""  # noqa: E501 - one line a part
ID_OF_LAST_SUCCESS: Final = f"""
SELECT s.job_id FROM (
  SELECT job_id, task FROM dl_jobs WHERE status = 'succeeded' AND finished_at IS NOT NULL
  ORDER BY finished_at DESC LIMIT {_SUCCESSES}) AS s WHERE s.task = $1 AND s.job_id <> $2 LIMIT 1
"""
"""Query for the last succeeded job of the task $1 besides the job $2."""
_LAST_SUCCESS: Final = f"""
SELECT job_id, finished_at, {shown("args")} FROM dl_jobs WHERE job_id = ({ID_OF_LAST_SUCCESS})
"""
_ENDS: Final = frozenset({"requeue", "done", "failed", "canceled", "lost", "moved"})
_ENDED: Final = {
    "done": "succeeded", "failed": "failed", "canceled": "canceled", "lost": "lost", "moved": "moved to the next stage",
    "retry": "failed", "lease expired": "worker lost", "snooze": "snoozed", "return": "released",
    "period_end": "stopped at the end of a work period", "operator": "queued again by an operator",
}  # fmt: skip


@attrs.frozen(kw_only=True)
class JournalLine:
    """Event of a job's history, with the fields that this program writes."""

    event_id: int
    ts: datetime
    kind: Sensitive[str]
    reason: Sensitive[str | None]
    by: Sensitive[str | None]
    worker: Sensitive[str | None]
    attempt: Sensitive[str | None]
    error: Sensitive[str | None]
    delay_s: float | None


@attrs.frozen(kw_only=True)
class Attempt:
    """Attempt of a job. If it failed, `next_at` is the time at which the next attempt was due."""

    number: str | None
    began: datetime | None
    ended: datetime | None
    worker: str | None
    outcome: str
    error: str | None
    next_at: datetime | None

    @property
    def took(self) -> timedelta | None:
        """Duration of the attempt."""
        return None if self.began is None or self.ended is None else self.ended - self.began


@attrs.frozen
class Journal:
    """The latest events of a job and the attempts in them, oldest first. `is_whole`: the job has no other events."""

    lines: Sequence[JournalLine]
    is_whole: bool

    @property
    def attempts(self) -> list[Attempt]:
        """Beginning and end of each attempt. Waiting for a lock key is not an attempt."""
        found: list[Attempt] = []
        begun: JournalLine | None = None
        for line in self.lines:
            if line.kind == "picked":
                if begun is not None:
                    found.append(_attempt(begun, None))
                begun = line
            elif line.kind in _ENDS and line.reason not in {"lock_key", "operator"} and begun is not None:
                found.append(_attempt(begun, line))
                begun = None
        if begun is not None:
            found.append(_attempt(begun, None))
        return found


def _attempt(begun: JournalLine, end: JournalLine | None) -> Attempt:
    if end is None:
        return Attempt(
            number=begun.attempt,
            began=begun.ts,
            ended=None,
            worker=begun.worker,
            outcome="running",
            error=None,
            next_at=None,
        )
    outcome = _ENDED.get((end.reason or "") if end.kind == "requeue" else end.kind, end.reason or end.kind)
    delay = end.delay_s if end.kind == "requeue" else None
    return Attempt(
        number=begun.attempt,
        began=begun.ts,
        ended=end.ts,
        worker=begun.worker,
        outcome=outcome,
        error=end.error,
        next_at=None if delay is None or not 0 <= delay < 1e9 else end.ts + timedelta(seconds=delay),
    )


@attrs.frozen
class Success:
    """Succeeded job of a task, with its args."""

    job_id: UUID
    finished_at: datetime
    args: Any


async def last_success(database: Database, task: str, job_id: UUID) -> Success | None:
    """Return the task's last succeeded job besides `job_id`; None if the latest successes are of other tasks."""
    return await database.run(_aio_last_success, task, job_id)


async def _aio_last_success(connection: Any, task: str, job_id: UUID) -> Success | None:
    record: Mapping[str, Any] | None = await connection.fetchrow(_LAST_SUCCESS, task, job_id)
    if record is None:
        return None
    return Success(record["job_id"], record["finished_at"], shown_json(record["args"]))
