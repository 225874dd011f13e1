"""Service side of a child on a Dask worker. `Child` is the same for a child on this machine.

Its guard receives the body's deadlines by its own machine's clock. If the worker no longer answers, the body is dead as
soon as the last deadline that was sent has passed, whatever has happened to the worker.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import attrs
import msgspec
import trio

from dataloader.actors.children import wire
from dataloader.actors.children.child import FRAME_CHUNK, START_S, ChildDied
from dataloader.actors.children.frames import FrameKind, header_of, read_frame
from dataloader.actors.cluster.connection import ANSWER_S, PLACE_S, ContactLost, DaskCluster, Submitted
from dataloader.actors.cluster.relay import ENDED
from dataloader.actors.cluster.talk import GIVE, TAKE, WAIT_S, Announced, Answered, FarClock, Order, Said, boot_s
from dataloader.actors.lease import KillTimes
from dataloader.jobs.errors import BodyFailed
from dataloader.jobs.growing_pauses import Pauses
from dataloader.jobs.logger import get_logger
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.text import MAX_MASKED, storable_text
from dataloader.store.queue.lease_clock import lease_time

log = get_logger(__name__)

SLACK_S: Final = 0.25
"""Seconds after the last deadline that was sent when a body is surely dead: the kernel may need a moment."""
MAX_LINES: Final = 1_000
"""Number of the body's messages that wait here before no more are taken from the worker."""
LOOK_S: Final = 1.0
CLOSE_S: Final = 2.0
PASSING: Final = frozenset({"", "KilledWorker", "CancelledError", "FutureCancelledError", "ContactLost"})
"""Dask errors that do not come from the job: workers have died, or the connection or an announcement is lost."""
MAX_GIVEN: Final = 4 * 2**20
"""Size of a message to a worker in bytes after which no more is added: the next message renews the lease."""
BYTES_A_SECOND: Final = 2**20
"""Slowest connection that is waited for, in bytes per second."""


@attrs.define(eq=False)
class FarOutput:
    """One of the body's two output streams, as the worker sends it."""

    name: str
    lines: deque[str] = attrs.field(factory=deque)
    changed: trio.Event = attrs.field(factory=trio.Event)

    async def pump(self, put: Callable[[str, str], bool]) -> None:
        """Pass each line to `put` until cancelled."""
        while True:
            self.drain(put)
            await self.changed.wait()

    def drain(self, put: Callable[[str, str], bool]) -> None:
        """Pass the lines that have arrived by now to `put`."""
        while self.lines:
            put(self.name, self.lines.popleft())

    def add(self, line: str) -> None:
        """Add a line that has arrived."""
        self.lines.append(line)
        self.changed.set()
        self.changed = trio.Event()


@attrs.define(eq=False, kw_only=True)
class RemoteChild:
    """Child on a worker of `cluster`. A finite `idle_since` lets the worker keep it."""

    cluster: DaskCluster
    order: Order
    outputs: tuple[FarOutput, FarOutput] = attrs.field(factory=lambda: (FarOutput("stdout"), FarOutput("stderr")))
    idle_since: float = attrs.field(default=math.inf, init=False)
    _announced: Announced | None = attrs.field(default=None, init=False)
    _relay: Announced | None = attrs.field(default=None, init=False)
    _talks: trio.Nursery = attrs.field(init=False)
    life: trio.CancelScope = attrs.field(factory=lambda: trio.CancelScope(shield=True), init=False)
    _clock: FarClock = attrs.field(factory=FarClock, init=False)
    _for_body: deque[Said] = attrs.field(factory=deque, init=False)
    _until: KillTimes | None = attrs.field(default=None, init=False)
    _lost: str = attrs.field(default="it sends no heartbeats", init=False)
    _dead_at: float = attrs.field(default=math.inf, init=False)
    _said: deque[bytes | ChildDied] = attrs.field(factory=deque, init=False)
    _buffer: bytearray = attrs.field(factory=bytearray, init=False)
    _has_returned: bool = attrs.field(default=False, init=False)
    _ended: str | None = attrs.field(default=None, init=False)
    _at_deadline: bool = attrs.field(default=False, init=False)
    _is_over: bool = attrs.field(default=False, init=False)
    _error: tuple[str, str] | None = attrs.field(default=None, init=False)
    _changed: trio.Event = attrs.field(factory=trio.Event, init=False)

    @property
    def worker(self) -> str:
        """Address of the child's worker; empty while it has none."""
        return "" if self._announced is None else self._announced.worker

    async def live(self, submitted: Submitted, *, task_status: trio.TaskStatus[None]) -> None:
        """Exchange messages with the worker until the caller cancels `life`; nothing else cancels it."""
        with self.life:
            async with trio.open_nursery() as self._talks:
                self._talks.start_soon(self._hear_of_end, submitted)
                task_status.started()

    async def start(self, until: KillTimes) -> None:
        """Wait for a worker that has imported the function, and have its guard armed.

        Raises `BodyFailed` if it cannot be imported there, and `BeginsTooLate` if the job must be released.
        """
        for what, most_s in (("placed", PLACE_S), ("ready", START_S + ANSWER_S)):
            with trio.move_on_after(most_s):
                while not self._has_come(what):
                    self.cluster.check_there()
                    with trio.move_on_after(LOOK_S):
                        await self._changed.wait()
            is_told = self._announced is not None and self._announced.state == "failed"
            if not self._has_come(what) or (self._error is not None and self._error[0] in PASSING and not is_told):
                raise self.cluster.no_place("has not started it")
        announced = self._announced
        if announced is None or announced.state == "placed":
            # Dask has an error and there was no announcement: our code is missing there, or has another version.
            text = "" if self._error is None else ": ".join(self._error)
            raise BodyFailed(_masked_output(f"a worker of the Dask cluster could not start it: {text}"))
        if announced.state == "failed":
            raise BodyFailed(_masked_output(f"on the Dask worker {announced.worker} {announced.text}"))
        self._relay = announced
        self.renew(until)
        for part in (self._give, self._take, self._look_at_clock):
            self._talks.start_soon(part, announced)

    def hear(self, announced: Announced) -> None:
        """Process a worker's announcement of a relay for this run; only one relay may begin."""
        if self._relay is None:
            if announced.state == "ready":
                self._clock = FarClock()
                self._clock.stamped(announced.at)
            self._announced = announced
            self._change()
        elif announced.relay != self._relay.relay and announced.state == "placed":
            log.warning(
                "Dask has lost a worker and repeats its task; the repetition is refused", worker=announced.worker
            )
            self._talks.start_soon(self._refuse, announced)

    def renew(self, until: KillTimes) -> None:
        """Let the body live until these times, the guard's and the kernel's, by the lease clock."""
        # In this order: if this process is suspended in between, the body has less time, not more.
        ahead = boot_s() - lease_time()
        self._until = until.moved(ahead)
        self._change()

    def tell_to_stop(self) -> None:
        """Send SIGTERM to the body's process group."""
        self._tell("term")

    async def send(self, message: msgspec.Struct) -> None:
        """Send a message to the body."""
        self._tell("line", wire.encoded_line(message))
        await trio.lowlevel.checkpoint()

    async def read(self) -> bytes | None:
        """Return the body's next line; None when it has closed its socket. Raises `ChildDied` if a line is too long."""
        said = await self._next()
        self._has_returned = self._has_returned or said.startswith(ENDED)
        return said or None

    async def send_frame(self, kind: FrameKind, head: bytes = b"", body: bytes = b"") -> None:
        """Send a frame to a body that answers calls."""
        self._tell("line", header_of(kind, len(head), len(body)) + head)
        for start in range(0, len(body), FRAME_CHUNK):
            self._tell("line", body[start : start + FRAME_CHUNK])
        await trio.lowlevel.checkpoint()

    async def read_frame(self) -> tuple[FrameKind, bytes, bytes] | None:
        """Return the next frame; None when the body has closed its socket. Raises `ChildDied` for an invalid frame."""
        try:
            return await read_frame(self._exactly)
        except EOFError:
            return None
        except ValueError as error:
            raise ChildDied(str(error)) from None

    async def _exactly(self, number: int) -> bytes:
        while len(self._buffer) < number:
            if not (data := await self._next()):
                raise EOFError
            self._buffer += data
        part = bytes(self._buffer[:number])
        del self._buffer[:number]
        return part

    async def _next(self) -> bytes:
        while not self._said:
            await self._changed.wait()
        said = self._said.popleft()
        self._change()
        if isinstance(said, ChildDied):
            raise said
        return said

    async def why_ended(self) -> str:
        """Wait until the body has ended and all its messages are read; return the reason in words."""
        while self._ended is None or self._said:
            await self._changed.wait()
        return self._ended

    @property
    def was_killed_at_deadline(self) -> bool:
        """Return whether the end of the lease or key has killed it."""
        return self._at_deadline

    async def end(self) -> None:
        """Have the body killed, and all that it has started; wait until they are gone or surely dead."""
        if self._relay is None:
            if self._announced is not None and self._announced.state != "failed":
                with trio.move_on_after(CLOSE_S, shield=True):
                    await self._refuse(self._announced)
        elif not (self._has_returned and self.idle_since < math.inf):
            self._tell("end" if self.idle_since == math.inf else "keep")
            with trio.CancelScope(shield=True):  # at the latest until it is dead
                while not self._is_over and (left_s := self._may_live_s()) > 0:
                    with trio.move_on_after(min(left_s, LOOK_S)):
                        await self._changed.wait()

    async def _hear_of_end(self, submitted: Submitted) -> None:
        self._error = await submitted.error()
        self._change()

    async def _give(self, relay: Announced) -> None:
        """Send messages to the relay in order, each until it is confirmed."""
        number = 0
        name = "arm"
        while True:
            while self._until is None and not self._for_body:
                await self._changed.wait()
            messages: list[Said] = []
            if self._until is not None:
                messages.append((name, *map(self._clock.there, self._until)))
                # From now on it may arrive. A later one is sent only after this one is confirmed.
                self._dead_at = self._until.kernel if name == "arm" else max(self._until.kernel, self._dead_at)
                self._until, name = None, "until"
            size = 0
            while self._for_body and size < MAX_GIVEN:
                messages.append(said := self._for_body.popleft())
                size += len(said[1]) if said[0] == "line" else 0
            within_s = ANSWER_S + size / BYTES_A_SECOND
            await self._asked(relay, GIVE, within_s, number=number, messages=messages)
            number += len(messages)

    async def _take(self, relay: Announced) -> None:
        """Take messages from the relay until the body has ended."""
        number = 0
        while not self._is_over:
            while len(self._said) >= MAX_LINES:
                await self._changed.wait()
            answer = await self._asked(relay, TAKE, WAIT_S + ANSWER_S, after=number, wait_s=WAIT_S)
            for said in answer.said[number - answer.first :]:
                self._heed(said)
                number += 1
            self._change()

    async def _asked(self, relay: Announced, op: str, within_s: float, **given: object) -> Answered:
        """Repeat a request until the relay answers it; return the answer."""
        pauses = Pauses(0.1, 2.0)
        while True:
            try:
                answer = await self.cluster.ask(relay.worker, op, within_s, relay=relay.relay, **given)
            except ContactLost as lost:
                self._lost = str(lost)
                await trio.sleep(pauses.next())
                continue
            if not answer.gone:
                self._clock.stamped(answer.at)
                return answer
            if answer.process == relay.process:
                # The relay is removed only when no process of the body is left.
                self._end(f"the Dask worker {relay.worker} has abandoned the handler")
            self._lost = f"another process answers at {relay.worker}"
            await trio.sleep(pauses.next())

    def _heed(self, said: Sequence[Any]) -> None:
        match said:
            case ["line", bytes() as line]:
                self._said.append(line)
            case ["died", str() as text]:
                self._said.append(ChildDied(text))
            case ["out", str() as stream, str() as text]:
                self.outputs[stream == "stderr"].add(text)
            case ["ended", str() as text, bool() as at_deadline]:
                self._ended, self._at_deadline = f"on the Dask worker {self.worker} {text}", at_deadline
            case ["over"]:
                self._is_over = True
            case _:
                raise TypeError(f"the Dask worker {self.worker} sent an invalid message: {said!r:.100}")

    async def _look_at_clock(self, relay: Announced) -> None:
        """Consider the body dead when the last deadline that was sent has passed without a message."""
        while (left_s := self._may_live_s()) > 0:  # noqa: ASYNC110 - it is another clock than Trio's
            await trio.sleep(min(left_s, LOOK_S))
        self._end(f"the Dask worker {relay.worker} was lost, and its handler has ended: {self._lost}")

    def _may_live_s(self) -> float:
        """Return the seconds for which the body may still live, by the last deadline that was sent.

        They are 0 for a body that was not armed when the exchange of messages ended.
        """
        if self._dead_at == math.inf and self._talks.cancel_scope.cancel_called:
            return 0.0
        return self._dead_at + SLACK_S - boot_s()

    def _end(self, text: str) -> None:
        self._ended, self._is_over = self._ended or text, True
        self._change()

    async def _refuse(self, announced: Announced) -> None:
        """Refuse a relay's body, because another one runs or the run has ended."""
        with suppress(ContactLost):
            end = ("end",)
            await self.cluster.ask(announced.worker, GIVE, ANSWER_S, relay=announced.relay, number=0, messages=[end])

    def _has_come(self, what: str) -> bool:
        if self._error is not None:
            return True
        return self._announced is not None and (what == "placed" or self._announced.state != "placed")

    def _tell(self, *said: Any) -> None:
        self._for_body.append(said)
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def _masked_output(text: str) -> str:
    return storable_text(mask_text(storable_text(text, MAX_MASKED)))
