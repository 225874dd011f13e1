"""The ports of jobs in a body's process: what the handles need is sent to the service, which answers what is asked.

Several threads and tasks of the function may use the job at once: each waits for its own answer alone. Who waits no
more tells the service, which gives up too.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

import attrs
import msgspec

from dataloader.actors.children import wire
from dataloader.actors.children.channel import Channel, Hear
from dataloader.jobs.errors import BadRequest, JobStopped
from dataloader.jobs.listings import Level
from dataloader.jobs.model import AfterResult, Enqueued, JobOptions
from dataloader.jobs.new_job import new_job
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.task import A, Task
from dataloader.jobs.text import MAX_JSON, MAX_MASKED, cut_texts, storable_json, storable_text

MAX_LINE: Final = 65_536
"""Bytes of a line of `job.log` on its way; the service keeps less of it."""


@attrs.define(eq=False)
class BodyPort:
    """The port of a plain function's `ProcessJob`."""

    channel: Channel
    max_lines: int
    stopped: bool = False
    over: bool = False
    _open: set[int] = attrs.field(factory=set)
    _lines: dict[str | None, int] = attrs.field(factory=dict)

    def end(self) -> None:
        """The run is over: what a thread still says through its handle must not pass for the next job's."""
        with self.channel.turn():
            self.over = True
        for number in list(self._open):
            self.channel.give_up(number)

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Send the newest progress."""
        self._send(wire.Progress(msgspec.Raw(storable_json(progress).encode())))

    def log(self, level: Level, message: str, fields: Mapping[str, Any], load: str | None = None) -> None:
        """Send a line, unless no more are kept."""
        count = self._lines[load] = self._lines.get(load, 0) + 1
        if load is None and count > self.max_lines + 1:
            return
        text = storable_text(str(message), MAX_MASKED)
        encoded = storable_json(cut_texts(fields), MAX_LINE)
        self._send(wire.Line(level, text, msgspec.json.decode(encoded), load))

    def end_log(self, load: str) -> None:
        """A load has ended."""
        self._send(wire.EndLog(load))

    def checkpoint(self) -> None:
        """Raise `JobStopped` if the run was stopped, though that was raised before."""
        if self.stopped:
            raise JobStopped

    def deadline(self) -> float:
        """When the run is stopped, by `time.monotonic()`."""
        return time.monotonic() + float(msgspec.json.decode(self.ask("deadline")))

    def stopped_by(self) -> StopReason | None:
        """Why the run was stopped, None while it goes on."""
        reason = msgspec.json.decode(self.ask("stopped_by"))
        return None if reason is None else StopReason(reason)

    def keep(self, result: object) -> None:
        """Keep a result for whatever outcome comes."""
        self._send(wire.Keep(msgspec.Raw(b"null" if result is None else storable_json(result).encode())))

    def resource(self, kind: Callable[..., Any]) -> Any:
        """There is none."""
        name = getattr(kind, "__qualname__", None) or getattr(kind, "name", kind)
        raise LookupError(
            f"a task with process=True has no resources of the service's, and so no {name}: open it in its module"
        )

    def after(self) -> dict[UUID, AfterResult]:
        """Ask for the outcomes of the jobs that this one runs after."""
        return msgspec.json.decode(self.ask("after"), type=dict[UUID, AfterResult])

    def take(self, supplier: str, units: int, max_wait_s: float) -> None:
        """Wait for units of a supplier's budgets, and take them."""
        self.ask("take", wire.Take(supplier, units, max_wait_s))

    def enqueue(self, task: str | Task[A], args: A | Mapping[str, Any] | None, options: JobOptions) -> Enqueued:
        """Add a job."""
        answer = self.ask("enqueue", _new_job(task, args, options))
        return msgspec.json.decode(answer, type=Enqueued)

    def ask(self, what: wire.AskFor, given: object = None) -> msgspec.Raw:
        """Ask the service, and wait for the value that it answers. Raises the error that it answers."""
        answers: queue.SimpleQueue[wire.Answer | None] = queue.SimpleQueue()
        number = self.channel.number()
        try:
            self._ask(number, what, given, answers.put)
            return self._value(answers.get())
        finally:
            self._forget(number)

    def _ask(self, number: int, what: wire.AskFor, given: object, hear: Hear) -> None:
        encoded = msgspec.json.encode(given)
        if len(encoded) > wire.MAX_MESSAGE - MAX_JSON:
            raise BadRequest("args", f"must have at most {wire.MAX_MESSAGE - MAX_JSON:,} bytes, not {len(encoded):,}")
        with self.channel.turn():
            self._check()
            self._open.add(number)
            self.channel.ask(number, what, encoded, hear)

    def _forget(self, number: int) -> None:
        """Tell the service, if no answer has come."""
        self._open.discard(number)
        self.channel.forget(number)

    def _value(self, answer: wire.Answer | None) -> msgspec.Raw:
        if answer is None:
            self._check()
            raise JobStopped("the service is gone")
        if answer.error is not None:
            raise answer.error.error()
        return answer.value

    def _send(self, message: msgspec.Struct) -> None:
        with self.channel.turn():
            self._check()
            self.channel.send(message)

    def _check(self) -> None:
        if self.over:
            raise RuntimeError("the job's function has returned: its handle can't be used any more")


@attrs.define(eq=False)
class AioBodyPort(BodyPort):
    """The port of an asyncio function's `AioProcessJob`: its tasks wait for the answers."""

    async def checkpoint(self) -> None:  # type: ignore[override]
        """Let others run. Raises `CancelledError` each time once the run was stopped; asyncio itself raises it once."""
        await asyncio.sleep(0)
        if self.stopped:
            raise asyncio.CancelledError

    async def after(self) -> dict[UUID, AfterResult]:  # type: ignore[override]
        """Ask for the outcomes of the jobs that this one runs after."""
        return msgspec.json.decode(await self._aio_ask("after"), type=dict[UUID, AfterResult])

    async def take(self, supplier: str, units: int, max_wait_s: float) -> None:  # type: ignore[override]
        """Wait for units of a supplier's budgets, and take them."""
        await self._aio_ask("take", wire.Take(supplier, units, max_wait_s))

    async def enqueue(  # type: ignore[override]
        self, task: str | Task[A], args: A | Mapping[str, Any] | None, options: JobOptions
    ) -> Enqueued:
        """Add a job."""
        answer = await self._aio_ask("enqueue", _new_job(task, args, options))
        return msgspec.json.decode(answer, type=Enqueued)

    async def _aio_ask(self, what: wire.AskFor, given: object = None) -> msgspec.Raw:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[wire.Answer | None] = loop.create_future()

        def settle(answer: wire.Answer | None) -> None:
            if not answered.done():
                answered.set_result(answer)

        def hear(answer: wire.Answer | None) -> None:
            with suppress(RuntimeError):  # its loop has ended
                loop.call_soon_threadsafe(settle, answer)

        number = self.channel.number()
        try:
            self._ask(number, what, given, hear)
            return self._value(await answered)
        finally:
            self._forget(number)


def _new_job(task: str | Task[A], args: A | Mapping[str, Any] | None, options: JobOptions) -> wire.Enqueue:
    new = new_job(task, args, **options)
    given: Any = {**options}
    if given.get("after") is not None:
        given["after"] = list(new.after or ())
    return wire.Enqueue(new.task, new.args, given)
