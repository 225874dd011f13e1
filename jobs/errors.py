"""Every error that the product raises, in one place.

Each class says when it is raised and what to do about it. Errors are failures. Outcomes that are not failures (`Retry`,
`Snooze`, `GiveUp`) are values that a handler returns, and are in outcomes.py.
"""

from __future__ import annotations


class DataloaderError(Exception):
    """Base class of all errors of the product."""


class ConfigError(DataloaderError):
    """A setting is invalid. The text has a line for each: the variable, its value and what is allowed. Exit code 2."""


class AddressError(DataloaderError, OSError):
    """The HTTP server cannot listen at the configured address: it is in use, or not one of this machine."""


class StoreError(DataloaderError):
    """The database refused a statement, and would refuse it again."""


class StoreUnavailable(StoreError):  # noqa: N818 - a temporary state, not a defect
    """The database cannot be reached, or answered too late. The write may or may not have happened. Try again later."""


class NotificationFlood(StoreError):  # noqa: N818 - a temporary state, not a defect
    """Notifications arrive faster than they can be read beside heartbeats and claims. Polling finds the jobs."""


class AccessDenied(StoreUnavailable):
    """The connection is refused: no such database or role, or a wrong password, parameter or file.

    The text names the setting. A running process waits, as for an unavailable database; a new process does not start.
    """


class Unstorable(StoreError):  # noqa: N818 - describes the value
    """A value cannot be stored: it is out of range, too large, or not a text that PostgreSQL accepts."""


class SchemaError(StoreError):
    """The tables are missing, too new, or owned by another role. The text says which, and what to run."""


class TargetError(StoreError):
    """A load does not fit its target: no such table, column or unique key, or a snapshot older than its history."""


class EmbeddedDatabaseError(DataloaderError):
    """The embedded PostgreSQL could not be started, or has ended. The text may end with the last lines of its log."""


class BadRequest(DataloaderError, ValueError):  # noqa: N818 - the usual name
    """A request is invalid: the text names the field, its value and what is allowed."""

    def __init__(self, field: str, message: str) -> None:
        """Create the error.

        `field` is the path of the bad field (`jobs[3].priority`), `message` what is allowed there.
        """
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NotFound(DataloaderError, LookupError):  # noqa: N818
    """No object has this ID or name; the text names it. HTTP status 404, exit code 4."""


class JobNotFound(NotFound):
    """No job has this ID: it never existed, or retention has deleted it."""


class IdempotencyConflict(DataloaderError):  # noqa: N818
    """The idempotency key was used for another request (Q2). Use a new key, or send the first request again."""

    def __init__(self, key: str, job_id: object = None, *, task_id: int | None = None) -> None:
        """Create the error for a `key` that belongs to the job `job_id`, or to the process task `task_id`."""
        owner = f"job {job_id}" if task_id is None else f"task {task_id} of a process"
        super().__init__(f"idempotency_key {key!r} belongs to {owner}, whose request was different")
        self.key = key
        self.job_id = job_id
        self.task_id = task_id


class Conflict(DataloaderError):  # noqa: N818
    """The job's status does not allow the change. The text says which status does. Fetch the job, then decide again."""

    def __init__(self, job_id: object, status: str, message: str) -> None:
        """Create the error. `status` is the job's current status, `message` what is allowed."""
        super().__init__(f"job {job_id} is {status}; {message}")
        self.job_id = job_id
        self.status = status


class InUse(DataloaderError):  # noqa: N818
    """An object cannot be removed while others use it. The text names them, and what to do first."""


class Draining(DataloaderError):  # noqa: N818
    """This process is shutting down and takes no new jobs. Use another replica, or try again later."""


class LeaseLost(DataloaderError):  # noqa: N818
    """This worker has lost the job: its lease ended, or another process changed the row. Its writes are void."""


class JobStopped(BaseException):
    """The job was canceled, timed out, lost its lease or is drained. Raised in a task with `process=True`.

    Clean up and do not suppress it: after a grace period the process is killed.
    """


class BodyFailed(DataloaderError):  # noqa: N818 - as LeaseLost
    """A handler in a separate process has failed. `text` is the job's error; `is_final` means no further attempt.

    `for_s` is set if a supplier's limit was reached: the job continues in `for_s` seconds.
    """

    def __init__(self, text: str, *, is_final: bool = False, for_s: float | None = None) -> None:
        """Create the error; `text` has the traceback, already masked and cut."""
        super().__init__(text.partition("\n")[0])
        self.text, self.is_final, self.for_s = text, is_final, for_s


class ActorGaveUp(DataloaderError):  # noqa: N818
    """A part of the supervisor failed more often than its restart budget allows. The process drains and exits 1."""


class LimitReached(DataloaderError):  # noqa: N818 - a temporary state, not a defect
    """A supplier takes no request within the handler's wait time. The job continues later, without a used attempt.

    If the handler does not catch it, the run ends as with `Snooze(for_s)`. `why` is `budget`, `period`, `paused`, or
    `error`: the supplier's limits cannot be evaluated.
    """

    def __init__(self, supplier: str, why: str, for_s: float) -> None:
        """Create the error; in `for_s` seconds the supplier may take requests again."""
        super().__init__(f"the supplier {supplier!r} accepts no request for {for_s:.1f} s ({why})")
        self.supplier, self.why, self.for_s = supplier, why, for_s
