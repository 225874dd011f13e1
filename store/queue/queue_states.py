"""How queues stand for the jobs in them: paused, without a worker, or with every slot taken.

Read when somebody looks at a queued job, so that claims and enqueues pay nothing for it. A queue is served by the
processes in `dl_workers`; services of others are not there, and may serve it all the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import attrs
import trio

from dataloader.jobs.errors import StoreError
from dataloader.jobs.model import Enqueued, NewJob
from dataloader.jobs.states import QueueState, Status
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.enqueuer import Enqueuer
from dataloader.store.queue.worker_rows import ALIVE_WITHIN_S

REMEMBERED_S: Final = 1.0
ASK_WITHIN_S: Final = 0.5
"""How long a trigger may be held up for what its answer says of the queue."""
UNSAID_S: Final = 0.1
"""The statement ends so long before that."""
_MOST_RUNNING: Final = 10_000
"""Running jobs of a queue that are counted: with more it may be full without being called so."""

# Jobs of other services may run in the queue, and take no slot of ours.
_STATES: Final = f"""
WITH served AS (
  SELECT slots.queue, sum(slots.number::int) AS slots, array_agg(w.worker) AS workers
  FROM dl_workers w CROSS JOIN LATERAL jsonb_each_text(w.queues) AS slots (queue, number)
  WHERE w.seen_at > now() - make_interval(secs => $2) AND slots.queue = ANY ($1::text[])
  GROUP BY slots.queue
)
SELECT asked.queue,
       CASE WHEN EXISTS (SELECT FROM dl_queues q WHERE q.queue = asked.queue AND q.paused) THEN 'paused'
            WHEN served.queue IS NULL THEN 'no_worker'
            WHEN (SELECT count(*) FILTER (WHERE r.claimed_by = ANY (served.workers))
                  FROM (SELECT j.claimed_by FROM dl_jobs j WHERE j.status = 'running' AND j.queue = asked.queue
                        LIMIT {_MOST_RUNNING}) AS r) >= served.slots THEN 'full'
       END AS state
FROM unnest($1::text[]) AS asked (queue) LEFT JOIN served ON served.queue = asked.queue
"""

# The replicas of a service are alike: a row for each kind of them, or one without a worker.
_PAUSED_AND_SERVED: Final = """
SELECT p.paused, w.queues, w.tasks, w.only_tasks
FROM (SELECT ARRAY(SELECT queue FROM dl_queues WHERE paused) AS paused) AS p
LEFT JOIN (SELECT DISTINCT queues, tasks, only_tasks FROM dl_workers
           WHERE seen_at > now() - make_interval(secs => $1)) AS w ON true
"""


async def aio_queue_states(connection: Any, queues: Iterable[str]) -> dict[str, QueueState]:
    """What keeps the jobs of these queues waiting (asyncio-flavoured); a queue with a free slot is not in it."""
    asked = sorted(set(queues))
    if not asked:
        return {}
    rows = await connection.fetch(_STATES, asked, ALIVE_WITHIN_S)
    return {row["queue"]: QueueState(row["state"]) for row in rows if row["state"] is not None}


@attrs.frozen
class Served:
    """Which queues are paused, which have workers, and what those know.

    `workers` are the queues that some workers serve, each time with the tasks that these know; None: they don't tell.
    """

    paused: frozenset[str]
    workers: Sequence[tuple[frozenset[str], frozenset[str] | None]]

    def state_of(self, queue: str, task: str) -> QueueState | None:
        """PAUSED, NO_WORKER, UNKNOWN_TASK, or None for a queue with a worker that may know the task."""
        if queue in self.paused:
            return QueueState.PAUSED
        known = [tasks for queues, tasks in self.workers if queue in queues]
        if not known:
            return QueueState.NO_WORKER
        return None if any(tasks is None or task in tasks for tasks in known) else QueueState.UNKNOWN_TASK


async def read_served(database: Database) -> Served | None:
    """How the queues stand, or None if the database has not said so in `ASK_WITHIN_S`."""
    until = trio.current_time() + ASK_WITHIN_S
    with contextlib.suppress(StoreError), trio.move_on_at(until):
        # The statement's own time is over first: a cancellation would end the connection.
        return await database.run(_aio_served, until - UNSAID_S)
    return None


async def _aio_served(connection: Any, until: float) -> Served | None:
    left_s = until - trio.current_time()
    # Not the driver's to raise: the session would take its connection for lost.
    with contextlib.suppress(TimeoutError):
        if left_s > 0:
            rows = await connection.fetch(_PAUSED_AND_SERVED, ALIVE_WITHIN_S, timeout=left_s)
            workers = [served for row in rows if row["queues"] is not None for served in _served(row)]
            return Served(frozenset(rows[0]["paused"]), workers)
    return None


def _served(row: Any) -> Iterator[tuple[frozenset[str], frozenset[str] | None]]:
    only: dict[str, list[str]] = row["only_tasks"] or {}
    yield frozenset(row["queues"]).difference(only), None if row["tasks"] is None else frozenset(row["tasks"])
    for queue, tasks in only.items():
        yield frozenset({queue}), frozenset(tasks)


@attrs.define
class ServedQueues:
    """Which queues were paused and which had workers at most a second ago, however many ask; for answers to triggers.

    One small read a second, whatever the number of triggers and of queues; whoever comes while it is made waits for it.
    """

    _database: Database
    _known: Served | None = attrs.field(default=None, init=False)
    _read_at: float = attrs.field(default=-math.inf, init=False)
    _turn: trio.Lock = attrs.field(factory=trio.Lock, init=False)

    async def enqueue(self, enqueuer: Enqueuer, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Add jobs, all or none; each that is queued comes back with what keeps it from being taken.

        The queues are read first, which may be cancelled: once the jobs are in the queue their ids come back.
        """
        known = await self.known()
        enqueued = await enqueuer.enqueue(jobs)
        if known is None:
            return enqueued
        return [
            attrs.evolve(one, queue_state=known.state_of(one.queue, job.task)) if one.status is Status.QUEUED else one
            for one, job in zip(enqueued, jobs, strict=True)
        ]

    async def known(self) -> Served | None:
        """How the queues stand; None while the database does not tell."""
        if self._is_old:
            async with self._turn:
                if self._is_old:
                    self._known = await read_served(self._database)
                    self._read_at = trio.current_time()
        return self._known

    @property
    def _is_old(self) -> bool:
        return trio.current_time() - self._read_at >= REMEMBERED_S
