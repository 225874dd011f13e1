"""State transitions of a job as a table. This is the only place in code where they are defined.

store/ writes these transitions in SQL, the property test checks random histories against this table, and
docs/architecture.md shows it. Foreign services may change their rows otherwise; the table is about our own writes.
"""

from __future__ import annotations

import enum
from typing import Final


class Status(enum.StrEnum):
    """Status of a job: the type `dl_status` of the tables."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"
    LOST = "lost"

    @property
    def is_final(self) -> bool:
        """True if the job has ended: only an operator's retry can change it again."""
        return self in FINAL


FINAL: Final = frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELED, Status.LOST})


class WaitsFor(enum.StrEnum):
    """Reason why a queued job cannot run now; a queued job without one is ready.

    TIME: `available_at` is in the future. LOCK: another job with its `lock_key` runs. AFTER: a job that it runs after
    has not ended. LIMIT: the limits of its task or of the task's supplier.
    """

    TIME = "time"
    LOCK = "lock"
    AFTER = "after"
    LIMIT = "limit"


class QueueState(enum.StrEnum):
    """State of a queue that keeps even its ready jobs waiting; derived from the database on demand.

    PAUSED: an operator paused it. NO_WORKER: no dataloader worker serves it; another service may. FULL: all slots of
    its workers are in use. UNKNOWN_TASK: none of its workers knows the job's task.
    """

    PAUSED = "paused"
    NO_WORKER = "no_worker"
    FULL = "full"
    UNKNOWN_TASK = "unknown_task"


class Step(enum.StrEnum):
    """Transition of a job, named as in the event history if it is recorded there (Q11)."""

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
"""(status before, step) → status after. We make no other transitions."""
