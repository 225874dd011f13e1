"""Every error the product raises, in one place, so that a reader can catch what he means to catch.

Each class says who raises it and what to do about it. Errors are for what went wrong; outcomes that are not failures
(`Retry`, `Snooze`, `GiveUp`) are values a handler returns and live in outcomes.py.
"""

from __future__ import annotations


class DataloaderError(Exception):
    """The root: `except DataloaderError` catches all that is ours and nothing else."""


class ConfigError(DataloaderError):
    """A setting is wrong. The text has one line for each: the variable, its value and what is allowed. Exit code 2."""


class AddressError(DataloaderError, OSError):
    """The HTTP server can't listen at the address of the settings: it is taken, or is none of this machine."""


class StoreError(DataloaderError):
    """The database refused a statement in a way that trying again will not mend."""


class StoreUnavailable(StoreError):  # noqa: N818 - a state of the world that passes, not a defect
    """The database can't be reached, or answered too late. The write may or may not have happened; try again later."""


class NotificationFlood(StoreError):  # noqa: N818 - a state of the world that passes, not a defect
    """More notifications come than may be read beside heartbeats and claims. Polling finds what they told of."""


class AccessDenied(StoreUnavailable):
    """Nobody gets in by this address: no such database or role, a wrong password, a parameter or file that is wrong.

    The text names the setting. A process that runs waits for it as for a database that is away; none starts.
    """


class Unstorable(StoreError):  # noqa: N818 - says what the value is
    """A value can't be stored: it is out of range, too large, or no text for PostgreSQL. The value is at fault."""


class SchemaError(StoreError):
    """The tables are missing, too new, or belong to somebody else. The text says which, and what to run."""


class TargetError(StoreError):
    """A load does not fit its target: no such table, column or unique key, or a snapshot older than its history."""


class EmbeddedDatabaseError(DataloaderError):
    """The embedded PostgreSQL could not be started, or has ended. The text may end with the last lines of its log."""


class BadRequest(DataloaderError, ValueError):  # noqa: N818 - reads as what it is at the edge
    """What the caller asks for can't be done as asked: the field, its value and what is allowed."""

    def __init__(self, field: str, message: str) -> None:
        """`field` is the path of the bad field (`jobs[3].priority`), `message` what is allowed there."""
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NotFound(DataloaderError, LookupError):  # noqa: N818
    """Nothing has this id or name; the text says what was looked for. A 404, exit code 4."""


class JobNotFound(NotFound):
    """No job has this id: it never existed, or retention has deleted it."""


class IdempotencyConflict(DataloaderError):  # noqa: N818
    """The idempotency key was used before for another request (Q2). Use a new key, or send the first request again."""

    def __init__(self, key: str, job_id: object) -> None:
        """`key` is the idempotency key, `job_id` the job that has it."""
        super().__init__(f"idempotency_key {key!r} belongs to job {job_id}, which was requested differently")
        self.key = key
        self.job_id = job_id


class Conflict(DataloaderError):  # noqa: N818
    """The job's status does not allow what was asked. The text says which does; read the job and decide again."""

    def __init__(self, job_id: object, status: str, message: str) -> None:
        """`status` is the job's status now, `message` what is allowed."""
        super().__init__(f"job {job_id} is {status}; {message}")
        self.job_id = job_id
        self.status = status


class Draining(DataloaderError):  # noqa: N818
    """This process is shutting down and takes no new jobs. Ask another replica, or try again in a moment."""


class LeaseLost(DataloaderError):  # noqa: N818
    """The job is no longer this worker's: its lease ended or the row was changed by another. Its writes are void."""


class ActorGaveUp(DataloaderError):  # noqa: N818
    """A part of the supervisor failed more often than its restart budget allows. The process drains and exits 1."""
