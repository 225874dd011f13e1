"""Outcomes of a run.

A handler returns one of `Retry`, `Snooze`, `GiveUp`, or any other value. That value is the job's result or, for a job
with stages, the input of its next stage (unless `Next` or `Finish` say otherwise).

The runner makes one `Outcome` of the result, which the recorder writes and the store fences by its token. They are
values and not exceptions, because none of them is a failure of the handler's code (as in Oban).
"""

from __future__ import annotations

import enum
from typing import Final
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
"""Longest delay that a handler may ask for: a year. Longer ones are mistakes of unit."""


@attrs.frozen
class Retry:
    """Run again `after_s` seconds from now. Uses an attempt; with none left, the job is `failed` with `reason`."""

    after_s: float = attrs.field(validator=_not_negative)
    reason: str = attrs.field(default="the handler asked for a retry", converter=str)


@attrs.frozen
class Snooze:
    """Run again `for_s` seconds from now, without using an attempt (Q9)."""

    for_s: float = attrs.field(validator=_not_negative)
    reason: str = attrs.field(default="", converter=str)


@attrs.frozen
class GiveUp:
    """Fail for good, even if attempts are left, with `reason` as the job's error."""

    reason: str = attrs.field(converter=str)


@attrs.frozen
class Canceled:
    """End as canceled, by the handler's own decision; `reason` is kept as the job's error."""

    reason: str = attrs.field(default="", converter=str)


@attrs.frozen
class Next:
    """Continue a job with stages at the stage `to` instead of the following one; its `job.previous` is `value`.

    `to` is the stage's name in `tasks.stages`, without the job's name. `value` must be JSON of at most 1 MiB.
    """

    to: str
    value: object = None


@attrs.frozen
class Finish:
    """End a job with stages successfully here, with `value` as its result. The remaining stages are skipped."""

    value: object = None


class StopReason(enum.StrEnum):
    """Reason why a run was stopped from outside; noted before its scope is cancelled.

    LEASE_LOST: the database says that the job belongs to another worker. LEASE_ENDED: no heartbeat succeeded in time,
    so it may still be ours. KEY_LOST: another session has, or may have, its lock_key. PERIOD_END: a work period of its
    task, or of the task's supplier, has closed.
    """

    CANCEL = "cancel_requested"
    TIMEOUT = "timeout"
    LEASE_LOST = "lease_lost"
    LEASE_ENDED = "lease_ended"
    KEY_LOST = "key_lost"
    DRAIN = "drain"
    PERIOD_END = "period_end"


NOT_HELD: Final = frozenset({StopReason.LEASE_LOST, StopReason.LEASE_ENDED, StopReason.KEY_LOST})
"""Reasons after which another worker may have the job or its key. After the others, the job is still this process's."""


class Outcome(Struct, frozen=True, eq=False):
    """Result of one run for the recorder, applied only while `token` is still the job's.

    `step` is one of SUCCEED, FAIL, RETRY, SNOOZE, RETURN, CLOSE, CANCEL, MOVE. `delay_s`, for RETRY and SNOOZE, counts
    from the write. `result` and `progress` are JSON text; `progress` is the last one shown, if it is not written yet.
    For MOVE `to` is the task of the next stage and `previous`, JSON text, its input.
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
