"""Runs a step of a process without a database, for the tests of its author."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Generic, NoReturn, TypeVar
from uuid import UUID

import attrs
import msgspec

from dataloader.flows.processes.define import ProcessType, decoded
from dataloader.flows.processes.step_call import StepCall, json_text
from dataloader.jobs.growing_pauses import Pauses
from dataloader.jobs.outages import Outages, always_serves
from dataloader.jobs.process_listings import ProcessEvent
from dataloader.jobs.process_requests import ProcessRequest
from dataloader.jobs.processes import MAX_VALUE, Following, Remove, Rest, Timer
from dataloader.jobs.text import json_or_none
from dataloader.store.processes.steps import Kind, Outcome, StepOutcome, StepSnapshot, Wakeup, Work

S = TypeVar("S")


@attrs.frozen(kw_only=True)
class StepRun(Generic[S]):
    """Result of a step: everything that would be stored, in one transaction."""

    outcome: Outcome
    """`retry`: a timeout failed and is tried again in `next.after_s` seconds. `returned`: the step raised
    `StoreUnavailable` and runs again as soon as the database is available."""
    response: Any
    """Response to the caller."""
    error: str | None
    """Reason why the step was refused or failed."""
    state: S
    """State after the step."""
    metadata: Mapping[str, Any]
    """Metadata after the step."""
    events: Sequence[Any]
    """Events of the step."""
    next: Following
    """Next action after the step: a timer, a removal, KEEP or SUSPEND."""
    sent: Sequence[ProcessRequest]
    """Messages to other processes."""


async def run_step(
    kind: ProcessType[S],
    step: str,
    *,
    args: Any = None,
    state: S | None = None,
    version: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    events: Sequence[Any] = (),
    context: Any = None,
    attempt: int = 1,
    process_id: str = "test",
) -> StepRun[S]:
    """Run one step as a worker does, with its checks and its timeout, and return the result that would be stored.

    Args:
        kind: the type, as returned by `Processes.define`.
        step: `init`, `timeout`, `repair`, or else the name of a call's method.
        args: argument from the caller, as JSON.
        state: state before the step; JSON if `version` is older, which is then upgraded.
        version: version of the type that wrote the state; by default the type's own version.
        metadata: metadata of the process.
        events: events that `p.events()` reads, from the first one on.
        context: value of `p.context`.
        attempt: number of this try, from 1.
        process_id: ID of the process.

    Raises:
        BadRequest: the state is not JSON.
    """
    work = Work(
        task_id=len(events) + 1,
        kind=_kind(step),
        method=None if _kind(step) != "call" else step,
        args=args,
        context=context,
        attempt=attempt - 1,
        first_task=None,
    )
    snapshot = StepSnapshot(
        type=kind.name,
        process_id=process_id,
        version=version or kind.version,
        status={"init": "init", "repair": "error"}.get(work.kind, "running"),
        aux_state=None if state is None else msgspec.json.decode(json_text("state", state, MAX_VALUE)),
        metadata=dict(metadata or {}),
        last_event_id=len(events),
        corrupted_by=None,
    )
    past = [
        ProcessEvent(event_id=number, task_id=1, at=datetime.now(UTC), payload=payload)
        for number, payload in enumerate(events, 1)
    ]

    async def read(*, after: int, before: int | None, limit: int, newest_first: bool) -> list[ProcessEvent]:
        found = [event for event in past if event.event_id > after and (before is None or event.event_id < before)]
        return (found[::-1] if newest_first else found)[:limit]

    wakeup = Wakeup(0, UUID(int=0), 0)
    outages = Outages(always_serves, Pauses(0, 0))
    call = StepCall(
        kind=kind, wakeup=wakeup, snapshot=snapshot, work=work, events=read, open=_no_database, outages=outages
    )
    outcome, after = await call.run()
    return StepRun(
        outcome=outcome.outcome,
        response=json_or_none(outcome.response),
        error=outcome.error,
        state=_typed(kind, after),
        metadata=after.metadata,
        events=json_or_none(outcome.events) or [],
        next=_next(outcome),
        sent=list(call.sent) if outcome.outcome == "done" else [],
    )


def _no_database(_call: StepCall) -> NoReturn:
    raise RuntimeError("run_step has no database: p.transaction() needs a supervisor")


def _kind(step: str) -> Kind:
    match step:
        case "init" | "timeout" | "repair":
            return step
        case _:
            return "call"


def _typed(kind: ProcessType[S], after: StepSnapshot) -> Any:
    if after.aux_state is None or after.version != kind.version:
        return after.aux_state
    return decoded("state", after.aux_state, kind.state)


def _next(outcome: StepOutcome) -> Following:
    match outcome.following:
        case _ if outcome.outcome == "retry":
            return Timer(after_s=outcome.after_s)
        case "timeout":
            return Timer(after_s=outcome.after_s, at=outcome.at, context=json_or_none(outcome.context))
        case "remove" | "gone":
            return Remove(after_s=outcome.after_s, at=outcome.at)
        case "suspend":
            return Rest.SUSPEND
    return Rest.KEEP
