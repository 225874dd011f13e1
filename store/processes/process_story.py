"""Process for its page: its state, the workers for it, and its tasks with their events.

Two statements on one snapshot, whose cost is the same for ten tasks and for a hundred thousand: they read the newest
tasks by their IDs, and find the first event of each task by binary search. The events of a step have the timestamp of
its task's end. Long values are left out here and read by a separate page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final
from uuid import UUID

import attrs
import msgspec

from dataloader.jobs.failures import GroupId, group_id
from dataloader.jobs.page_cursor import BY_NUMBER, After, Next
from dataloader.jobs.process_listings import ProcessTimer, RunningStep
from dataloader.jobs.processes import check_process_id, check_type
from dataloader.jobs.secrets.record_masks import FIXED_WORD, Sensitive
from dataloader.jobs.text import shown_json
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.process_rows import brief, running_of, timer_of
from dataloader.store.processes.reads import not_found
from dataloader.store.queue.worker_rows import ALIVE_WITHIN_S

MOST_WAITING: Final = 1_000
"""Maximum count of calls."""
OPEN: Final = 10
"""Number of waiting calls that are shown: the next ones."""
EVENTS: Final = 5
"""Maximum shown events of one task."""
_NEWEST_EVENTS: Final = 10
"""Number of newest events whose tasks are shown however old they are: a timer may have waited for a long time."""
_MAX_STATE: Final = 20_000
_MAX_VALUE: Final = 2_000
_MAX_EVENT: Final = 500
_MAX_TEXT: Final = 4_000

_ONE: Final = f"""
SELECT p.key, p.type, p.process_id, p.version, p.status, p.previous_status, p.status_changed_at, p.created_at,
       left(p.detail, {_MAX_TEXT}) AS detail, p.error_group, p.corrupted_by, {brief("p.aux_state", _MAX_STATE)},
       {brief("p.metadata", _MAX_STATE)}, p.last_event_id, p.timer_task, p.timer_kind, p.timer_at, p.timer_attempt,
       {brief("p.timer_context", _MAX_VALUE)}, p.running_task, p.running_kind, p.running_at, p.crashes,
       (SELECT method FROM dl_process_tasks WHERE task_id = p.running_task) AS running_method,
       (SELECT count(*) FROM (
          SELECT FROM dl_process_tasks t
          WHERE t.key = p.key AND t.status = 'waiting' AND t.task_id IS DISTINCT FROM p.running_task
          LIMIT {MOST_WAITING}) AS calls) AS waiting,
       (SELECT count(*) FROM dl_process_holdups h WHERE h.key = p.key) AS held_up,
       j.job_id, j.status::text AS job_status, j.waits_for, j.claimed_by, j.cancel_requested,
       CASE WHEN isfinite(j.lease_expires_at) THEN j.lease_expires_at END AS lease_expires_at,
       coalesce(q.paused, false) AS queue_paused, q.changed_at AS queue_changed_at, s.workers, s.knowing, now() AS now
FROM dl_processes p
LEFT JOIN dl_jobs j ON j.job_id = p.job_id
LEFT JOIN dl_queues q ON q.queue = 'process.' || p.type
CROSS JOIN LATERAL (
  SELECT count(*) AS workers,
         count(*) FILTER (WHERE coalesce('process.' || p.type || '.v' || p.version = ANY (w.tasks), true)) AS knowing
  FROM dl_workers w
  WHERE w.seen_at > now() - make_interval(secs => {ALIVE_WITHIN_S}) AND w.queues ? ('process.' || p.type)
) AS s
WHERE p.type = $1 AND p.process_id = $2 AND p.removed_at IS NULL
"""
# LIMIT 1 although there is only one: otherwise a generic plan reads all tasks and events to join them.
_TASKS: Final = f"""
WITH RECURSIVE ended AS MATERIALIZED (
  SELECT task_id FROM dl_process_tasks
  WHERE key = $1 AND task_id < $2 AND status <> 'waiting' ORDER BY key, task_id DESC LIMIT $3
), chosen AS MATERIALIZED (
  SELECT task_id FROM ended
  UNION
  SELECT task_id FROM (
    SELECT task_id FROM dl_process_events WHERE key = $1 ORDER BY key DESC, event_id DESC LIMIT {_NEWEST_EVENTS}
  ) AS newest WHERE $4
  UNION
  SELECT unnest(ARRAY[corrupted_by, running_task]) FROM dl_processes WHERE key = $1 AND $4
  UNION
  SELECT task_id FROM (
    SELECT task_id FROM dl_process_tasks WHERE key = $1 AND status = 'waiting' ORDER BY key, task_id LIMIT {OPEN + 1}
  ) AS calls WHERE $4
), tasks AS MATERIALIZED (
  SELECT t.* FROM chosen c CROSS JOIN LATERAL (
    SELECT task_id, kind, method, status, {brief("args", _MAX_VALUE)}, {brief("context", _MAX_VALUE)}, idempotency_key,
           {brief("response", _MAX_VALUE)}, left(error, {_MAX_TEXT}) AS error, attempt, first_task, created_at,
           scheduled_at, started_at, finished_at, expires_at, ident
    FROM dl_process_tasks WHERE task_id = c.task_id AND key = $1 LIMIT 1
  ) AS t
), places (task_id, at, first, behind) AS (
  SELECT t.task_id, t.finished_at, 1::bigint, p.last_event_id + 1 FROM tasks t, dl_processes p
  WHERE p.key = $1 AND t.status = 'finished' AND t.error IS NULL
  UNION ALL
  -- What is no more there was the oldest.
  SELECT s.task_id, s.at, CASE WHEN e.at >= s.at THEN s.first ELSE m.middle + 1 END,
         CASE WHEN e.at >= s.at THEN m.middle ELSE s.behind END
  FROM places s CROSS JOIN LATERAL (SELECT (s.first + s.behind) / 2 AS middle) AS m
  LEFT JOIN LATERAL (SELECT at FROM dl_process_events WHERE key = $1 AND event_id = m.middle LIMIT 1) AS e ON true
  WHERE s.first < s.behind
)
SELECT t.*, EXISTS (SELECT FROM ended n WHERE n.task_id = t.task_id) AS is_paged, e.events
FROM tasks t
LEFT JOIN places s ON s.task_id = t.task_id AND s.first >= s.behind
LEFT JOIN LATERAL (
  SELECT json_agg(json_build_array(o.event_id, o.payload) ORDER BY o.event_id)::text AS events FROM (
    SELECT event_id, {brief("payload", _MAX_EVENT)} FROM dl_process_events
    WHERE key = $1 AND event_id >= s.first AND event_id <= s.first + {EVENTS} AND task_id = t.task_id
  ) AS o
) AS e ON true
"""


@attrs.frozen
class Brief:
    """JSON value. A value that `is_long` was left out."""

    value: Sensitive[Any]
    is_long: bool = False


@attrs.frozen
class StoryEvent:
    """Event: its number and its payload from the author."""

    event_id: int
    payload: Brief


@attrs.frozen(kw_only=True)
class StoryTask:
    """Task with the first `EVENTS` of its events. `has_more_events`: there are others.

    The fields are those of `ProcessTask`. A timer that has not begun is in the process's row, not here.
    """

    task_id: int
    kind: Annotated[str, FIXED_WORD]
    method: Sensitive[str | None]
    status: Annotated[str, FIXED_WORD]
    args: Brief
    context: Brief
    idempotency_key: Sensitive[str | None]
    response: Brief
    error: Sensitive[str | None]
    attempt: int
    first_task: int | None
    created_at: datetime
    scheduled_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    expires_at: datetime | None
    ident: UUID | None
    events: Sequence[StoryEvent]
    has_more_events: bool


@attrs.frozen(kw_only=True)
class WakeUp:
    """Wake-up job of a process."""

    job_id: UUID
    status: Annotated[str, FIXED_WORD]
    waits_for: Annotated[str | None, FIXED_WORD]
    worker: Sensitive[str | None]
    is_stopping: bool
    is_silent: bool


@attrs.frozen(kw_only=True)
class Serving:
    """Workers of a type's queue: all, and those that know the version of the process."""

    workers: int
    knowing: int
    paused: bool
    paused_at: datetime | None


@attrs.frozen(kw_only=True)
class ProcessStory:
    """Process for its page. `waiting` counts calls up to `MOST_WAITING`. `is_due`: the time of its timer has passed.

    `held_up`: number of sinks to which its deliveries have failed.

    The other fields are those of `ProcessRecord`.
    """

    type: Sensitive[str]
    process_id: Sensitive[str]
    version: int
    status: Annotated[str, FIXED_WORD]
    previous_status: Annotated[str | None, FIXED_WORD]
    status_changed_at: datetime
    created_at: datetime
    detail: Sensitive[str | None]
    error_group: GroupId | None
    corrupted_by: int | None
    state: Brief
    metadata: Brief
    last_event_id: int
    timer: ProcessTimer | None
    timer_context: Brief
    running: RunningStep | None
    running_method: Sensitive[str | None]
    crashes: int
    waiting: int
    held_up: int
    wake_up: WakeUp | None
    serving: Serving
    is_due: bool
    open: Sequence[StoryTask]
    ended: Sequence[StoryTask]
    next: Next


async def read_story(
    database: Database, process_type: str, process_id: str, *, limit: int = 25, after: After = None
) -> ProcessStory:
    """Return the process with a page of `limit` of its tasks, newest first. Raises `ProcessNotFound`, `BadRequest`."""
    check_type("type", process_type)
    check_process_id("id", process_id)
    before = 2**63 - 1 if after is None else BY_NUMBER.key(after)
    row, tasks = await database.run(_aio_story, process_type, process_id, before, limit + 1, is_first=after is None)
    return _story_of(row, tasks, limit)


async def _aio_story(
    connection: Any, process_type: str, process_id: str, before: int, most: int, *, is_first: bool
) -> tuple[Any, list[Any]]:
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        row = await connection.fetchrow(_ONE, process_type, process_id)
        if row is None:
            raise not_found(process_type, process_id)
        return row, list(await connection.fetch(_TASKS, row["key"], before, most, is_first))


def _story_of(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], limit: int) -> ProcessStory:
    paged = sorted((task["task_id"] for task in rows if task["is_paged"]), reverse=True)
    more = len(paged) > limit
    tasks = [_task_of_story(task) for task in rows if not (more and task["task_id"] == paged[-1])]
    running = row["running_task"]
    names = (
        "type", "process_id", "version", "status", "previous_status", "status_changed_at", "created_at", "detail",
        "corrupted_by", "last_event_id", "running_method", "crashes", "waiting", "held_up",
    )  # fmt: skip
    open_ = sorted(
        (task for task in tasks if task.status == "waiting" and task.task_id != running), key=lambda task: task.task_id
    )
    ended = [task for task in tasks if task.status != "waiting"]
    ended.sort(key=lambda task: (task.finished_at or task.created_at, task.task_id), reverse=True)
    return ProcessStory(
        **{name: row[name] for name in names},
        error_group=None if row["error_group"] is None else group_id(row["error_group"], None),
        state=_brief(row, "aux_state"),
        metadata=_brief(row, "metadata"),
        timer=timer_of(row, context=None),
        timer_context=_brief(row, "timer_context"),
        running=running_of(row),
        wake_up=_wake_up(row),
        serving=Serving(
            workers=row["workers"],
            knowing=row["knowing"],
            paused=row["queue_paused"],
            paused_at=row["queue_changed_at"],
        ),
        is_due=row["timer_at"] is not None and row["timer_at"] <= row["now"],
        open=[task for task in tasks if task.task_id == running and task.status == "waiting"] + open_[:OPEN],
        ended=ended,
        next=BY_NUMBER.text(paged[-2]) if more else None,
    )


def _wake_up(row: Mapping[str, Any]) -> WakeUp | None:
    if row["job_id"] is None:
        return None
    lease = row["lease_expires_at"]
    return WakeUp(
        job_id=row["job_id"],
        status=row["job_status"],
        waits_for=row["waits_for"],
        worker=row["claimed_by"],
        is_stopping=row["cancel_requested"],
        is_silent=row["job_status"] == "running" and lease is not None and lease < row["now"],
    )


def _brief(row: Mapping[str, Any], name: str) -> Brief:
    text = row[name]
    return Brief(None if text is None else shown_json(text), is_long=text is None and row[f"has_{name}"])


def _task_of_story(row: Mapping[str, Any]) -> StoryTask:
    names = (
        "task_id", "kind", "method", "status", "idempotency_key", "error", "attempt", "first_task", "created_at",
        "scheduled_at", "started_at", "finished_at", "expires_at", "ident",
    )  # fmt: skip
    listed = [] if row["events"] is None else msgspec.json.decode(row["events"])
    events = [
        StoryEvent(number, Brief(None if text is None else shown_json(text), is_long=text is None))
        for number, text in listed
    ]
    return StoryTask(
        **{name: row[name] for name in names},
        args=_brief(row, "args"),
        context=_brief(row, "context"),
        response=_brief(row, "response"),
        events=events[:EVENTS],
        has_more_events=len(events) > EVENTS,
    )
