"""Receives notifications and wakes the actors that they concern. Its loss costs latency only.

The tree keeps it running. After each connect it wakes all actors once, because it has missed notifications before. A
dead peer is silent, so the connection is pinged; `connected` says whether it is up.

After a flood of notifications it pauses, twice as long after each further flood; polling does its work meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs
import trio

from dataloader.actors.job_runs import Runs
from dataloader.actors.outage import Outage
from dataloader.actors.signals import Signals
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import NotificationFlood, StoreError, StoreUnavailable
from dataloader.jobs.logger import get_logger
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.answers import Answers
from dataloader.store.queue.notifications import (
    CHANNELS,
    OF_RUNNING,
    CancelRequested,
    JobChanged,
    JobDue,
    JobToJudge,
    LaneTold,
    Listening,
    Notification,
    QueueReady,
    TaskAnswered,
    open_listener,
)
from dataloader.store.queue.waits import Waits

log = get_logger(__name__)

PING_EVERY_S: Final = 5.0
PING_TIMEOUT_S: Final = 5.0
FIRST_REST_S: Final = 2.0
MAX_REST_S: Final = 60.0


@attrs.define(eq=False, kw_only=True)
class Listener:
    """Listener of this process. It wakes `queues` by name, other actors, and waiting callers, and informs the runs.

    `wakes` has the actors that a notification wakes whatever it says, by its class.
    """

    database: Database
    queues: Mapping[str, Sequence[Wake]]
    stager: Wake
    added: Wake
    heartbeat: Wake
    wakes: Mapping[type[Notification], Wake]
    runs: Runs
    outage: Outage
    waits: Waits
    answers: Answers
    lane_told: Callable[[str], None]
    signals: Signals | None = None
    connected: bool = False

    _listening: Listening | None = attrs.field(default=None, init=False)
    _rest_s: float = attrs.field(default=FIRST_REST_S, init=False)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until the connection is lost, then raise `StoreUnavailable`; the tree restarts the listener."""
        task_status.started()
        while True:
            try:
                await self._listen()
            except NotificationFlood as flood:
                self.outage.failed("listener", flood, again_in_s=self._rest_s)
                await trio.sleep(self._rest_s)
                self._rest_s = min(self._rest_s * 2, MAX_REST_S)
            except StoreError as error:
                self.outage.failed("listener", error)
                raise

    async def _listen(self) -> None:
        try:
            async with open_listener(self.database, self._hear, self._channels) as listening:
                self.connected, self._listening = True, listening
                if self._rest_s == FIRST_REST_S:  # after a flood, the next one may follow
                    self.outage.worked("listener")
                self.wake_all()
                if self.signals is not None:
                    self.signals.listening.emit(trio.current_time())
                while True:
                    await self._hear_all(listening)
                    await listening.ping(PING_TIMEOUT_S)
                    with trio.move_on_after(PING_EVERY_S):
                        await listening.lost.wait()
                        raise StoreUnavailable("the listener's connection was lost")
                    self._rest_s = FIRST_REST_S
                    self.outage.worked("listener")
        finally:
            self.connected, self._listening = False, None

    @property
    def _channels(self) -> frozenset[str]:
        """Channels to listen to: without queues, those that concern only queues are left out."""
        return CHANNELS if self.queues else CHANNELS - OF_RUNNING

    async def listen_to_queues(self) -> None:
        """Listen immediately to the channels of the present queues. Raises `StoreUnavailable`."""
        if self._listening is not None:
            await self._hear_all(self._listening)

    async def _hear_all(self, listening: Listening) -> None:
        # Notifications sent before LISTEN are lost.
        if await listening.listen(self._channels):
            self.wake_all()

    def wake_all(self) -> None:
        """Wake all actors and callers, because notifications may have been missed."""
        of_queues = (wake for wakes in self.queues.values() for wake in wakes)
        for wake in (*of_queues, self.added, self.stager, self.heartbeat, *self.wakes.values()):
            wake.set()
        self.lane_told("")
        self.waits.all_changed()
        self.answers.all_told()

    def _hear(self, notification: Notification) -> None:
        self._deliver(notification)
        if self.signals is not None:
            self.signals.notified.emit(notification)

    def _deliver(self, notification: Notification) -> None:
        match notification:
            case QueueReady(queue):
                for wake in self.queues.get(queue, ()):
                    wake.set()
            case LaneTold(lane):
                self.lane_told(lane)
            case JobDue():
                self.stager.set()
            case JobToJudge(ended):
                if not ended:
                    self.added.set()
                self.stager.set()
            case CancelRequested(token):
                self.runs.cancel(token)
            case JobChanged(job_id):
                self.waits.changed(job_id)
            case TaskAnswered(task_id):
                self.answers.told(task_id)
            case _:
                self.wakes[type(notification)].set()
