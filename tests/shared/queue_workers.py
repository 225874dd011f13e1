"""Worker of the queue for the protocol's tests: the store's own calls, one at a time, in the test's order."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

import asyncpg
import trio
from watched_database import ProxiedConnection

from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Step
from dataloader.store.queue.claim import Claim
from dataloader.store.queue.finish import Finished, aio_finish
from dataloader.store.queue.leases import Beat, aio_beat
from dataloader.store.queue.lock_session import LockSession
from dataloader.store.queue.make_ready import unpark

BACKOFF_S = 30.0
ANY_CLAIM = r"dl_claim|picked AS"
"""A pattern for the statements of the general claim and the plain one."""


class Worker:
    """Lock session and a process's actions with it; `lost` collects the tokens whose key another session got."""

    def __init__(self, store, name: str, **options: Any) -> None:
        self.store = store
        self.name = name
        self.lost: list[int] = []
        self.locks = LockSession(store, name, lost=self.lost.extend, **options)

    @property
    def pid(self) -> int:
        """Process ID of the session's backend."""
        return self.locks._ghost[0]

    async def ping(self, lease_s: float = 60.0) -> None:
        """Ping, and repair lost locks, as the keeper does."""
        await self.locks.ping(lease_s)
        await self.locks.repair()

    async def ask(
        self, queue: str = "q", limit: int = 10, tasks: tuple[str, ...] = ("t",), after: UUID | None = None
    ) -> Claim:
        """Claim, without further actions."""
        return await self.locks.claim(queue, limit, tasks, BACKOFF_S, after=after)

    async def finds_nothing(self) -> bool:
        """Return True if a claim has found no job, not even one that it parked."""
        claim = await self.ask()
        return not claim.jobs and not claim.to_test

    async def claim(self, queue: str = "q", limit: int = 10, tasks: tuple[str, ...] = ("t",)) -> list[ClaimedJob]:
        """Claim as the dispatcher does: keys of parked jobs are checked again."""
        claim = await self.ask(queue, limit, tasks)
        if claim.to_test:
            await unpark(self.store, claim.to_test)
        return claim.jobs

    async def record(self, *outcomes: Outcome) -> Finished:
        """Write outcomes as the recorder does, repeating those whose row is locked."""
        finished = await self.store.write(aio_finish, outcomes)
        while finished.locked:
            await trio.sleep(0.005)
            again = await self.store.write(aio_finish, [e for e in outcomes if e.token in finished.locked])
            finished = Finished(finished.written | again.written, finished.void + again.void, again.locked)
        return finished

    async def end(self, job: ClaimedJob, step: Step = Step.SUCCEED, **outcome: Any) -> Finished:
        """End a run as the recorder and the releaser do: the outcome, then the key."""
        finished = await self.record(Outcome(job.job_id, job.token, step, **outcome))
        self.locks.forget(job.token)
        await self.locks.release()
        return finished

    async def beat(self, *jobs: ClaimedJob, journal: bool = False) -> list[Beat]:
        """Send one heartbeat; return its results in the order of `jobs`."""
        pulses = await self.store.write(aio_beat, [(job.job_id, job.token, journal) for job in jobs])
        found = {pulse.token: pulse.beat for pulse in pulses}
        return [found[job.token] for job in jobs]


class LossyConnection(ProxiedConnection):
    """Connection that executes a statement and loses the reply; the pattern `lose` identifies it by its text."""

    def __init__(self, connection: Any, lose: str, error: Exception | None = None) -> None:
        super().__init__(connection)
        self._lose = lose
        self._error = error

    async def _send(self, method: str, sql: str, *values: Any, **options: Any) -> Any:
        lost = re.search(self._lose, sql) is not None
        if lost and self._error is not None:
            # The server rolled back by itself: the rows are as before, session locks are not.
            self._lose = "(?!)"
            async with self._connection.transaction():
                await super()._send(method, sql, *values, **options)
                raise self._error
        reply = await super()._send(method, sql, *values, **options)
        if lost:
            self._connection.terminate()
            raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")
        return reply
