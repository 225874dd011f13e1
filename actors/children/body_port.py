"""Ports of jobs in a body's process: send the requests of a handle to the service and wait for its answers.

Threads and tasks of the function may use the job concurrently; each waits only for its own answer. A caller that stops
waiting notifies the service, which then cancels the request.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

import attrs
import msgspec

from dataloader.actors.children import wire
from dataloader.actors.children.channel import Channel, Hear
from dataloader.jobs.errors import BadRequest, JobStopped
from dataloader.jobs.handler_calls import GetStopReason, GetTimeLeft, HandlerCall, answer_type
from dataloader.jobs.listings import Level
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.text import MAX_JSON, MAX_MASKED, cut_texts, storable_json, storable_text

T = TypeVar("T")

MAX_FIELDS: Final = 65_536
"""Maximum size of the fields of one line of `job.log` in transit, in bytes; the service keeps less of them."""


@attrs.define(eq=False)
class BodyPort:
    """Port of a plain function's `ProcessJob`."""

    channel: Channel
    max_lines: int
    stopped: bool = False
    over: bool = False
    _open: set[int] = attrs.field(factory=set)
    _lines: dict[str | None, int] = attrs.field(factory=dict)

    def end(self) -> None:
        """End the run: later calls fail, so that a leftover thread cannot write to the next job."""
        with self.channel.turn():
            self.over = True
        for number in list(self._open):
            self.channel.give_up(number)

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Send the newest progress."""
        self._send(wire.Progress(msgspec.Raw(storable_json(progress).encode())))

    def log(self, level: Level, message: str, fields: Mapping[str, Any], load: str | None = None) -> None:
        """Send a log line; of the job's own at most `max_lines` + 1, the last of which reports that lines are lost."""
        count = self._lines[load] = self._lines.get(load, 0) + 1
        if load is None and count > self.max_lines + 1:
            return
        text = storable_text(str(message), MAX_MASKED)
        encoded = storable_json(cut_texts(fields), MAX_FIELDS)
        self._send(wire.BodyLine(level, text, msgspec.json.decode(encoded), load))

    def end_log(self, load: str) -> None:
        """Notify the service that a load has ended."""
        self._send(wire.EndLog(load))

    def checkpoint(self) -> None:
        """Raise `JobStopped` if the run was stopped, even if it was raised before."""
        if self.stopped:
            raise JobStopped

    def deadline(self) -> float:
        """Return the time at which the run is stopped, by `time.monotonic()`."""
        return time.monotonic() + self._wait_for(GetTimeLeft())

    def stopped_by(self) -> StopReason | None:
        """Return the reason why the run was stopped; None while it continues."""
        return self._wait_for(GetStopReason())

    def keep(self, result: object) -> None:
        """Keep a result, whatever the outcome of the run is."""
        self._send(wire.Keep(msgspec.Raw(b"null" if result is None else storable_json(result).encode())))

    def resource(self, kind: Callable[..., Any]) -> Any:
        """Raise `LookupError`: a child process has no resources of the service."""
        name = getattr(kind, "__qualname__", None) or getattr(kind, "name", kind)
        raise LookupError(
            f"a task with process=True has no resources of the service, such as {name}; open it in the task's module"
        )

    def ask(self, call: HandlerCall[T]) -> T:
        """Return the answer to a call, or raise its error."""
        return self._wait_for(call)

    def _wait_for(self, call: HandlerCall[T]) -> T:
        """Send a call to the service and block until its answer has arrived."""
        answers: queue.SimpleQueue[wire.ServiceAnswer | None] = queue.SimpleQueue()
        number = self.channel.number()
        try:
            self._send_call(number, call, answers.put)
            return self._answer_to(call, answers.get())
        finally:
            self._forget(number)

    def _send_call(self, number: int, call: HandlerCall[Any], hear: Hear) -> None:
        encoded = msgspec.json.encode(call)
        if len(encoded) > wire.MAX_MESSAGE - MAX_JSON:
            raise BadRequest("args", f"must have at most {wire.MAX_MESSAGE - MAX_JSON:,} bytes, not {len(encoded):,}")
        with self.channel.turn():
            self._check()
            self._open.add(number)
            self.channel.ask(number, type(call).__name__, encoded, hear)

    def _forget(self, number: int) -> None:
        """Drop a request; if it has no answer yet, notify the service."""
        self._open.discard(number)
        self.channel.forget(number)

    def _answer_to(self, call: HandlerCall[T], answer: wire.ServiceAnswer | None) -> T:
        if answer is None:
            self._check()
            raise JobStopped("the service has ended")
        if answer.error is not None:
            raise answer.error.error()
        return cast("T", msgspec.json.decode(answer.value, type=answer_type(call)))

    def _send(self, message: msgspec.Struct) -> None:
        with self.channel.turn():
            self._check()
            self.channel.send(message)

    def _check(self) -> None:
        if self.over:
            raise RuntimeError("the job's function has returned; its handle can no longer be used")


@attrs.define(eq=False)
class AioBodyPort(BodyPort):
    """Port of an asyncio function's `AioProcessJob`; its tasks await the answers."""

    async def checkpoint(self) -> None:  # type: ignore[override]
        """Let other tasks run. After a stop, every call raises `CancelledError`; asyncio itself raises it only once."""
        await asyncio.sleep(0)
        if self.stopped:
            raise asyncio.CancelledError

    async def ask(self, call: HandlerCall[T]) -> T:  # type: ignore[override]
        """Return the answer to a call, or raise its error."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[wire.ServiceAnswer | None] = loop.create_future()

        def settle(answer: wire.ServiceAnswer | None) -> None:
            if not answered.done():
                answered.set_result(answer)

        def hear(answer: wire.ServiceAnswer | None) -> None:
            with suppress(RuntimeError):  # its loop has ended
                loop.call_soon_threadsafe(settle, answer)

        number = self.channel.number()
        try:
            self._send_call(number, call, hear)
            return self._answer_to(call, await answered)
        finally:
            self._forget(number)
