"""Values for authors of durable processes: the outcome of a step, and the next timer.

A process has an ID, a state, metadata and numbered events. Tasks (init, call, repair, timeout, remove) drive it: each
runs one step, an async function of the author, whose outcome is stored completely or not at all.
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
"""Maximum length of a type's name: its queue's name is longer by `process.`."""
MAX_PROCESS_ID: Final = 256
MAX_METHOD: Final = 200
MAX_VALUE: Final = 1 << 20
"""Maximum size of args, a state or an answer, in bytes of JSON."""
MAX_EVENT: Final = 256 << 10
MAX_EVENTS: Final = 1_000
"""Maximum number of events of one step."""
MAX_METADATA: Final = 16 << 10
MAX_TIMER_S: Final = 315_576_000
"""Longest timer, in seconds: ten years."""
RESERVED: Final = frozenset({"batch", "deliveries", "errors", "repair", "resume", "sinks", "tasks", "versions"})
"""Names that no type may have, since they have their own addresses."""


def check_type(name: str, value: str) -> None:
    """Raise `BadRequest` unless `value` may be the name of a type: 1 to 192 characters on one line, without a `/`."""
    check_name(name, value, MAX_TYPE)
    if "/" in value or value in RESERVED:
        allowed = f"must not contain / or be a reserved name ({', '.join(sorted(RESERVED))})"
        raise BadRequest(name, f"{allowed}; it is {value!r:.60}")


def check_process_id(name: str, value: str) -> None:
    """Raise `BadRequest` unless `value` may be the ID of a process. The ID is the last part of an address.

    It has 1 to 256 characters on one line, does not begin with a `/`, and is not `.` or `..`.
    """
    check_name(name, value, MAX_PROCESS_ID)
    if value.startswith("/"):
        raise BadRequest(name, f"must not begin with a /, as {value!r:.60} does")
    if value in {".", ".."}:
        raise BadRequest(name, f"must not be {value!r}, which URLs cannot end with")


def check_metadata(name: str, value: Mapping[str, Any]) -> str:
    """Return metadata as JSON. Raises `BadRequest` unless they are flat and at most 16 KiB long."""
    for key, one in value.items():
        if isinstance(one, Mapping | list | tuple | set | frozenset):
            raise BadRequest(f"{name}.{key}", "must be a string, a number, a boolean or null")
    return exact_json(name, dict(value), MAX_METADATA)


class Unchanged(enum.Enum):
    """Marker for a state or metadata that a step does not change."""

    UNCHANGED = enum.auto()


UNCHANGED: Final = Unchanged.UNCHANGED


class Rest(enum.Enum):
    """Alternatives to a timer after a step."""

    KEEP = enum.auto()
    """Keep the timer, if there is one; a timer that has run does not run again."""
    SUSPEND = enum.auto()
    """No timer: the process waits until it is called."""


KEEP: Final = Rest.KEEP
SUSPEND: Final = Rest.SUSPEND


def _check_when(after_s: float | None, at: datetime | None) -> None:
    if (after_s is None) == (at is None):
        raise BadRequest("next", "must have either after_s or at")
    if after_s is not None and not 0 <= after_s <= MAX_TIMER_S:
        raise BadRequest("next.after_s", f"must be a number of seconds from 0 to {MAX_TIMER_S:,}, not {after_s!r:.60}")
    if at is not None:
        check_instant("next.at", at)


@attrs.frozen(kw_only=True)
class Timer:
    """Run the type's timeout in `after_s` seconds, or at a time, in place of the previous timer.

    With 0 seconds it runs immediately, unless a call waits, which runs first. `context` is passed to it.
    """

    after_s: float | None = None
    at: datetime | None = None
    context: Any = None

    def __attrs_post_init__(self) -> None:
        """Refuse an invalid time."""
        _check_when(self.after_s, self.at)


@attrs.frozen(kw_only=True)
class Remove:
    """Remove the process in `after_s` seconds, or at a time; `Remove()` removes it with this step."""

    after_s: float | None = None
    at: datetime | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse an invalid time."""
        if self.after_s is not None or self.at is not None:
            _check_when(self.after_s, self.at)


Following: TypeAlias = Timer | Remove | Rest


@attrs.frozen
class Done:
    """Success of a step.

    Args:
        response: the caller's answer, as JSON.
        state: the complete new state; by default the state does not change.
        metadata: the complete new metadata, by which processes can be found; by default they do not change.
        events: new events, each a JSON value; the engine numbers them.
        next: the next timer: `Timer`, `Remove`, `SUSPEND`, or `KEEP`.
    """

    response: Any = None
    state: Any = attrs.field(default=UNCHANGED, kw_only=True)
    metadata: Mapping[str, Any] | Unchanged = attrs.field(default=UNCHANGED, kw_only=True)
    events: Sequence[Any] = attrs.field(default=(), kw_only=True)
    next: Following = attrs.field(default=KEEP, kw_only=True)


@attrs.frozen
class Refuse:
    """Refusal: the step changes nothing, and its caller gets `reason` as an error.

    The timer stays. Not for timeouts.
    """

    reason: str


@attrs.frozen
class Fail:
    """Failure: a timeout is retried by the type's policy unless `final`, all other steps fail for good."""

    reason: str
    final: bool = False


StepResult: TypeAlias = Done | Refuse | Fail


class Transient(Exception):  # noqa: N818 - authors raise it for temporary errors
    """Raised by a timeout to be tried again."""


class ProcessNotFound(NotFound):
    """No process has this ID, or no task of a process has this number."""


class HistoryChanged(ProcessNotFound):
    """The task has another ident than the caller's: the database was restored, or an older standby was promoted.

    The request and its effects on the database are lost, and the number belongs to another task. Send the request
    again.
    """


class ProcessConflict(Conflict):
    """The process's status does not allow the request.

    The text says which does. Fetch the process, then decide again.
    """

    def __init__(self, process_type: str, process_id: str, status: str, message: str) -> None:
        """Create the error. `status` is the process's current status, `message` what is allowed."""
        DataloaderError.__init__(self, f"the process {process_type}/{process_id} is {status}; {message}")
        self.job_id = None
        self.process_type, self.process_id, self.status, self.message = process_type, process_id, status, message


class Refused(DataloaderError):  # noqa: N818 - a public name
    """The step has refused the request. The text is the step's, `task_id` the request's task."""

    def __init__(self, message: str, task_id: int | None = None) -> None:
        super().__init__(message)
        self.task_id = task_id


class ProcessFailed(DataloaderError):  # noqa: N818 - a public name
    """The request has no answer: its step has failed, or it was cancelled, or has expired. The text says why."""

    def __init__(self, message: str, task_id: int | None = None) -> None:
        super().__init__(message)
        self.task_id = task_id


class CallTimeout(DataloaderError):  # noqa: N818 - a public name
    """The answer has not come in time. The task continues: wait for it by its `task_id` and `ident`.

    `withdrawn`: it had not begun, and was withdrawn, so that it never runs.
    """

    def __init__(self, task_id: int, *, withdrawn: bool = False, ident: UUID | None = None) -> None:
        end = "was withdrawn before it began" if withdrawn else "continues"
        super().__init__(f"the task {task_id} has no answer yet; it {end}")
        self.task_id, self.withdrawn, self.ident = task_id, withdrawn, ident
