"""A child process from the service's side: its guard, its body, and the messages of both.

Callers bound all waits here, except the wait for the end of a child. That one lasts until no process of the child is
left, like the wait for the end of a thread. The guard is asked first. A guard that does not answer is killed, and the
kernel then kills the body.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import msgspec
import trio

from dataloader.actors.children import wire
from dataloader.actors.children.frames import FrameKind, header_of, read_frame
from dataloader.actors.children.left_behind import MARK, kill_left_behind
from dataloader.actors.lease import KillTimes
from dataloader.jobs.errors import BodyFailed
from dataloader.jobs.logger import get_logger
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.text import MAX_MASKED, storable_text
from dataloader.store.queue.lease_clock import lease_time

log = get_logger(__name__)

GUARD: Final = str(Path(__file__).with_name("guard.py"))
START_S: Final = 60.0
"""Seconds in which a child must import the task's module."""
GUARD_S: Final = 1.0
"""Seconds in which a guard must kill its body; after them the guard itself is killed."""
LOOK_S: Final = 5.0
PAUSE_S: Final = 0.01
CHUNK: Final = 65_536
FRAME_CHUNK: Final = 2**20
UNWANTED_S: Final = 0.01
"""Pause in seconds after each chunk that is not kept, which slows down a body that prints without end."""
MAX_OUTPUT_LINE: Final = 8_192
"""Bytes of output without a newline that become one line of the log."""


class ChildDied(Exception):  # noqa: N818 - a state of the child
    """End of a child, or an invalid message from it; the text becomes part of the job's error."""


@attrs.define(eq=False)
class Output:
    """One of the body's two output pipes, cut into lines."""

    fd: int
    name: str
    _rest: bytes = b""

    async def pump(self, put: Callable[[str, str], bool]) -> None:
        """Pass each line to `put` until cancelled or the pipe is closed; after `put` returns False, discard them."""
        is_wanted = True
        while True:
            try:
                chunk = os.read(self.fd, CHUNK)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.fd)
                continue
            if not chunk:
                return
            is_wanted = is_wanted and self.take(chunk, put)
            await trio.sleep(0 if is_wanted else UNWANTED_S)

    def drain(self, put: Callable[[str, str], bool]) -> None:
        """Pass the output that is in the pipe by now to `put`, including a last line without a newline."""
        with suppress(BlockingIOError):
            for _ in range(16):  # a pipe usually holds 64 KiB; do not wait for a process that keeps writing
                if not (chunk := os.read(self.fd, CHUNK)):
                    break
                if not self.take(chunk, put):
                    return
        rest, self._rest = self._rest, b""
        if rest:
            put(self.name, rest.decode(errors="replace"))

    def take(self, chunk: bytes, put: Callable[[str, str], bool]) -> bool:
        """Pass each line that ends in a chunk to `put`; return False if it wants no more."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_OUTPUT_LINE:
            lines, self._rest = [*lines, self._rest], b""
        # `all` stops at the first False: the rest of the chunk is dropped.
        return all(put(self.name, line.removesuffix(b"\r").decode(errors="replace")) for line in lines)


@attrs.define(eq=False, kw_only=True)
class Child:
    """Running child. `jobs` counts the jobs it has begun; `idle_since` is by Trio's clock, infinite during a job."""

    _process: trio.Process
    _mark: str
    _control: trio.socket.SocketType
    _data: trio.SocketStream
    outputs: tuple[Output, Output]
    _buffer: bytearray = attrs.field(factory=bytearray, init=False)
    _body: int = attrs.field(default=0, init=False)
    _body_fd: int = attrs.field(default=-1, init=False)
    _ended: str | None = attrs.field(default=None, init=False)
    _killed_at: float = attrs.field(default=math.inf, init=False)
    jobs: int = attrs.field(default=0, init=False)
    idle_since: float = attrs.field(default=math.inf, init=False)

    @property
    def pid(self) -> int:
        """Process ID of the body."""
        return self._body

    @classmethod
    async def start(cls, declared: wire.BodySetup) -> Child:
        """Start a child that imports its function. Raises `BodyFailed`, with the child's output, if it cannot."""
        mark = secrets.token_hex(16)
        with ExitStack() as lent, ExitStack() as own:
            pairs = []
            for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
                pairs.append(pair := socket.socketpair(socket.AF_UNIX, kind))
                own.callback(pair[0].close)
                lent.callback(pair[1].close)
            (control, guards), (data, bodys) = pairs
            pipes = []
            for _ in ("stdout", "stderr"):
                pipes.append(pipe := os.pipe())
                own.callback(os.close, pipe[0])
                lent.callback(os.close, pipe[1])
            # An OSError becomes the job's error. In the standalone binary sys.executable is the program itself: its
            # entry.py, in deploy/binary, accepts this command line, and no other, as Python does.
            process = await trio.lowlevel.open_process(
                [sys.executable, "-P", GUARD, str(guards.fileno()), str(bodys.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                pass_fds=(guards.fileno(), bodys.fileno()),
                start_new_session=True,
                env=os.environ | {MARK: mark},
            )
            own.pop_all()  # the `Child` closes them from here on
        for pipe in pipes:
            os.set_blocking(pipe[0], False)
        child = cls(
            process=process,
            mark=mark,
            control=trio.socket.from_stdlib_socket(control),
            data=trio.SocketStream(trio.socket.from_stdlib_socket(data)),
            outputs=(Output(pipes[0][0], "stdout"), Output(pipes[1][0], "stderr")),
        )
        try:
            await child._import(declared)
        except BaseException:
            await child.end()  # noqa: ASYNC102 - it has its own shields and deadlines
            raise
        return child

    async def _import(self, declared: wire.BodySetup) -> None:
        printed: list[str] = []

        def put(_stream: str, line: str) -> bool:
            printed.append(line)
            del printed[:-50]
            return True

        error: str | None = f"its module was not imported within {START_S:g} s"
        with trio.move_on_after(START_S):
            try:
                await self._begin()
                await self._data.send_all(wire.encoded_line(declared))
                async with trio.open_nursery() as nursery:
                    for output in self.outputs:
                        nursery.start_soon(output.pump, put)
                    line = await self.read()
                    nursery.cancel_scope.cancel()
                message = None if line is None else wire.read_from_body(line)
                error = message.error if isinstance(message, wire.Started) else await self.why_ended()
            except (OSError, trio.BrokenResourceError, ChildDied, ValueError) as died:
                error = str(died)
        if error is not None:
            for output in self.outputs:
                output.drain(put)
            text = "\n".join([f"the child process could not start: {error}", *printed]).rstrip()
            raise BodyFailed(storable_text(mask_text(storable_text(text, MAX_MASKED))))

    async def _begin(self) -> None:
        match (await self._reply()).split():
            case ["body", pid]:
                self._body = int(pid)
                with suppress(OSError):
                    self._body_fd = os.pidfd_open(self._body)
            case _:
                raise ChildDied("its guard ended")

    async def arm(self, until: KillTimes) -> bool:
        """Let a job run until the guard's and the kernel's deadline in `until`, by the lease clock.

        Return False if the child has ended.
        """
        if not self._command("arm", until):
            return False
        while self._ended is None:
            if (await self._reply()) == "armed":
                self.jobs += 1
                return True
        return False

    def renew(self, until: KillTimes) -> None:
        """Move the deadlines of the running job. The arguments are those of `arm`.

        A suspended guard does not receive them; the body then ends at the former deadline.
        """
        self._command("until", until)

    def disarm(self) -> None:
        """Notify the guard that no job runs, which removes the deadlines."""
        self._command("idle")

    def tell_to_stop(self) -> None:
        """Send SIGTERM to the body's process group."""
        self._command("term")

    async def send(self, message: msgspec.Struct) -> None:
        """Send a message to the body. Does not raise if the body has ended: see `why_ended`."""
        await self.send_line(wire.encoded_line(message))

    async def send_line(self, line: bytes) -> None:
        """Send a message that is already encoded as a line."""
        with suppress(trio.BrokenResourceError):
            await self._data.send_all(line)

    async def read(self) -> bytes | None:
        """Return the body's next line; None when it has closed its socket. Raises `ChildDied` if a line is too long."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > wire.MAX_MESSAGE:
                raise ChildDied(f"the child process sent a message of more than {wire.MAX_MESSAGE:,} bytes")
            try:
                part = await self._data.receive_some(CHUNK)
            except trio.BrokenResourceError:
                return None
            if not part:
                return None
            self._buffer += part
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    async def send_frame(self, kind: FrameKind, head: bytes = b"", body: bytes = b"") -> None:
        """Send a frame to a body that answers calls. Does not raise if the body has ended: see `why_ended`."""
        with suppress(trio.BrokenResourceError):
            await self._data.send_all(header_of(kind, len(head), len(body)) + head)
            if body:
                await self._data.send_all(body)

    async def read_frame(self) -> tuple[FrameKind, bytes, bytes] | None:
        """Return the next frame; None when the body has closed its socket. Raises `ChildDied` for an invalid frame."""
        try:
            return await read_frame(self._exactly)
        except (EOFError, trio.BrokenResourceError):
            return None
        except ValueError as error:
            raise ChildDied(str(error)) from None

    async def read_bytes(self) -> bytes:
        """Return the next bytes from the body; none when it has closed its socket."""
        try:
            return await self._data.receive_some(FRAME_CHUNK)
        except trio.BrokenResourceError:
            return b""

    async def _exactly(self, number: int) -> bytes:
        parts = []
        while number:
            if not (part := await self._data.receive_some(min(number, FRAME_CHUNK))):
                raise EOFError
            parts.append(part)
            number -= len(part)
        return b"".join(parts)

    async def why_ended(self) -> str:
        """Wait until the guard reports the body's end, or has ended itself; return the reason in words."""
        while self._ended is None:
            await self._reply()
        return _words_of_end(self._ended)

    @property
    def was_killed_at_deadline(self) -> bool:
        """Return whether the end of the lease or key has killed it, by its guard or by the kernel's timer."""
        return self._ended is not None and self._ended.endswith("deadline")

    async def _reply(self) -> str:
        """Return the guard's next message, and remember an end."""
        try:
            reply = (await self._control.recv(1_000)).decode()
        except OSError:
            reply = ""
        if not reply:
            is_late = time.clock_gettime(time.CLOCK_BOOTTIME) >= self._killed_at
            self._ended = self._ended or ("deadline" if is_late else "guard")
        elif reply.startswith("ended "):
            self._ended = reply
        return reply

    def _command(self, name: str, until: KillTimes | None = None) -> bool:
        """Send a command to the guard without waiting; return False if the guard has ended.

        The times in `until` are by the lease clock, and are sent by CLOCK_BOOTTIME.
        """
        if name == "idle":
            self._killed_at = math.inf
        if until is not None:
            # In this order: if this process is suspended in between, the body has less time, not more.
            boot = time.clock_gettime(time.CLOCK_BOOTTIME)
            until = until.moved(boot - lease_time())
            self._killed_at = until.kernel
            name = f"{name} {until.guard:.6f} {until.kernel:.6f}"
        try:
            os.write(self._control.fileno(), name.encode())
        except OSError:
            return False
        return True

    async def end(self) -> None:
        """Kill the body and all that it has started; wait until no process is left."""
        self._command("kill")
        waits: list[Callable[[], Awaitable[object]]] = [self.why_ended, self._process.wait]
        for wait in waits:
            with trio.move_on_after(GUARD_S, shield=True) as waited:
                await wait()
            if waited.cancelled_caught:
                break
        if self._ended is None or not self._ended.startswith("ended "):
            await self._end_without_guard()
        with trio.CancelScope(shield=True):  # the guard is dead or about to die
            await self._process.wait()
        self._control.close()
        with trio.move_on_after(0, shield=True):
            await self._data.aclose()
        for output in self.outputs:
            os.close(output.fd)
        if self._body_fd >= 0:
            os.close(self._body_fd)

    async def _end_without_guard(self) -> None:
        """End a child whose guard was killed or does not answer: kill the guard and the body, then all leftovers."""
        with suppress(ProcessLookupError):
            self._process.kill()
        if self._body_fd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._body_fd, signal.SIGKILL)
        told = False
        while True:
            with trio.move_on_after(LOOK_S, shield=True) as looking:
                if self._body_fd >= 0:
                    await trio.lowlevel.wait_readable(self._body_fd)
                # Poll: nothing reports the end of processes that are not our children.
                while await trio.to_thread.run_sync(partial(kill_left_behind, self._mark, self._body)):  # noqa: ASYNC110
                    await trio.sleep(PAUSE_S)
            if not looking.cancelled_caught:
                return
            if not told:
                told = True
                log.error("a child process does not end after SIGKILL", pid=self._body)


def _words_of_end(ended: str) -> str:
    """Return the reason of an end in words. `ended` is the guard's message `ended STATUS CAUSE`.

    Without such a message it is `deadline` if the deadline had passed, else `guard`.
    """
    if ended.endswith("deadline"):
        return "the child process was killed: its lease or key was not renewed in time"
    if ended == "guard":
        return "the child process was killed: its guard was killed, perhaps by the kernel"
    _, text, _cause = ended.split()
    status = int(text)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        more = ", perhaps because the machine ran out of memory" if number == signal.SIGKILL else ""
        return f"the child process was ended by {name}{more}"
    return f"the child process ended with exit code {os.WEXITSTATUS(status)}"
