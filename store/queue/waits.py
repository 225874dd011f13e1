"""Waiting for a job's end or change, by notification (Q3's `?wait=`, `Supervisor.wait`).

Readers wait here; the listener calls `changed` and `all_changed`. A waiter first marks the row as watched, so that its
next change notifies `dl_changed`, and then reads it. So each change is either in the read row, or will be notified. The
change clears the mark in the same write, so a job without waiters notifies at most once, and the end of a wait needs no
write. If a notification is lost with its connection, a poll every two seconds finds the change.

Waiters on the same job share its reads: one reads for all that asked before the read began. A separate task for reading
was rejected, because it would need a nursery and outlive the request that caused it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final
from uuid import UUID

import attrs
import trio

from dataloader.jobs.model import JobRecord
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.reads import aio_get_job_briefly, get_job

REREAD_S: Final = 2.0
"""Maximum number of seconds between two reads of the row, in case notifications are lost."""
MARK_S: Final = 0.5
"""A row that is locked for longer is marked by a later read, since other callers need the connection."""

_WATCH: Final = """
UPDATE dl_jobs SET watched = true WHERE job_id = $1 AND NOT watched AND status IN ('queued', 'running')
"""


@attrs.define(eq=False)
class _AwaitedJob:
    """Job with waiters, and the last read of it, which all waiters share.

    `stale` means that a waiter needs a read that begins from now on. `read_at` is the time at which the last one began,
    in seconds of Trio's clock. `job` is without args and result, which may be long: the waiters read them after the
    wait.
    """

    job_id: UUID
    waiters: int = 0
    stale: bool = True
    read_at: float = 0.0
    job: JobRecord | None = None
    turn: trio.Lock = attrs.field(factory=trio.Lock)
    woken: trio.Event = attrs.field(factory=trio.Event)

    def wake(self) -> None:
        self.stale = True
        self.woken.set()
        self.woken = trio.Event()


class Waits:
    """All waits for jobs in this process. It has the watches, and is used from one Trio thread."""

    def __init__(self, database: Database, *, reread_s: float = REREAD_S) -> None:
        """Create the waits. Each watched row is read at least every `reread_s` seconds.

        The first wait sets `begun`, so that a listener that only waits need it does not connect earlier.
        """
        self.begun = trio.Event()
        self._database = database
        self._reread_s = reread_s
        self._watches: dict[UUID, _AwaitedJob] = {}

    async def wait(self, job_id: UUID, *, timeout_s: float, seen: JobRecord | None = None) -> JobRecord:
        """Return the job when it ends, when its status or progress differs from `seen`, or after `timeout_s`.

        Args:
            job_id: ID of the job.
            timeout_s: seconds after which the job is returned as it is.
            seen: the job as the caller knows it; None means the job at the beginning of the wait.

        Raises:
            JobNotFound: the job does not exist, or no longer.
            StoreUnavailable: the database cannot be read now.
        """
        await self.until_changed(job_id, timeout_s=timeout_s, seen=seen)
        return await get_job(self._database, job_id)

    async def until_changed(self, job_id: UUID, *, timeout_s: float, seen: JobRecord | None = None) -> None:
        """Do the same as `wait` without returning the job, for callers that read it themselves: it may be long."""
        with self._watching(job_id) as watch, trio.move_on_after(timeout_s):
            while True:
                woken = watch.woken
                job = await self._read(watch)
                if job.status.is_final or (seen is not None and _differs(job, seen)):
                    return
                seen = seen or job
                with trio.move_on_at(watch.read_at + self._reread_s):
                    await woken.wait()
                if trio.current_time() >= watch.read_at + self._reread_s:
                    watch.stale = True

    def changed(self, job_id: UUID) -> None:
        """Wake the waiters of a job that has changed, according to a notification."""
        watch = self._watches.get(job_id)
        if watch is not None:
            watch.wake()

    def all_changed(self) -> None:
        """Wake all waiters: the listener has a new connection, so notifications may have been missed."""
        for watch in self._watches.values():
            watch.wake()

    @contextmanager
    def _watching(self, job_id: UUID) -> Iterator[_AwaitedJob]:
        watch = self._watches.setdefault(job_id, _AwaitedJob(job_id))
        watch.waiters += 1
        self.begun.set()
        # The last read for the other waiters may be older than the job that the new one has seen.
        watch.stale = True
        try:
            yield watch
        finally:
            watch.waiters -= 1
            if not watch.waiters:
                del self._watches[job_id]

    async def _read(self, watch: _AwaitedJob) -> JobRecord:
        async with watch.turn:
            if watch.stale or watch.job is None:
                watch.stale = False
                watch.read_at = trio.current_time()
                try:
                    # Not shielded: a lost mark is set again, and a canceled caller must not keep a connection.
                    watch.job = await self._database.run(_aio_watch, watch.job_id)
                except BaseException:
                    watch.stale = True
                    raise
            return watch.job


def _differs(job: JobRecord, seen: JobRecord) -> bool:
    return (job.status, job.progress) != (seen.status, seen.progress)


async def _aio_watch(connection: Any, job_id: UUID) -> JobRecord:
    # Two statements, two snapshots: the read must see all commits before that of the mark.
    with suppress(TimeoutError):
        await connection.execute(_WATCH, job_id, timeout=MARK_S)
    return await aio_get_job_briefly(connection, job_id)
