"""Socket between a body and the service; matches answers to requests by number.

A dedicated thread reads, so that a caller that waits for an answer does not keep others from sending or receiving. The
thread runs no user code and takes no signals. It reads only while a caller waits: with a read in progress at all times,
the service would not notice that the function has closed the socket.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import attrs
import msgspec

from dataloader.actors.children import wire
from dataloader.jobs.errors import JobStopped

STACK: Final = 2**21
"""Stack size of the reader thread in bytes: enough for the deepest JSON that can be read. It counts as body memory."""

Hear = Callable[[wire.ServiceAnswer | None], object]
"""Callback that receives an answer in the reader thread, or None when no answer will come."""


@attrs.define(eq=False)
class Channel:
    """Socket to the service, by its file descriptor. A stop of the job never interrupts a message midway."""

    fd: int
    _reader: threading.Thread = attrs.field(init=False)
    _jobs: queue.SimpleQueue[wire.RunJob | None] = attrs.field(factory=queue.SimpleQueue, init=False)
    _wants_job: bool = attrs.field(default=False, init=False)
    _wanted: threading.Event = attrs.field(factory=threading.Event, init=False)
    _pid: int = attrs.field(factory=os.getpid, init=False)
    _writing: Any = attrs.field(factory=threading.RLock, init=False)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count, init=False)
    _waiting: dict[int, Hear] = attrs.field(factory=dict, init=False)
    _closed: bool = attrs.field(default=False, init=False)
    _held: int = attrs.field(default=0, init=False)
    _stop: bool = attrs.field(default=False, init=False)

    def start(self) -> None:
        """Start the reader thread."""
        self._reader = threading.Thread(target=self._read_for_ever, name="dataloader", daemon=True)
        former = threading.stack_size(STACK)
        try:
            self._reader.start()
        finally:
            threading.stack_size(former)

    def next_job(self) -> wire.RunJob | None:
        """Wait for the next job and return it; None when the service has closed the socket or reading has failed."""
        self._wants_job = True
        self._wanted.set()
        return self._jobs.get()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the right to send. In the main thread a stop that arrives meanwhile is raised at the block's end."""
        if threading.current_thread() is not threading.main_thread():
            with self._writing:
                yield
            return
        self._held += 1
        try:
            with self._writing:
                yield
        finally:
            self._held -= 1
            if self._stop and not self._held:
                self._stop = False
                raise JobStopped

    def send(self, message: msgspec.Struct) -> None:
        """Send a message."""
        with self.turn():
            left = memoryview(wire.encoded_line(message))
            while left:
                left = left[os.write(self.fd, left) :]

    def number(self) -> int:
        """Return the number for a new request."""
        return next(self._numbers)

    def ask(self, number: int, call: str, fields: bytes, hear: Hear) -> None:
        """Send a request; `hear` receives the answer, unless the request is dropped with `forget` before.

        Raises `RuntimeError` in a process that the function has forked, and while `MAX_OPEN` requests are open.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                "a process forked by the job's function cannot call the service; only the function's own process can"
            )
        if len(self._waiting) >= wire.MAX_OPEN:
            raise RuntimeError(f"a job can wait for at most {wire.MAX_OPEN:,} answers of the service concurrently")
        with self.turn():
            self._waiting[number] = hear
            self._wanted.set()
            self.send(wire.BodyRequest(number, call, msgspec.Raw(fields)))
        if self._closed:
            self.give_up(number)

    def forget(self, number: int) -> None:
        """Drop a request. If it has no answer yet, notify the service, which then cancels it."""
        if self._waiting.pop(number, None) is not None:
            self.send(wire.Forget(number))

    def give_up(self, number: int) -> None:
        """Report to the waiting caller that no answer will come."""
        if (hear := self._waiting.pop(number, None)) is not None:
            hear(None)

    def interrupt(self) -> None:
        """Raise `JobStopped` from a signal handler: immediately, or after the message that is being sent."""
        if not self._held:
            raise JobStopped
        self._stop = True

    def _read_for_ever(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        lines = self._lines()
        try:
            while not self._closed:
                self._wanted.wait()
                self._wanted.clear()
                while (self._waiting or self._wants_job) and not self._closed:
                    self._take(next(lines, None))
        except Exception:  # noqa: BLE001 - for example, out of memory; the job's log shows the traceback
            traceback.print_exc()
        finally:
            self._closed = True
            for number in list(self._waiting):
                self.give_up(number)
            self._jobs.put(None)

    def _take(self, line: bytes | None) -> None:
        match None if line is None else wire.read_from_service(line):
            case None:
                self._closed = True
            case wire.RunJob() as job:
                self._wants_job = False
                self._jobs.put(job)
            case wire.ServiceAnswer() as answer:  # a dropped request has no entry
                if (hear := self._waiting.pop(answer.number, None)) is not None:
                    hear(answer)

    def _lines(self) -> Iterator[bytes]:
        buffer, searched = bytearray(), 0
        while True:
            while (end := buffer.find(b"\n", searched)) >= 0:
                line = bytes(buffer[:end])
                del buffer[: end + 1]
                searched = 0
                yield line
            searched = len(buffer)
            try:
                part = os.read(self.fd, 65_536)
            except OSError:  # the function has closed it, or the service has ended and left data unread
                return
            if not part:
                return
            buffer += part
