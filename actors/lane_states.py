"""Reports which limit queues (lanes) are closed because of an error: in the log, the metrics and the database.

Each change is one log line. Each attempt stores its error in the lane's row, for readers of its task and its jobs;
claims do not depend on that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import trio

from dataloader.actors.lane_looks import LaneLooks
from dataloader.jobs.errors import StoreError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.limits.lane_errors import aio_lane_failed, aio_lane_works
from dataloader.store.queue.lock_session import LockSession

log = get_logger(__name__)


@attrs.define(eq=False, kw_only=True)
class LaneStates:
    """States of the lanes of one queue, whose claims are made on the session `locks`."""

    queue: str
    lanes: LaneLooks
    locks: LockSession
    telemetry: Telemetry

    async def refused(self, lane: str, error: StoreError) -> None:
        """Close the lane, because the database has refused a claim from it alone."""
        text = str(error)
        if self.lanes.refused_apart(lane, text, trio.current_time()):
            log.error("closed a limit queue: its limits cannot be evaluated", queue=self.queue, task=lane, error=text)
        await self._note(aio_lane_failed, lane, text)

    async def worked(self, lane: str) -> None:
        """Open the lane, if it was closed, because a claim from it alone was answered."""
        if self.lanes.worked_apart(lane, trio.current_time()):
            log.warning("reopened a limit queue", queue=self.queue, task=lane)
            await self._note(aio_lane_works, lane)

    def count(self) -> None:
        """Report the number of closed lanes, which also falls when a closed lane is dropped."""
        self.telemetry.lanes_closed(self, self.lanes.closed)

    def left(self) -> None:
        """Report no closed lanes, because this process no longer claims from the queue."""
        self.telemetry.lanes_closed(self, 0)

    async def _note(self, operation: Callable[..., Awaitable[None]], *values: Any) -> None:
        self.count()
        try:
            await self.locks.ask(operation, *values)
        except StoreError as error:
            log.debug("the state of a limit queue was not stored", queue=self.queue, error=str(error))
