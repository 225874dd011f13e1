"""The ports of jobs in a body's process: what the handles need is sent to the service, which answers what is asked.

One socket, read only while an answer is awaited. Several threads of the function may use the job: each waits its turn.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

import attrs
import msgspec

from dataloader.actors.children import wire
from dataloader.jobs.errors import BadRequest, JobStopped
from dataloader.jobs.job import A
from dataloader.jobs.listings import Level
from dataloader.jobs.model import AfterResult, Enqueued, JobOptions
from dataloader.jobs.new_job import new_job
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.tasks import Task
from dataloader.jobs.text import MAX_JSON, MAX_MASKED, cut_texts, storable_json, storable_text

MAX_LINE: Final = 65_536
"""Bytes of a line of `job.log` on its way; the service keeps less of it."""


@attrs.define(eq=False)
class Channel:
    """The socket to the service, by its file descriptor. A stop of the job interrupts no message in its middle."""

    fd: int
    _buffer: bytearray = attrs.field(factory=bytearray, init=False)
    turn: Any = attrs.field(factory=threading.RLock, init=False)
    _held: int = attrs.field(default=0, init=False)
    _stop: bool = attrs.field(default=False, init=False)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message."""
        with self.turn, self._whole():
            left = memoryview(wire.line_of(message))
            while left:
                left = left[os.write(self.fd, left) :]

    def read(self) -> bytes:
        """The next line; empty when the service has closed the socket."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if not (part := os.read(self.fd, 65_536)):
                return b""
            self._buffer += part
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def ask(self, what: wire.AskFor, number: int, given: msgspec.Raw) -> msgspec.Raw:
        """Ask the service, and return the value that it answers. Raises the error that it answers."""
        with self.turn:
            self.send(wire.Ask(number, what, given))
            while True:
                line = self.read()
                if not line:
                    raise JobStopped("the service is gone")
                answer = wire.read_answer(line)
                if answer.number == number:  # others are of questions whose asker was interrupted
                    break
        if answer.error is not None:
            raise answer.error.error()
        return answer.value

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A stop that comes in here, in the main thread, is raised at its end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self._stop and not self._held:
            self._stop = False
            raise JobStopped

    def interrupt(self) -> None:
        """Raise `JobStopped`, for a signal handler: at once, or when the message that is being sent is whole."""
        if not self._held:
            raise JobStopped
        self._stop = True


@attrs.define(eq=False)
class BodyPort:
    """The port of a plain function's `ProcessJob`."""

    channel: Channel
    max_lines: int
    stopped: bool = False
    over: bool = False
    _asked: int = 0
    _lines: dict[str | None, int] = attrs.field(factory=dict)

    def end(self) -> None:
        """The run is over: what a thread still says through its handle must not pass for the next job's."""
        with self.channel.turn:
            self.over = True

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
        new = new_job(task, args, **options)
        given: Any = {**options}
        if given.get("after") is not None:
            given["after"] = list(new.after or ())
        answer = self.ask("enqueue", wire.Enqueue(new.task, new.args, given))
        return msgspec.json.decode(answer, type=Enqueued)

    def ask(self, what: wire.AskFor, given: object = None) -> msgspec.Raw:
        """Ask the service."""
        encoded = msgspec.json.encode(given)
        if len(encoded) > wire.MAX_MESSAGE - MAX_JSON:
            raise BadRequest("args", f"must have at most {wire.MAX_MESSAGE - MAX_JSON:,} bytes, not {len(encoded):,}")
        with self.channel.turn:
            self._check()
            self._asked += 1
            return self.channel.ask(what, self._asked, msgspec.Raw(encoded))

    def _send(self, message: msgspec.Struct) -> None:
        with self.channel.turn:
            self._check()
            self.channel.send(message)

    def _check(self) -> None:
        if self.over:
            raise RuntimeError("the job's function has returned: its handle can't be used any more")


@attrs.define(eq=False)
class AioBodyPort(BodyPort):
    """The port of an asyncio function's `AioProcessJob`: a thread waits for the answers."""

    async def checkpoint(self) -> None:  # type: ignore[override]
        """Let others run. Raises `CancelledError` each time once the run was stopped; asyncio itself raises it once."""
        await asyncio.sleep(0)
        if self.stopped:
            raise asyncio.CancelledError

    async def after(self) -> dict[UUID, AfterResult]:  # type: ignore[override]
        """Ask for the outcomes of the jobs that this one runs after."""
        return await asyncio.to_thread(super().after)

    async def take(self, supplier: str, units: int, max_wait_s: float) -> None:  # type: ignore[override]
        """Wait for units of a supplier's budgets, and take them."""
        await asyncio.to_thread(super().take, supplier, units, max_wait_s)

    async def enqueue(  # type: ignore[override]
        self, task: str | Task[A], args: A | Mapping[str, Any] | None, options: JobOptions
    ) -> Enqueued:
        """Add a job."""
        return await asyncio.to_thread(super().enqueue, task, args, options)
