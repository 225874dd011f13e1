"""Calls of handlers that wait for an answer, as values: one list for the handles of all flavors.

A method of a handle builds the call. `TrioPort`, in the worker, answers it. The ports of the other flavors pass on any
call and return its answer; a child process sends it to the worker as JSON.

To add a call, declare it here, give the handles in `job.py` a method, and add the answer to `TrioPort.ask`.
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar, get_args
from uuid import UUID

from msgspec import Struct

from dataloader.jobs.model import AfterResult, Enqueued, NewJob
from dataloader.jobs.outcomes import StopReason

R_co = TypeVar("R_co", covariant=True)


class HandlerCall(Struct, Generic[R_co]):
    """Call whose answer is an `R_co`. JSON can carry its fields and its answer."""


class ReadAfter(HandlerCall[dict[UUID, AfterResult]]):
    """Read the outcomes of the jobs that this one runs after, at each call."""


class TakeUnits(HandlerCall[None]):
    """Wait for units of a supplier's rate limits, and take them."""

    supplier: str
    units: int
    max_wait_s: float


class EnqueueJob(HandlerCall[Enqueued]):
    """Enqueue a job. Allowed while the process drains, so that a running handler can finish."""

    job: NewJob


class GetTimeLeft(HandlerCall[float]):
    """Return the seconds after which the run is stopped unless its lease is renewed; for other processes' clocks."""


class GetStopReason(HandlerCall[StopReason | None]):
    """Return the reason why the run was stopped, or None while it continues; for other processes."""


HANDLER_CALLS: Final[dict[str, type[HandlerCall[Any]]]] = {
    kind.__name__: kind for kind in (ReadAfter, TakeUnits, EnqueueJob, GetTimeLeft, GetStopReason)
}
"""Calls by name, as child processes send them."""


def answer_type(call: HandlerCall[Any]) -> Any:
    """Return the `R_co` of a call."""
    [base] = type(call).__dict__["__orig_bases__"]
    [answer] = get_args(base)
    return answer
