"""What authors of durable processes write: what a step came to, and what comes next (P1 to P6).

A process has an id, a state, metadata and numbered events. It is driven by tasks (init, call, repair, timeout, remove):
each runs one step, an async function of the author's, whose outcome is stored whole or not at all.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias
from uuid import UUID

import attrs

from dataloader.jobs.errors import BadRequest, Conflict, DataloaderError, NotFound
from dataloader.jobs.model import check_instant, check_name
from dataloader.jobs.text import exact_json

MAX_TYPE: Final = 192
"""The longest name of a type: its queue's is longer by `process.`."""
MAX_PROCESS_ID: Final = 256
MAX_METHOD: Final = 200
MAX_VALUE: Final = 1 << 20
"""Bytes of args, a state or an answer, as JSON."""
MAX_EVENT: Final = 256 << 10
MAX_EVENTS: Final = 1_000
"""The most events of one step."""
MAX_METADATA: Final = 16 << 10
MAX_TIMER_S: Final = 315_576_000
"""The longest timer, in seconds: ten years."""
RESERVED: Final = frozenset({"batch", "deliveries", "errors", "repair", "resume", "sinks", "tasks", "versions"})
"""Names that no type has: they have addresses of their own."""


def check_type(name: str, value: str) -> None:
    """Raise `BadRequest` unless `value` may be the name of a type: 1 to 192 characters on one line, without a `/`."""
    check_name(name, value, MAX_TYPE)
    if "/" in value or value in RESERVED:
        allowed = f"must have no / and be none of {', '.join(sorted(RESERVED))}, which have addresses of their own"
        raise BadRequest(name, f"{allowed}; it is {value!r:.60}")


def check_process_id(name: str, value: str) -> None:
    """Raise `BadRequest` unless `value` may be a process's id, which is the end of its address.

    It has 1 to 256 characters on one line, does not begin with a `/`, and is not `.` or `..`.
    """
    check_name(name, value, MAX_PROCESS_ID)
    if value.startswith("/"):
        raise BadRequest(name, f"must not begin with a /, as {value!r:.60} does")
    if value in {".", ".."}:
        raise BadRequest(name, f"must not be {value!r}, which no address can end with")


def check_metadata(name: str, value: Mapping[str, Any]) -> str:
    """Metadata as JSON. Raises `BadRequest` for what is not flat, or longer than 16 KiB."""
    for key, one in value.items():
        if isinstance(one, Mapping | list | tuple | set | frozenset):
            raise BadRequest(f"{name}.{key}", "must be a string, a number, a boolean or null")
    return exact_json(name, dict(value), MAX_METADATA)


class Unchanged(enum.Enum):
    """Stands for a state or metadata that a step leaves as they were."""

    UNCHANGED = enum.auto()


UNCHANGED: Final = Unchanged.UNCHANGED


class Rest(enum.Enum):
    """What comes after a step besides a timer."""

    KEEP = enum.auto()
    """The timer stays, if there is one; one that has run is over."""
    SUSPEND = enum.auto()
    """No timer: the process waits until it is called."""


KEEP: Final = Rest.KEEP
SUSPEND: Final = Rest.SUSPEND


def _check_when(after_s: float | None, at: datetime | None) -> None:
    if (after_s is None) == (at is None):
        raise BadRequest("next", "must have after_s or at, and not both")
    if after_s is not None and not 0 <= after_s <= MAX_TIMER_S:
        raise BadRequest("next.after_s", f"must be a number of seconds from 0 to {MAX_TIMER_S:,}, not {after_s!r:.60}")
    if at is not None:
        check_instant("next.at", at)


@attrs.frozen(kw_only=True)
class Timer:
    """Run the type's timeout in `after_s` seconds, or at an instant, in place of the timer before.

    With 0 seconds it runs at once, unless a call waits, which goes first. `context` is given to it.
    """

    after_s: float | None = None
    at: datetime | None = None
    context: Any = None

    def __attrs_post_init__(self) -> None:
        """Refuse what is no time."""
        _check_when(self.after_s, self.at)


@attrs.frozen(kw_only=True)
class Remove:
    """Remove the process in `after_s` seconds, or at an instant; `Remove()` removes it with this step."""

    after_s: float | None = None
    at: datetime | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse what is no time."""
        if self.after_s is not None or self.at is not None:
            _check_when(self.after_s, self.at)


Following: TypeAlias = Timer | Remove | Rest


@attrs.frozen
class Done:
    """The step went well.

    Args:
        response: what its caller gets, as JSON.
        state: the new state, whole; without it the state stays.
        metadata: the new metadata, whole, by which processes are found; without it they stay.
        events: what has happened, each a JSON value; the engine numbers them.
        next: what comes then: `Timer`, `Remove`, `SUSPEND`, or `KEEP`.
    """

    response: Any = None
    state: Any = attrs.field(default=UNCHANGED, kw_only=True)
    metadata: Mapping[str, Any] | Unchanged = attrs.field(default=UNCHANGED, kw_only=True)
    events: Sequence[Any] = attrs.field(default=(), kw_only=True)
    next: Following = attrs.field(default=KEEP, kw_only=True)


@attrs.frozen
class Refuse:
    """The step changes nothing, and its caller gets `reason` as an error; the timer goes on. Not for a timeout."""

    reason: str


@attrs.frozen
class Fail:
    """The step has failed: a timeout is tried again by the type's policy unless `final`, all else fails for good."""

    reason: str
    final: bool = False


StepResult: TypeAlias = Done | Refuse | Fail


class Transient(Exception):  # noqa: N818 - an author raises it to say what will pass
    """Raised by a timeout that is worth another try."""


class ProcessNotFound(NotFound):
    """No process has this id, or no task of a process this number."""


class HistoryChanged(ProcessNotFound):
    """The task has another ident than the caller's: the database was restored, or an older standby was promoted.

    The request is gone with its effects on the database, and the number is another task's. Ask again.
    """


class ProcessConflict(Conflict):
    """The process's status does not allow the request. The text says which does; read it and decide again."""

    def __init__(self, process_type: str, process_id: str, status: str, message: str) -> None:
        """`status` is the process's status now, `message` what is allowed."""
        DataloaderError.__init__(self, f"the process {process_type}/{process_id} is {status}; {message}")
        self.job_id = None
        self.process_type, self.process_id, self.status, self.message = process_type, process_id, status, message


class Refused(DataloaderError):  # noqa: N818 - a public name that says it
    """The step has refused the request; its text is the step's, `task_id` the request's task."""

    def __init__(self, message: str, task_id: int | None = None) -> None:
        super().__init__(message)
        self.task_id = task_id


class ProcessFailed(DataloaderError):  # noqa: N818 - a public name that says it
    """The request has no answer: its step has failed, or it was cancelled, or has expired. The text says why."""

    def __init__(self, message: str, task_id: int | None = None) -> None:
        super().__init__(message)
        self.task_id = task_id


class CallTimeout(DataloaderError):  # noqa: N818 - a public name that says it
    """The answer has not come in time; the task continues: wait for it by its `task_id` and `ident`.

    `withdrawn`: it had not begun, and was taken back, so that it never runs.
    """

    def __init__(self, task_id: int, *, withdrawn: bool = False, ident: UUID | None = None) -> None:
        end = "was taken back before it began" if withdrawn else "goes on"
        super().__init__(f"the task {task_id} has no answer yet; it {end}")
        self.task_id, self.withdrawn, self.ident = task_id, withdrawn, ident
