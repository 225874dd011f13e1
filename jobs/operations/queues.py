"""Operations on queues and workers, on statistics of runs, and on the audit log.

A pause is stored in the database and applies to all processes; running jobs continue.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta, Struct

from dataloader.jobs.listings import MAX_PAGE, AuditPage, QueuePage, WorkerPage
from dataloader.jobs.model import Instant, about
from dataloader.jobs.operations.fields import AfterPage, Limit, QueueName, TaskName
from dataloader.jobs.operations.operation import Operation, Operations
from dataloader.jobs.roles import Role
from dataloader.jobs.run_stats import RunStatsPage, Span
from dataloader.jobs.secrets.record_masks import SENSITIVE

queues: Final = Operations()

STATS_NAMES: Final = {"begin": "from", "end": "to"}
"""Names in HTTP of fields whose names Python reserves, or that are clearer there."""


class QueuePaused(Struct, frozen=True):
    """State of a queue after it was paused or resumed, for all processes."""

    EXAMPLE: ClassVar[Any] = {"queue": "load.cbr", "paused": True}

    queue: Annotated[str, about("Name of the queue."), SENSITIVE]
    paused: Annotated[bool, about("True if it is paused now.")]


@queues.declare("GET", "/queues", role=Role.READ)
class ListQueues(Operation[QueuePage], kw_only=True):
    """List the queues that have work, are served or are paused, by name."""

    limit: Limit = 200
    after: AfterPage | None = None


@queues.declare("POST", "/queues/{queue}/pause", role=Role.OPERATE)
class PauseQueue(Operation[QueuePaused]):
    """Pause a queue: no process starts its jobs until it is resumed. Running jobs continue."""

    queue: str


@queues.declare("POST", "/queues/{queue}/resume", role=Role.OPERATE)
class ResumeQueue(Operation[QueuePaused]):
    """Resume a queue: its jobs start again immediately."""

    queue: str


@queues.declare("GET", "/workers", role=Role.READ)
class ListWorkers(Operation[WorkerPage], kw_only=True):
    """List the processes that sent a heartbeat in the last minute, by name."""

    limit: Limit = MAX_PAGE
    after: AfterPage | None = None


@queues.declare("GET", "/stats", role=Role.READ)
class ListStats(Operation[RunStatsPage], kw_only=True, rename=STATS_NAMES):
    """List how many runs ended, by time, queue, task and outcome, and their durations.

    A run is one attempt. Statistics stay for `DL_RETAIN_STATS_DAYS` when jobs are deleted. Runs of other services are
    not counted, nor are those of the last second of a process that was killed.
    """

    limit: Limit = 1_000
    after: AfterPage | None = None
    begin: Annotated[Instant, about("Begin: the first hour or day contains it. Default: a day ago.")] | None = None
    end: Annotated[Instant, about("End: hours that begin before it. Default: all.")] | None = None
    queue: QueueName | None = None
    task: TaskName | None = None
    by: Annotated[Span, about("Period per row: an hour, a day in UTC, or the whole time.")] = "hour"


@queues.declare("GET", "/audit", role=Role.ADMIN)
class ListAudit(Operation[AuditPage], kw_only=True):
    """List the operators' actions, newest first."""

    limit: Limit = 50
    after: AfterPage | None = None
    before: Annotated[AfterPage, Meta(description="Former name of `after`; an `audit_id`.")] | None = None

    def __post_init__(self) -> None:
        """Refuse both names together."""
        if self.before is not None and self.after is not None:
            raise ValueError("before: is the former name of after; send one of them")
