"""One body on a Dask worker: starts a child as the service does, and forwards messages in both directions.

The relay decides nothing about the body's life. The guard does, by the times that the service sends and by the death of
the worker's process. The body begins when the service sends `arm`, which it does once for each attempt.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import trio

from dataloader.actors.children import wire
from dataloader.actors.children.child import CHUNK, Child, ChildDied, Output
from dataloader.actors.cluster.talk import MAX_SAID, Order, Said, boot_s
from dataloader.actors.lease import KillTimes
from dataloader.jobs.errors import BodyFailed
from dataloader.store.queue.lease_clock import lease_time

ARM_S: Final = 30.0
"""Seconds for which a child that is ready waits for `arm`."""
LINGER_S: Final = 30.0
"""Seconds for which the last messages of a body wait to be taken."""
ENDED: Final = b'{"type":"ended"'
UNWANTED_S: Final = 0.01
"""Pause in seconds after each chunk of output that is not kept."""


@attrs.define(eq=False)
class WarmChildren:
    """Children on this worker that wait for a job, by their declaration."""

    _idle: dict[bytes, list[Child]] = attrs.field(factory=dict)

    async def take(self, declared: wire.BodySetup) -> Child:
        """Return a child that has imported the declared function. Raises `BodyFailed` if it cannot."""
        idle = self._idle.get(wire.encoded_line(declared))
        return idle.pop() if idle else await Child.start(declared)

    async def keep(self, declared: wire.BodySetup, child: Child, idle_s: float) -> None:
        """Keep a child for up to `idle_s` seconds for the next job, then end it."""
        idle = self._idle.setdefault(wire.encoded_line(declared), [])
        since = child.idle_since = trio.current_time()
        idle.append(child)
        await trio.sleep(idle_s)
        if child in idle and child.idle_since == since:
            idle.remove(child)
            await child.end()


@attrs.define(eq=False, kw_only=True)
class Relay:
    """Relay of one run. Everything happens in the worker's Trio thread."""

    order: Order
    declared: wire.BodySetup
    warm: WarmChildren
    nursery: trio.Nursery
    announce: Callable[..., None]
    _said: deque[Said] = attrs.field(factory=deque, init=False)
    _first: int = attrs.field(default=0, init=False)
    _size: int = attrs.field(default=0, init=False)
    _heard: int = attrs.field(default=0, init=False)
    _for_body: deque[bytes] = attrs.field(factory=deque, init=False)
    _changed: trio.Event = attrs.field(factory=trio.Event, init=False)
    _until: KillTimes | None = attrs.field(default=None, init=False)
    _child: Child | None = attrs.field(default=None, init=False)
    _told_to_stop: bool = attrs.field(default=False, init=False)
    _told_to_end: bool = attrs.field(default=False, init=False)
    _last: Said | None = attrs.field(default=None, init=False)
    _is_clean: bool = attrs.field(default=False, init=False)
    _is_torn: bool = attrs.field(default=False, init=False)
    _printed: int = attrs.field(default=0, init=False)

    async def live(self, release: Callable[[], None]) -> None:
        """Run the job, then `release` Dask's thread. Return when all messages are taken, or after `LINGER_S`."""
        try:
            await self._run()
        finally:
            release()
        with trio.move_on_after(LINGER_S):
            while self._said:
                await self._changed.wait()

    def hear(self, number: int, messages: Sequence[Said]) -> None:
        """Apply messages of the service. `number` is the number of the first one; repeated messages are skipped."""
        for kind, *given in messages[max(self._heard - number, 0) :]:
            match kind:
                case "line":
                    [line] = given
                    self._for_body.append(line)
                case "arm" | "until":
                    self._until = KillTimes(*given)
                    if self._child is not None:
                        self._child.renew(_by_leases(self._until))
                case "term":
                    self._told_to_stop = True
                    if self._child is not None:
                        self._child.tell_to_stop()
                case "end" | "keep":
                    self._told_to_end, self._is_clean = True, kind == "keep"
                case _:
                    pass
        self._heard = max(self._heard, number + len(messages))
        self._change()

    async def take(self, after: int, wait_s: float) -> tuple[int, list[Said]]:
        """Return the messages after the first `after` ones, preceded by the number of the first.

        Wait up to `wait_s` seconds if there is none.
        """
        while self._said and self._first < after:
            self._size -= _size_of(self._said.popleft())
            self._first += 1
        self._change()
        with trio.move_on_after(wait_s):
            while not self._said:
                await self._changed.wait()
        return self._first, list(self._said)

    async def _run(self) -> None:
        announced = False
        while True:
            try:
                child = await self.warm.take(self.declared)
            except BodyFailed as error:
                self.announce("failed", error.text)
                return
            except OSError as error:
                self.announce("failed", f"the child process could not start: {type(error).__name__}: {error}")
                return
            if not announced:
                announced = True
                self.announce("ready")
            with trio.move_on_after(ARM_S):
                while self._until is None and not self._told_to_end:
                    await self._changed.wait()
            if self._until is None or self._told_to_end:
                self._park(child)
                return
            if await child.arm(_by_leases(self._until)):
                break
            await child.end()
        self._child = child
        # These may have arrived while the guard was armed.
        child.renew(_by_leases(self._until))
        if self._told_to_stop:
            child.tell_to_stop()
        try:
            await self._pass_on(child)
        finally:
            self._child = None
            if self._is_clean and not (self._told_to_stop or self._is_torn) and child.jobs < self.order.max_jobs:
                child.disarm()
                self._park(child)
            else:
                await child.end()  # noqa: ASYNC102 - it has its own shields and deadlines
            self._say("over")

    def _park(self, child: Child) -> None:
        self.nursery.start_soon(self.warm.keep, self.declared, child, self.order.idle_s)

    async def _pass_on(self, child: Child) -> None:
        """Forward messages both ways until the function or the child has ended, or the service requests the end."""
        async with trio.open_nursery() as nursery:
            for output in child.outputs:
                nursery.start_soon(self._pump, output)
            for part in (self._write, self._read, self._watch):
                nursery.start_soon(part, child)
            while self._last is None and not self._told_to_end:
                await self._changed.wait()
            nursery.cancel_scope.cancel()
        for output in child.outputs:
            output.drain(self._print)
        if self._last is not None:
            self._say(*self._last)

    async def _write(self, child: Child) -> None:
        while True:
            while not self._for_body:
                await self._changed.wait()
            self._is_torn = True
            await child.send_line(self._for_body.popleft())
            self._is_torn = False

    async def _read(self, child: Child) -> None:
        if self.order.calls:
            # A body that answers calls does not report its end; the service does, with `keep`.
            while True:
                await self._has_room()
                data = await child.read_bytes()
                self._say("line", data)
                if not data:
                    return
        try:
            while (line := await child.read()) is not None:
                # Compare the beginning only: of all lines, the last one alone is decoded here.
                if line.startswith(ENDED):
                    ended = wire.read_from_body(line)
                    self._is_clean = isinstance(ended, wire.BodyEnd) and not (ended.left or ended.is_spent)
                    self._end_with("line", line)
                    return
                await self._has_room()
                self._say("line", line)
            self._say("line", b"")
        except (ChildDied, ValueError) as error:
            self._say("died", str(error))

    async def _watch(self, child: Child) -> None:
        self._end_with("ended", await child.why_ended(), child.was_killed_at_deadline)

    async def _pump(self, output: Output) -> None:
        is_wanted = True
        while True:
            await self._has_room()
            await trio.lowlevel.wait_readable(output.fd)
            if not (chunk := os.read(output.fd, CHUNK)):
                return
            is_wanted = is_wanted and output.take(chunk, self._print)
            await trio.sleep(0 if is_wanted else UNWANTED_S)

    def _print(self, stream: str, line: str) -> bool:
        self._printed += 1
        self._say("out", stream, line)
        return self._printed <= self.order.max_lines

    async def _has_room(self) -> None:
        """Wait until less than `MAX_SAID` bytes wait to be taken."""
        while self._size >= MAX_SAID:
            await self._changed.wait()

    def _end_with(self, *last: Any) -> None:
        self._last = self._last or last
        self._change()

    def _say(self, *said: Any) -> None:
        self._said.append(said)
        self._size += _size_of(said)
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def _size_of(said: Said) -> int:
    return 100 + sum(len(part) for part in said if isinstance(part, (bytes, str)))


def _by_leases(until: KillTimes) -> KillTimes:
    """Convert times of CLOCK_BOOTTIME to the lease clock."""
    # In this order: if this process is suspended in between, the results are earlier.
    now = lease_time()
    return until.moved(now - boot_s())
