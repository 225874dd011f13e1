"""Lists for readers: the filter of jobs, and the pages of jobs, events, lines, actions.

Every page has `next`: the value to send as `after` for the next page, or None if there is none.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import attrs

from dataloader.jobs.failures import group_key
from dataloader.jobs.model import (
    MAX_INT,
    Instant,
    JobEvent,
    JobRecord,
    QueueRecord,
    WorkerRecord,
    about,
    check_instant,
    check_text,
)
from dataloader.jobs.page_cursor import Next
from dataloader.jobs.secrets.record_masks import SENSITIVE
from dataloader.jobs.states import Status

MAX_PAGE: Final = 1_000
"""Maximum number of rows that one call lists."""

Level = Literal["info", "warning", "error"]
LEVELS: Final[tuple[Level, ...]] = ("info", "warning", "error")
"""Levels of a job's log, from the least serious to the most."""


@attrs.frozen(kw_only=True)
class JobFilter:
    """Filter of jobs; a field that is None matches all. `…_from` is inclusive, `…_to` exclusive.

    `finished_…` is when a job ended: jobs that have not ended do not match. `root` matches that job and all jobs of its
    group. `error_group` is the ID of a group of errors: it matches jobs that failed with one of them, for good or until
    their next attempt. `worker` is the process that runs a job: other jobs do not match.

    Raises `BadRequest` for a text that PostgreSQL cannot store and for a timestamp without a time zone.
    """

    queue: str | None = None
    task: str | None = None
    status: frozenset[Status] | None = None
    lock_key: str | None = None
    created_from: datetime | None = None
    created_to: datetime | None = None
    finished_from: datetime | None = None
    finished_to: datetime | None = None
    root: UUID | None = None
    error_group: str | None = None
    worker: str | None = None
    schedule: str | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse impossible values. Names may be longer than ours, since other services' rows can have them."""
        for name in ("queue", "task", "lock_key", "worker", "schedule"):
            text = getattr(self, name)
            if text is not None:
                check_text(name, text, MAX_INT, empty=True)
        for name in ("created_from", "created_to", "finished_from", "finished_to"):
            instant = getattr(self, name)
            if instant is not None:
                check_instant(name, instant)
        if self.error_group is not None:
            group_key("error_group", self.error_group)

    def criteria(self) -> dict[str, Any]:
        """Return the given criteria, by name."""
        return {name: value for name, value in attrs.asdict(self, recurse=False).items() if value is not None}


EVERY_JOB: Final = JobFilter()


@attrs.frozen
class JobPage:
    """Page of jobs, newest first."""

    jobs: Annotated[list[JobRecord], about("Jobs.")]
    next: Next


@attrs.frozen
class EventPage:
    """Page of a job's event history, oldest first. Without a `next` there are no more events yet."""

    events: Annotated[list[JobEvent], about("Events.")]
    next: Next


@attrs.frozen(kw_only=True)
class LogLine:
    """Line of a job's log. `level` is None for a line of another service, whose payload is in `fields`.

    `kind` is `log` for lines that the job has logged. Other kinds are events of the job: an attempt began (`picked`) or
    ended, with the event's payload as `fields`.
    """

    event_id: Annotated[int, about("Number of the line, in ascending order of time.")]
    ts: Annotated[Instant, about("Timestamp of the line.")]
    level: Annotated[str | None, about("Level; null for a line of another service."), SENSITIVE]
    message: Annotated[str, about("Message."), SENSITIVE]
    fields: Annotated[
        dict[str, Any], about("Fields of the line; for an event of the event history, its payload."), SENSITIVE
    ]
    kind: Annotated[
        str, about("`log` for a line that the job has logged, otherwise the kind of the event."), SENSITIVE
    ] = "log"


@attrs.frozen
class LogPage:
    """Page of a job's log, oldest line first. Without a `next` there are no more lines yet."""

    lines: Annotated[list[LogLine], about("Log lines.")]
    next: Next


@attrs.frozen
class AuditRecord:
    """Operator's action: `actor` did `action`, to one job (`job_id`) or to the jobs that `detail` names."""

    audit_id: Annotated[int, about("Number of the entry, in ascending order of time.")]
    ts: Annotated[Instant, about("Timestamp of the action.")]
    actor: Annotated[str, about("Operator: name of the API token or the user."), SENSITIVE]
    action: Annotated[str, about("Action."), SENSITIVE]
    job_id: Annotated[UUID | None, about("ID of the job; null for an action on many jobs or on a queue.")]
    detail: Annotated[dict[str, Any], about("Details: filter, former status, changes."), SENSITIVE]


@attrs.frozen
class AuditPage:
    """Page of operators' actions, latest first."""

    audit: Annotated[list[AuditRecord], about("Audit entries.")]
    next: Next


@attrs.frozen
class QueuePage:
    """Page of the queues that have work, are served or are paused, by name."""

    queues: Annotated[list[QueueRecord], about("Queues.")]
    next: Next


@attrs.frozen
class WorkerPage:
    """Page of the processes that sent a heartbeat in the last minute, by name."""

    workers: Annotated[list[WorkerRecord], about("Processes.")]
    next: Next
