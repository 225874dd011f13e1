"""Runs one step: calls the author's function and makes an outcome of its result or error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, Final

import attrs
import msgspec
import trio

from dataloader.flows.processes.define import ProcessType, decoded
from dataloader.flows.processes.process import Process
from dataloader.jobs.error_groups import first_error, is_outage, single_errors
from dataloader.jobs.errors import BadRequest, LeaseLost, StoreUnavailable
from dataloader.jobs.logger import get_logger
from dataloader.jobs.outages import Outages
from dataloader.jobs.process_listings import ProcessEvent
from dataloader.jobs.process_outbox import MAX_MESSAGES, MAX_SENT
from dataloader.jobs.process_requests import ProcessRequest
from dataloader.jobs.processes import (
    MAX_EVENT,
    MAX_EVENTS,
    MAX_VALUE,
    UNCHANGED,
    Done,
    Fail,
    Refuse,
    Remove,
    Rest,
    Timer,
    check_metadata,
)
from dataloader.jobs.text import exact_json, said_by, storable_text
from dataloader.store.processes.steps import Committed, StepOutcome, StepSnapshot, Wakeup, Work
from dataloader.store.queue.transaction import JobTransaction

log = get_logger(__name__)


@attrs.define(eq=False)
class StepTransaction(JobTransaction):
    """Transaction on the queue's database. The value of `done` at the end of its block is stored with its rows."""

    done: Done | None = None


MAX_ERROR: Final = 8_000
UNSUPPORTED: Final = "unsupported_result"


@attrs.define(eq=False, kw_only=True)
class StepCall:
    """Call of a step. `events` reads the process's own events."""

    kind: ProcessType[Any]
    wakeup: Wakeup
    snapshot: StepSnapshot
    work: Work
    events: Callable[..., Awaitable[list[ProcessEvent]]]
    open: Callable[[StepCall], AbstractAsyncContextManager[StepTransaction]]
    """Open a transaction that stores the step's outcome when its block ends."""
    outages: Outages
    """Consecutive outages during this step."""
    upgraded: str | None = attrs.field(default=None, init=False)
    """Upgraded state as JSON text, if an older version of the type wrote the stored state."""
    stored: tuple[StepOutcome, StepSnapshot, Committed] | None = attrs.field(default=None, init=False)
    """Outcome that `p.transaction()` has already stored."""
    sent: list[ProcessRequest] = attrs.field(factory=list, init=False)
    """Messages to other processes."""
    asking: int = attrs.field(default=0, init=False)
    """Number of transactions and reads that the step has begun and not ended."""
    outage: str | None = attrs.field(default=None, init=False)
    """Text of the outage that ended the step."""

    async def run(self) -> tuple[StepOutcome, StepSnapshot]:
        """Call the function and return the outcome and the process after it. Only cancellations are raised.

        After an outage of the database the outcome is `returned`, and the step runs again. An outage that repeats while
        the queue's database responds is the step's own error.
        """
        try:
            result = await self._called()
        except Exception as error:  # noqa: BLE001 - whatever the author's function raises
            return await self._raised(error)
        if self.stored is not None:
            return self.stored[:2]
        if isinstance(result, Fail):
            return self._failed(None, result), self.snapshot
        try:
            return self._went_well(result)
        except BadRequest as error:
            return self._failed(None, Fail(f"{UNSUPPORTED}: {error}", final=True)), self.snapshot

    async def _called(self) -> object:
        snapshot, work = self.snapshot, self.work
        if work.kind == "remove":
            return Done()
        try:
            step = self.kind.step(work.kind, work.method)
            arguments = step.arguments(work.args)
        except BadRequest as error:  # the caller's fault, so the process is not in error
            return Fail(str(error), final=True) if work.kind == "timeout" else Refuse(str(error))
        state = snapshot.aux_state if work.kind == "repair" else self._state()
        process: Process[Any] = Process(
            type=snapshot.type,
            process_id=snapshot.process_id,
            state=state,
            status=snapshot.status,
            metadata=snapshot.metadata,
            last_event_id=snapshot.last_event_id,
            task_id=work.task_id,
            kind=work.kind,
            context=work.context,
            attempt=work.attempt + 1,
            step_key=self.key,
            corrupted_by=snapshot.corrupted_by,
            events=self._read_events,
            transaction=self._transaction,
            send=self._send,
        )
        with trio.move_on_after(self.kind.step_timeout_s) as scope:
            result = await step.function(process, *arguments)
        if not scope.cancelled_caught:
            return result
        if self.asking and not await self.outages.serves():
            raise StoreUnavailable(f"the database did not answer within the step's {self.kind.step_timeout_s:g} s")
        # As after a worker's death, its progress is unknown, so it is not retried automatically.
        return Fail(f"the step took longer than its {self.kind.step_timeout_s:g} s", final=True)

    @property
    def key(self) -> str:
        """Return the idempotency key of the step for external systems, the same in every try."""
        work = self.work
        if work.ident is not None:
            return work.ident.hex
        # A program of an earlier release has begun it with this key.
        return f"{self.snapshot.type}:{self.snapshot.process_id}:{work.first_task or work.task_id}"

    async def _raised(self, error: Exception) -> tuple[StepOutcome, StepSnapshot]:
        if self.stored is not None:
            log.warning("a step raised an error after its committed transaction", exc_info=error)
            return self.stored[:2]
        # If the lease ended in a transaction, its result is unknown, as after an outage.
        is_none = is_outage(error) or isinstance(first_error(error), LeaseLost) or await self._is_silence(error)
        if is_none and await self.outages.may_repeat(error):
            self.outage = said_by(first_error(error))
            return StepOutcome(wakeup=self.wakeup, task_id=self.work.task_id, outcome="returned"), self.snapshot
        return self._failed(error, Fail(said_by(first_error(error)))), self.snapshot

    async def _is_silence(self, error: Exception) -> bool:
        """Return whether a deadline of the step itself passed while it waited for a database that does not answer."""
        too_slow = all(isinstance(one, trio.TooSlowError) for one in single_errors(error))
        return bool(too_slow and self.asking and not await self.outages.serves())

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[StepTransaction]:
        if self.stored is not None:
            raise RuntimeError(
                "the step has already stored its outcome; write all rows in one block of p.transaction()"
            )
        with self._asks():
            async with self.open(self) as transaction:
                yield transaction

    async def _read_events(self, **which: Any) -> list[ProcessEvent]:
        with self._asks():
            return await self.events(**which)

    @contextmanager
    def _asks(self) -> Iterator[None]:
        """Count the step's open uses of the database. A canceled use stays counted."""
        self.asking += 1
        try:
            yield
        except BaseException as error:
            if not any(isinstance(one, trio.Cancelled) for one in single_errors(error)):
                self.asking -= 1
            raise
        self.asking -= 1

    def _send(self, message: ProcessRequest) -> None:
        if self.stored is not None:
            raise RuntimeError("the step has already stored its outcome; send messages before p.transaction() ends")
        self.sent.append(message)

    def done(self, result: object) -> tuple[StepOutcome, StepSnapshot]:
        """Return the outcome that a transaction stores, and the process after it. Raises `BadRequest` if not `Done`."""
        if not isinstance(result, Done):
            raise BadRequest("done", f"must be set to Done when p.transaction() ends, not {result!r:.40}")
        return self._went_well(result)

    def _state(self) -> Any:
        """Return the state as an instance of the type's `state=`, upgraded to the type's version.

        The result of an upgrade is read back from JSON, so that this step gets the same state as the next one.
        """
        state = self.snapshot.aux_state
        if state is None:
            return None
        if self.snapshot.version < self.kind.version:
            assert self.kind.upgrades is not None  # noqa: S101 - otherwise no worker of this version has the job
            self.upgraded = json_text("state", self.kind.upgrades(state, self.snapshot.version), MAX_VALUE)
            state = msgspec.json.decode(self.upgraded)
        return decoded("state", state, self.kind.state)

    def _went_well(self, result: object) -> tuple[StepOutcome, StepSnapshot]:
        snapshot, work = self.snapshot, self.work
        if isinstance(result, Refuse):
            if work.kind == "timeout":
                raise BadRequest("result", "must not be Refuse: a timeout has no caller")
            reason = storable_text(result.reason, MAX_ERROR)
            return StepOutcome(wakeup=self.wakeup, task_id=work.task_id, outcome="refused", error=reason), snapshot
        if not isinstance(result, Done):
            raise BadRequest("result", f"must be Done, Refuse or Fail, not {type(result).__name__}")
        state, version = None, None
        if result.state is not UNCHANGED:
            state, version = json_text("state", result.state, MAX_VALUE), self.kind.version
        elif self.upgraded is not None:
            state, version = self.upgraded, self.kind.version
        metadata = None if result.metadata is UNCHANGED else check_metadata("metadata", result.metadata)
        if len(result.events) > MAX_EVENTS:
            raise BadRequest("events", f"must be at most {MAX_EVENTS:,}, not {len(result.events):,}")
        events = [json_text(f"events[{number}]", event, MAX_EVENT) for number, event in enumerate(result.events)]
        after = StepSnapshot(
            type=snapshot.type,
            process_id=snapshot.process_id,
            version=version or snapshot.version,
            status=snapshot.status,
            aux_state=snapshot.aux_state if state is None else msgspec.json.decode(state),
            metadata=snapshot.metadata if metadata is None else msgspec.json.decode(metadata),
            last_event_id=snapshot.last_event_id,
            corrupted_by=snapshot.corrupted_by,
        )
        outcome = StepOutcome(
            wakeup=self.wakeup,
            task_id=work.task_id,
            outcome="done",
            response=None if result.response is None else json_text("response", result.response, MAX_VALUE),
            state=state,
            version=None if version == snapshot.version else version,
            metadata=metadata,
            events=f"[{','.join(events)}]" if events else None,
            messages=_messages(self.sent),
            **_following(result.next),
        )
        return outcome, after

    def _failed(self, error: Exception | None, fail: Fail) -> StepOutcome:
        work = self.work
        reason = storable_text(fail.reason, MAX_ERROR)
        blank = StepOutcome(wakeup=self.wakeup, task_id=work.task_id, outcome="failed", error=reason)
        tries = work.attempt + 1
        may = not fail.final
        if error is not None:
            may = all(isinstance(one, self.kind.retry_on) for one in single_errors(error))
        if error is not None:
            log.warning("a step failed", process=self.snapshot.process_id, step=work.kind, exc_info=error)
        if work.kind != "timeout" or not may or tries >= self.kind.max_tries:
            return blank
        if error is not None and self.kind.retry.is_final(error):
            return blank
        return attrs.evolve(blank, outcome="retry", after_s=self.kind.retry.delay_s(tries))


def _following(after: Timer | Remove | Rest) -> dict[str, Any]:
    match after:
        case Timer():
            context = None if after.context is None else json_text("next.context", after.context, MAX_VALUE)
            return {"following": "timeout", "after_s": after.after_s, "at": after.at, "context": context}
        case Remove(after_s=None, at=None):
            return {"following": "gone"}
        case Remove():
            return {"following": "remove", "after_s": after.after_s, "at": after.at}
        case Rest.SUSPEND:
            return {"following": "suspend"}
        case Rest.KEEP:
            return {"following": "keep"}
    raise BadRequest("next", f"must be Timer, Remove, KEEP or SUSPEND, not {type(after).__name__}")


def _messages(sent: list[ProcessRequest]) -> str | None:
    """Return the messages as a JSON list. Raises `BadRequest` if they are too many or too long."""
    if len(sent) > MAX_MESSAGES:
        raise BadRequest("messages", f"must be at most {MAX_MESSAGES:,}, not {len(sent):,}")
    texts = [json_text(f"messages[{number}]", message.message(), MAX_SENT) for number, message in enumerate(sent)]
    if (size := sum(map(len, texts))) > MAX_SENT:
        raise BadRequest("messages", f"must have at most {MAX_SENT:,} bytes of JSON in total, not {size:,}")
    return f"[{','.join(texts)}]" if texts else None


def json_text(name: str, value: Any, most: int) -> str:
    """Return a value as JSON text of at most `most` bytes. Raises `BadRequest`."""
    if attrs.has(type(value)):
        value = msgspec.to_builtins(value)
    return exact_json(name, value, most)
