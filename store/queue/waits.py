"""Waiting for a job's end or change, by notification (Q3's `?wait=`, `Supervisor.wait`).

Readers wait here; the listener calls `changed` and `all_changed`. A waiter first marks the row as watched, so that its
next change notifies `dl_changed`, and then reads it: a change is either in what it reads or still to be notified, never
lost between. The change takes the mark away in the same write, so a job that nobody waits for any more notifies once at
most, and the end of a wait needs no write. Should a notification get lost with its connection, a look every two seconds
finds the change.

Many waiters on a job share its reads: one reads for all who asked before it began. Rejected: a task of our own that
reads, because it would need a nursery and outlive the request that caused it.
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
"""The longest time without a look at the row, whatever the notifications say."""
MARK_S: Final = 0.5
"""A row that somebody has locked for longer is marked by a later look: others need the connection."""

_WATCH: Final = """
UPDATE dl_jobs SET watched = true WHERE job_id = $1 AND NOT watched AND status IN ('queued', 'running')
"""


@attrs.define(eq=False)
class _Watch:
    """One job that somebody waits for, and the last reading of it, which all its waiters share.

    `stale` says that a waiter needs a reading that begins from now on; `read_at` is when the last one began, by Trio's
    clock in seconds. `job` is without args and result, which may be long: whoever waited reads them when the wait is
    over.
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
    """All who wait for jobs in this process. Owner of the watches; used from one Trio thread."""

    def __init__(self, database: Database, *, reread_s: float = REREAD_S) -> None:
        """Each watched row is read at least every `reread_s` seconds.

        `begun` is set by the first wait, so that a listener for waits alone need not connect earlier.
        """
        self.begun = trio.Event()
        self._database = database
        self._reread_s = reread_s
        self._watches: dict[UUID, _Watch] = {}

    async def wait(self, job_id: UUID, *, timeout_s: float, seen: JobRecord | None = None) -> JobRecord:
        """The job as soon as it has ended or its status or progress differs from `seen`, or after `timeout_s`.

        Args:
            job_id: which job.
            timeout_s: after so many seconds the job comes back as it stands.
            seen: what the caller knows; None means the job as it stands when the wait begins.

        Raises:
            JobNotFound: there is no such job, or no longer.
            StoreUnavailable: the database can't be read now.
        """
        await self.until_changed(job_id, timeout_s=timeout_s, seen=seen)
        return await get_job(self._database, job_id)

    async def until_changed(self, job_id: UUID, *, timeout_s: float, seen: JobRecord | None = None) -> None:
        """As `wait`, for those who read the job themselves, in their turn: it may be long."""
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
        """A notification says that the job has changed."""
        watch = self._watches.get(job_id)
        if watch is not None:
            watch.wake()

    def all_changed(self) -> None:
        """Notifications may have been missed: the listener's connection is new."""
        for watch in self._watches.values():
            watch.wake()

    @contextmanager
    def _watching(self, job_id: UUID) -> Iterator[_Watch]:
        watch = self._watches.setdefault(job_id, _Watch(job_id))
        watch.waiters += 1
        self.begun.set()
        # What others read may be older than what the newcomer has seen.
        watch.stale = True
        try:
            yield watch
        finally:
            watch.waiters -= 1
            if not watch.waiters:
                del self._watches[job_id]

    async def _read(self, watch: _Watch) -> JobRecord:
        async with watch.turn:
            if watch.stale or watch.job is None:
                watch.stale = False
                watch.read_at = trio.current_time()
                try:
                    # Not shielded: a lost mark is set again, and a caller who has left must not hold a connection.
                    watch.job = await self._database.run(_aio_watch, watch.job_id)
                except BaseException:
                    watch.stale = True
                    raise
            return watch.job


def _differs(job: JobRecord, seen: JobRecord) -> bool:
    return (job.status, job.progress) != (seen.status, seen.progress)


async def _aio_watch(connection: Any, job_id: UUID) -> JobRecord:
    # Two statements, two snapshots: the reading must see what was committed before the mark was.
    with suppress(TimeoutError):
        await connection.execute(_WATCH, job_id, timeout=MARK_S)
    return await aio_get_job_briefly(connection, job_id)
