"""Parts of one process, which make_parts.py connects and tree.py runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime

import attrs
import trio

from dataloader.actors.children.pool import Children
from dataloader.actors.cluster.clusters import Clusters
from dataloader.actors.dispatcher import Dispatcher
from dataloader.actors.heartbeat import Heartbeat
from dataloader.actors.job_runs import Runs
from dataloader.actors.listener import Listener
from dataloader.actors.lock_session_keeper import Keeper
from dataloader.actors.outage import Outage
from dataloader.actors.overdue import OverdueWatch
from dataloader.actors.period_ends import PeriodEnds
from dataloader.actors.recorder import Recorder
from dataloader.actors.recorder_messages import ToRecord
from dataloader.actors.releaser import Releaser
from dataloader.actors.retry_delays import RetryDelays
from dataloader.actors.run_services import RunServices
from dataloader.jobs.measures import Measure
from dataloader.jobs.message_source import MessageReader, MessageSource
from dataloader.jobs.tasks import Tasks
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import Database
from dataloader.store.performer import DatabasePerformer
from dataloader.store.queue.lock_session import LockSession
from dataloader.store.queue.worker_rows import WorkerRow
from dataloader.supervisor.drain import Drain, DrainReport
from dataloader.supervisor.entries import Entries
from dataloader.supervisor.resources import Opened
from dataloader.supervisor.settings import Settings
from dataloader.web.services import ServiceState


@attrs.define(eq=False, kw_only=True)
class Parts:
    """All parts of one process.

    While the tree runs, `start_helper`, `start_claims`, `start_removal` and `hold_resources` start added parts.
    """

    settings: Settings
    tasks: Tasks
    worker: WorkerRow
    database: Database
    performer: DatabasePerformer
    runs: Runs
    outage: Outage
    locks: LockSession
    telemetry: Telemetry
    services: RunServices
    retry_delays: RetryDelays
    period_ends: PeriodEnds
    to_record: trio.MemoryReceiveChannel[ToRecord]
    entries: Entries
    recorder: Recorder
    heartbeat: Heartbeat
    overdue: OverdueWatch
    keeper: Keeper
    releaser: Releaser
    children: Children
    clusters: Clusters
    helpers: Mapping[str, Callable[[], Awaitable[None]]]
    listener: Listener
    start_helper: Callable[[str, Callable[[], Awaitable[None]]], None] = attrs.field(init=False)
    start_claims: Callable[[Dispatcher], Awaitable[None]] = attrs.field(init=False)
    start_removal: Callable[..., None] = attrs.field(init=False)
    hold_resources: Callable[[Tasks, trio.Event], Awaitable[Opened]] = attrs.field(init=False)
    readers: list[MessageReader]
    reader: Callable[[MessageSource], MessageReader]
    drain: Drain
    stores_schedules: bool
    measures: Sequence[Measure]
    reported: Callable[[DrainReport], None] = lambda _report: None
    started_at: datetime = attrs.field(factory=lambda: datetime.now(UTC))
    started: float = attrs.field(factory=trio.current_time)
    web: Callable[[], Awaitable[None]] | None = None
    server: Callable[[], Awaitable[None]] | None = None
    url: str | None = None
    ready: bool = False
    answer_waits: Callable[[], None] = lambda: None
    over: trio.Event = attrs.field(factory=trio.Event)

    def state(self) -> ServiceState:
        """Return the state of the process for `/status`, `/ready` and `/metrics`."""
        return ServiceState(
            version=self.worker.version,
            worker=self.worker.name,
            started_at=self.started_at,
            uptime_s=trio.current_time() - self.started,
            draining=self.drain.requested.is_set(),
            queues=self.entries.loads(),
            listener_connected=self.listener.connected,
            messages=tuple(reader.state for reader in self.readers),
            starting=not self.ready,
            store_ready=self.ready
            and self.locks.connected
            and self.locks.writable
            and self.heartbeat.can_write
            and not self.outage.lasts_for(self.writers),
        )

    @property
    def writers(self) -> list[str]:
        """Names of the parts without which no job starts or ends, unlike without the listener."""
        return ["recorder", *(dispatcher.part for dispatcher in self.dispatchers)]

    @property
    def dispatchers(self) -> list[Dispatcher]:
        """Dispatchers of the entries that this process currently serves."""
        return self.entries.dispatchers

    async def cut_off(self) -> None:
        """Abandon the database: every call that waits for it, and every later call, raises an error."""
        for session in (self.recorder.session, self.heartbeat.session, self.locks):
            await session.cut()
        await self.database.cut()
