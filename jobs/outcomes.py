"""The outcomes of a run.

A handler returns one of `Retry`, `Snooze`, `GiveUp`, or any other value, which is the job's result, or, of a job that
has stages, what its next stage begins with (`Next` and `Finish` say otherwise).
The runner turns what happened into one `Outcome`, which the recorder writes and the store fences by its token. Values
and not exceptions, because none of them is a failure of the handler's code (as in Oban).
"""

from __future__ import annotations

import enum
from uuid import UUID

import attrs
from msgspec import Struct

from dataloader.jobs.states import Step


def _not_negative(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    del instance
    if not 0 <= value <= MAX_DELAY_S:
        message = f"{attribute.name}: must be a number of seconds from 0 to {MAX_DELAY_S:,}, not {value!r}"
        raise ValueError(message)


MAX_DELAY_S = 366 * 86_400
"""The longest delay a handler may ask for: a year. Longer ones are mistakes of unit."""


@attrs.frozen
class Retry:
    """Run again `after_s` seconds from now. Uses up an attempt; with none left the job is `failed` with `reason`."""

    after_s: float = attrs.field(validator=_not_negative)
    reason: str = attrs.field(default="the handler asked for a retry", converter=str)


@attrs.frozen
class Snooze:
    """Run again `for_s` seconds from now, without using up an attempt (Q9)."""

    for_s: float = attrs.field(validator=_not_negative)
    reason: str = attrs.field(default="", converter=str)


@attrs.frozen
class GiveUp:
    """Fail for good, whatever attempts are left, with `reason` as the job's error."""

    reason: str = attrs.field(converter=str)


@attrs.frozen
class Canceled:
    """Stop here as canceled, by the handler's own decision; `reason` is kept as the job's error."""

    reason: str = attrs.field(default="", converter=str)


@attrs.frozen
class Next:
    """Of a job with stages: go on with the stage `to`, whose `job.previous` is `value`, not with the one that follows.

    `to` is the stage's name in `tasks.stages`, without that of the whole; `value` must be JSON of at most a megabyte.
    """

    to: str
    value: object = None


@attrs.frozen
class Finish:
    """Of a job with stages: succeed here, with `value` as the job's result, whatever stages follow."""

    value: object = None


class StopReason(enum.StrEnum):
    """Who stopped a run from outside: noted before its scope is cancelled, so that nobody has to guess afterwards.

    LEASE_LOST: the database said that the job is somebody else's. LEASE_ENDED: no heartbeat got through in time, so it
    may be ours still. KEY_LOST: its lock_key went to another, or could have. PERIOD_END: a work period of its task, or
    of the task's supplier, has closed.
    """

    CANCEL = "cancel_requested"
    TIMEOUT = "timeout"
    LEASE_LOST = "lease_lost"
    LEASE_ENDED = "lease_ended"
    KEY_LOST = "key_lost"
    DRAIN = "drain"
    PERIOD_END = "period_end"


class Outcome(Struct, frozen=True, eq=False):
    """What is to be written about one run: the recorder's message, applied only where `token` is still the job's.

    `step` is one of SUCCEED, FAIL, RETRY, SNOOZE, RETURN, CLOSE, CANCEL, MOVE; `delay_s` counts from when it is written
    and matters for RETRY and SNOOZE; `result` and `progress` are JSON text, the latter what was shown last and not yet
    written. For MOVE `to` is the task of the next stage and `previous`, JSON text, what that one begins with.
    """

    job_id: UUID
    token: int
    step: Step
    error: str | None = None
    result: str | None = None
    delay_s: float = 0.0
    progress: str | None = None
    to: str | None = None
    previous: str | None = None
