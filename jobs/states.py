"""The life of a job as a table: which status follows which, and by whose hand. The only place where this is written.

store/ writes these transitions in SQL, the property test drives random histories and holds every one against this
table, and docs/architecture.md draws it. Foreign services may do other things to their rows; the table is about our own
writes.
"""

from __future__ import annotations

import enum
from typing import Final


class Status(enum.StrEnum):
    """The type `dl_status` of the queue's contract (Q1)."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"
    LOST = "lost"

    @property
    def is_final(self) -> bool:
        """True when the job has ended: only an operator's retry can change it again."""
        return self in FINAL


FINAL: Final = frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELED, Status.LOST})


class WaitsFor(enum.StrEnum):
    """Why a queued job can't run now; a queued job that waits for nothing is ready.

    TIME: `available_at` lies ahead. LOCK: another job of its `lock_key` runs. TASK: a worker of the release before did
    not know the task. AFTER: a job that it runs after has not ended. LIMIT: the limits of its task or of the task's
    supplier.
    """

    TIME = "time"
    LOCK = "lock"
    TASK = "task"
    AFTER = "after"
    LIMIT = "limit"


class QueueState(enum.StrEnum):
    """The state of a queue that keeps even its ready jobs waiting; read from the database on demand.

    PAUSED: an operator paused it. NO_WORKER: no dataloader worker serves it; another service may. FULL: all slots of
    its workers are taken. UNKNOWN_TASK: none of its workers knows the job's task.
    """

    PAUSED = "paused"
    NO_WORKER = "no_worker"
    FULL = "full"
    UNKNOWN_TASK = "unknown_task"


class Step(enum.StrEnum):
    """What can happen to a job, named as in its journal where it is journalled (Q11)."""

    CLAIM = "claim"
    SUCCEED = "succeed"
    FAIL = "fail"
    RETRY = "retry"
    SNOOZE = "snooze"
    RETURN = "return"
    CLOSE = "period_end"
    CANCEL = "cancel"
    MOVE = "move"
    EXPIRE = "expire"
    LOSE = "lose"
    PARK = "park"
    READY = "ready"
    REVIVE = "revive"


TRANSITIONS: Final[dict[tuple[Status, Step], Status]] = {
    (Status.QUEUED, Step.PARK): Status.QUEUED,
    (Status.QUEUED, Step.READY): Status.QUEUED,
    (Status.QUEUED, Step.CLAIM): Status.RUNNING,
    (Status.QUEUED, Step.CANCEL): Status.CANCELED,
    (Status.RUNNING, Step.SUCCEED): Status.SUCCEEDED,
    (Status.RUNNING, Step.FAIL): Status.FAILED,
    (Status.RUNNING, Step.RETRY): Status.QUEUED,
    (Status.RUNNING, Step.SNOOZE): Status.QUEUED,
    (Status.RUNNING, Step.RETURN): Status.QUEUED,
    (Status.RUNNING, Step.CLOSE): Status.QUEUED,
    (Status.RUNNING, Step.CANCEL): Status.CANCELED,
    (Status.RUNNING, Step.MOVE): Status.QUEUED,
    (Status.RUNNING, Step.EXPIRE): Status.QUEUED,
    (Status.RUNNING, Step.LOSE): Status.LOST,
    (Status.FAILED, Step.REVIVE): Status.QUEUED,
    (Status.CANCELED, Step.REVIVE): Status.QUEUED,
    (Status.LOST, Step.REVIVE): Status.QUEUED,
}
"""(status before, step) → status after. What is not here does not happen by our hand."""
