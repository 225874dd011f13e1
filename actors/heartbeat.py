"""Renews the leases of all running jobs in one statement, and stops jobs that have lost theirs.

It has a dedicated connection, so that no other work of this process can delay it. The period is the setting or a third
of the shortest lease, whichever is less. The same answer brings cancel requests whose notification was lost. A separate
write shows the worker as alive. The heartbeat outlives the recorder: a job whose end is not written yet needs its
lease.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

import attrs
import trio

from dataloader.actors.job_runs import Run, Runs
from dataloader.actors.outage import Outage
from dataloader.actors.signals import Signals
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.outcomes import StopReason
from dataloader.store.connection.bridge import Database, Session
from dataloader.store.queue.lease_clock import lease_time
from dataloader.store.queue.leases import Beat, Pulse, aio_beat, aio_revive
from dataloader.store.queue.lock_session import LockSession
from dataloader.store.queue.worker_rows import SHOW_EVERY_S, ClockReading, WorkerRow, aio_leave, aio_show

log = get_logger(__name__)

JOURNAL_EVERY_S: Final = 60.0
RETRY_S: Final = 0.5
MIN_TIMEOUT_S: Final = 1.0
SHOW_AGAIN_S: Final = 1.0
"""Pause in seconds after a process heartbeat that could not be written: `/ready` waits for the next one."""


@attrs.define(eq=False, kw_only=True)
class Heartbeat:
    """Heartbeat for all runs of this process.

    Each one calls `clock_read` with a reading of the database's clock. It calls `restored` if older tables have
    replaced those that had the last process heartbeat.
    """

    session: Session
    locks: LockSession
    database: Database
    worker: WorkerRow
    runs: Runs
    outage: Outage
    period_s: float
    clock_read: Callable[[ClockReading], None] = lambda _reading: None
    restored: Callable[[], None] = lambda: None
    signals: Signals | None = None
    wake: Wake = attrs.field(factory=Wake)
    can_write: bool = attrs.field(default=True, init=False)
    """True if the last process heartbeat was written: a server may answer, but accept no writes."""
    _has_left: bool = attrs.field(default=False, init=False)
    _journalled_at: dict[int, float] = attrs.field(factory=dict, init=False)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send heartbeats until cancelled."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_for_cancels)
            nursery.start_soon(self._show_for_ever)
            await self._beat_for_ever()

    async def _beat_for_ever(self) -> None:
        while True:
            began = trio.current_time()
            runs = {run.job.token: run for run in self.runs}
            self._journalled_at = {token: at for token, at in self._journalled_at.items() if token in runs}
            certain = await self._beat(list(runs.values()))
            if self.signals is not None:
                self.signals.heartbeat.emit(began)
            period_s = min(self.period_s, self.runs.shortest_lease_s() / 3)
            await self.wake.wait(period_s if certain else min(RETRY_S, period_s))

    async def _look_for_cancels(self) -> None:
        """Read the rows of runs after notifications of their cancels."""
        while True:
            await self.runs.asked.wait(math.inf)
            if not await self._beat(self.runs.take_asked()):
                self.wake.set()

    async def _beat(self, some: list[Run]) -> bool:
        """Send one heartbeat for `some` runs. Return True if each one's lease was renewed or is known to be lost."""
        runs = {run.job.token: run for run in some if not run.committed}
        if not runs:
            await self._stay_connected()
            return True
        now = trio.current_time()
        beats = [(run.job.job_id, token, self._is_to_be_journalled(run, now)) for token, run in runs.items()]
        # A second try, on a new connection, must fit into the lease.
        timeout_s = max(self.runs.shortest_lease_s() / 4, MIN_TIMEOUT_S)
        try:
            sent_at, pulses = await self.session.write_within(timeout_s, _aio_timed_beat, beats)
        except StoreError as error:
            self.outage.failed("heartbeat", error, jobs=len(runs))
            return False
        self.outage.worked("heartbeat")
        expired = [runs[pulse.token] for pulse in pulses if pulse.beat is Beat.EXPIRED]
        revived = await self._revive(expired, timeout_s) if expired else {}
        certain = True
        for pulse in pulses:
            certain &= self._apply(runs[pulse.token], pulse, revived.get(pulse.token, pulse.beat), sent_at)
        return certain

    async def _stay_connected(self) -> None:
        """Connect before the first job runs: in a slow network, connecting may take longer than its lease."""
        # An outage is reported by `_show_for_ever`, which writes as often.
        with contextlib.suppress(StoreError):
            await self.session.open()
            self.outage.worked("heartbeat")

    async def _revive(self, expired: list[Run], timeout_s: float) -> dict[int, Beat]:
        """Renew leases that have ended by the database's clock but not by ours, because the database's has jumped.

        A job with a key is still ours while we hold its key, one without while its row has our token. Returns each
        token with `RENEWED`, or with `UNKNOWN` if the renewal failed or another session had locked the row.
        """
        jobs = [run.job for run in expired if run.lease.until > lease_time()]
        keyed = [(job.job_id, job.token) for job in jobs if self.locks.holds(job.token)]
        keyless = [(job.job_id, job.token) for job in jobs if job.lock_hash is None]
        beats = dict.fromkeys((token for _, token in keyed + keyless), Beat.UNKNOWN)
        revived: set[int] = set()
        try:
            if keyless:
                revived |= await self.session.write_within(timeout_s, aio_revive, keyless)
            revived |= await self.locks.revive(keyed, timeout_s=timeout_s)
        except StoreError as error:
            log.warning("leases that expired because the database's clock jumped are not renewed yet", error=str(error))
        if revived:
            log.warning("renewed leases that had expired because the database's clock jumped", jobs=len(revived))
        return beats | dict.fromkeys(revived, Beat.RENEWED)

    def _apply(self, run: Run, pulse: Pulse, beat: Beat, sent_at: float) -> bool:
        match beat:
            case Beat.RENEWED:
                run.renewed(sent_at)
            case Beat.LOST | Beat.EXPIRED if (
                not run.body_ended and not run.committed and run.stop_reason is not StopReason.LEASE_LOST
            ):
                log.warning("stopping a running job that this process has lost", job_id=str(run.job.job_id))
                run.stop(StopReason.LEASE_LOST)
            case _:
                pass
        if pulse.cancel_requested:
            run.stop(StopReason.CANCEL)
            if self.signals is not None:
                self.signals.cancel_requested.emit(run.job.job_id)
        return beat is not Beat.UNKNOWN

    def _is_to_be_journalled(self, run: Run, now: float) -> bool:
        if now - self._journalled_at.get(run.job.token, run.claimed_at) < JOURNAL_EVERY_S:
            return False
        self._journalled_at[run.job.token] = now
        return True

    async def leave(self) -> None:
        """Remove the worker's row and stop the process heartbeats. Leases are renewed until `run` is cancelled."""
        self._has_left = True
        await self.session.write(aio_leave, self.worker)

    async def _show_for_ever(self) -> None:
        """Show the worker as alive with separate writes, which may fail or wait without costing a lease."""
        seen_at: str | None = None
        while not self._has_left:
            try:
                sign = await self.database.write(aio_show, self.worker, seen_at)
                seen_at = sign.seen_at
                self.clock_read(sign.clock)
                if not (sign.is_kept or self._has_left):
                    self.restored()
                self.outage.worked("heartbeat")
                self.can_write = True
            except StoreError as error:
                self.outage.failed("heartbeat", error)
                self.can_write = False
            await trio.sleep(min(self.period_s, SHOW_EVERY_S if self.can_write else SHOW_AGAIN_S))


async def _aio_timed_beat(connection: Any, beats: list[tuple[UUID, int, bool]]) -> tuple[float, list[Pulse]]:
    """Send a heartbeat; return the time of sending, which is the start of the renewed leases, and the answer."""
    sent_at = lease_time()
    return sent_at, await aio_beat(connection, beats)
