"""Calls of library functions in children of this process or beside Dask workers: the `Calls` of a run.

A child is lent for the length of a block, and its guard has the run's deadlines, as for the body of a job. If the block
ends well, the child is kept for another run. Otherwise it is killed, with all that it has started.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Final

import attrs
import trio

from dataloader.actors.children.child import Child, ChildDied
from dataloader.actors.children.frames import FrameKind
from dataloader.actors.cluster.remote_child import RemoteChild
from dataloader.actors.job_runs import Run
from dataloader.jobs.calls import CallProcess, Print
from dataloader.jobs.errors import BodyFailed
from dataloader.jobs.logger import get_logger
from dataloader.jobs.module_names import Place
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.text import storable_text

log = get_logger(__name__)

OVER_S: Final = 2.0
"""Seconds in which a child must report whether a user has left something behind."""
DEAF_S: Final = 1.0
"""Seconds for which a child may continue after it has closed its socket."""


@attrs.frozen(eq=False)
class ChildCalls:
    """`Calls` of a run. `lend` gives a child that has imported a class."""

    run: Run
    lend: Callable[[Place, Run], AbstractAsyncContextManager[Child | RemoteChild]]

    @asynccontextmanager
    async def open(self, place: Place, put: Print) -> AsyncIterator[CallProcess]:
        """Lend a child that has imported the class at `place`, for the length of a block."""
        async with self.lend(place, self.run) as child:
            called = _Called(child, self.run)
            self.run.movers.add(called.renew)
            try:
                called.renew()  # the lease may have moved while the child was started
                async with trio.open_nursery() as nursery:
                    for output in child.outputs:
                        nursery.start_soon(output.pump, put)
                    nursery.start_soon(called.watch)
                    yield called
                    await called.over()
                    nursery.cancel_scope.cancel()
            finally:
                self.run.movers.discard(called.renew)
                for output in child.outputs:
                    output.drain(put)


@attrs.define(eq=False)
class _Called:
    """`CallProcess` that runs in a child."""

    child: Child | RemoteChild
    run: Run
    _reading: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _died: str = ""

    def renew(self) -> None:
        """Send the child its new deadlines after the run's lease or key was renewed."""
        self.child.renew(self.run.lease.body_is_killed())

    async def watch(self) -> None:
        """Wait for the child's end. Its socket may not show it, because another process may hold it open."""
        self._died = await self.child.why_ended()
        self._reading.cancel()

    async def call(self, head: bytes, body: bytes = b"") -> None:
        """Begin a call. If the child has ended, there is no answer."""
        await self.child.send_frame(FrameKind.CALL, head, body)

    async def answer(self) -> tuple[bytes, bytes]:
        """Return the next answer. Raises `BodyFailed` if the call has failed or the child has ended."""
        kind, head, body = await self._read()
        if kind is not FrameKind.ANSWER:
            raise BodyFailed(storable_text(mask_text(head.decode(errors="replace"))))
        return head, body

    async def over(self) -> None:
        """End a block that ended well; keep the child if nothing was left behind."""
        with trio.move_on_after(OVER_S), suppress(BodyFailed):
            await self.child.send_frame(FrameKind.OVER)
            kind, left, _ = await self._read()
            if left:
                log.warning("killing processes that ended calls left running", what=left.decode())
            elif kind is FrameKind.OVER:
                self.child.idle_since = trio.current_time()

    async def _read(self) -> tuple[FrameKind, bytes, bytes]:
        why = "the child process closed its connection to the service"
        with trio.CancelScope() as self._reading:
            if not self._died:
                try:
                    if (frame := await self.child.read_frame()) is not None:
                        return frame
                except ChildDied as error:
                    why = f"the child process sent an invalid message: {error}"
                await trio.sleep(DEAF_S)  # `watch` learns how the child ended
        if self.child.was_killed_at_deadline:
            self.run.stop(self.run.lease.body_is_killed_for())
        raise BodyFailed(storable_text(mask_text(self._died or why)))
