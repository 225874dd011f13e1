"""States of queues, for the jobs in them: paused, without a worker, or with every slot taken.

They are read only when a caller asks about a queued job, so that claims and enqueues have no overhead. A queue is
served by the processes in `dl_workers`. Other services are not there, although they may serve the queue.
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
"""Maximum delay of an answer to a trigger for the state of its queue, in seconds."""
UNSAID_S: Final = 0.1
"""Seconds by which the statement's timeout ends before that."""
_MOST_RUNNING: Final = 10_000
"""Maximum number of a queue's running jobs that are counted; with more, a full queue may not be reported as full."""

# Jobs of other services may run in the queue, and take none of our slots.
_STATES: Final = f"""
WITH served AS MATERIALIZED (
  SELECT slots.queue, slots.number::int AS slots, w.worker, w.tasks, w.only_tasks -> slots.queue AS only_tasks
  FROM dl_workers w CROSS JOIN LATERAL jsonb_each_text(w.queues) AS slots (queue, number)
  WHERE w.seen_at > now() - make_interval(secs => $3) AND slots.queue = ANY ($1::text[])
), states AS MATERIALIZED (
  SELECT asked.queue,
         CASE WHEN EXISTS (SELECT FROM dl_queues q WHERE q.queue = asked.queue AND q.paused) THEN 'paused'
              WHEN s.queue IS NULL THEN 'no_worker'
              WHEN (SELECT count(*) FILTER (WHERE r.claimed_by = ANY (s.workers))
                    FROM (SELECT j.claimed_by FROM dl_jobs j WHERE j.status = 'running' AND j.queue = asked.queue
                          LIMIT {_MOST_RUNNING}) AS r) >= s.slots THEN 'full'
         END AS state
  FROM (SELECT DISTINCT u.queue FROM unnest($1::text[]) AS u (queue)) AS asked
  LEFT JOIN (SELECT queue, sum(slots) AS slots, array_agg(worker) AS workers FROM served GROUP BY queue) AS s
    ON s.queue = asked.queue
)
SELECT asked.queue, asked.task,
       CASE WHEN coalesce(s.state, 'full') = 'full' AND (
              SELECT NOT bool_or(coalesce(w.only_tasks ? asked.task, asked.task = ANY (w.tasks), true))
              FROM served w WHERE w.queue = asked.queue) THEN 'unknown_task'
            ELSE s.state END AS state
FROM unnest($1::text[], $2::text[]) AS asked (queue, task) JOIN states s ON s.queue = asked.queue
"""

# Replicas of a service are equal: one row for each service, or one row without a worker.
_PAUSED_AND_SERVED: Final = """
SELECT p.paused, w.queues, w.tasks, w.only_tasks
FROM (SELECT ARRAY(SELECT queue FROM dl_queues WHERE paused) AS paused) AS p
LEFT JOIN (SELECT DISTINCT queues, tasks, only_tasks FROM dl_workers
           WHERE seen_at > now() - make_interval(secs => $1)) AS w ON true
"""


async def aio_queue_states(connection: Any, jobs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], QueueState]:
    """Return the states that keep jobs of these queues and tasks waiting, where there is one (asyncio-flavored)."""
    asked = sorted(set(jobs))
    if not asked:
        return {}
    queues, tasks = [queue for queue, _ in asked], [task for _, task in asked]
    rows = await connection.fetch(_STATES, queues, tasks, ALIVE_WITHIN_S)
    return {(row["queue"], row["task"]): QueueState(row["state"]) for row in rows if row["state"] is not None}


@attrs.frozen
class Served:
    """Paused queues, queues with workers, and the tasks that these know.

    `workers` pairs queues that some workers serve with the tasks that these workers know; None if they do not report
    them.
    """

    paused: frozenset[str]
    workers: Sequence[tuple[frozenset[str], frozenset[str] | None]]

    def state_of(self, queue: str, task: str) -> QueueState | None:
        """Return PAUSED, NO_WORKER, UNKNOWN_TASK, or None for a queue with a worker that may know the task."""
        if queue in self.paused:
            return QueueState.PAUSED
        known = [tasks for queues, tasks in self.workers if queue in queues]
        if not known:
            return QueueState.NO_WORKER
        return None if any(tasks is None or task in tasks for tasks in known) else QueueState.UNKNOWN_TASK


async def read_served(database: Database, within_s: float = ASK_WITHIN_S) -> Served | None:
    """Return the states of the queues, or None if the database has not answered within `within_s` seconds."""
    until = trio.current_time() + within_s
    with contextlib.suppress(StoreError), trio.move_on_at(until):
        # The statement's own timeout comes first: a cancellation would end the connection.
        return await database.run(_aio_served, until - UNSAID_S)
    return None


async def _aio_served(connection: Any, until: float) -> Served | None:
    left_s = until - trio.current_time()
    # The driver's TimeoutError must not leave this function: the session would treat its connection as lost.
    with contextlib.suppress(TimeoutError):
        if left_s > 0:
            rows = await connection.fetch(_PAUSED_AND_SERVED, ALIVE_WITHIN_S, timeout=left_s)
            workers = [served for row in rows if row["queues"] is not None for served in _served(row)]
            return Served(frozenset(rows[0]["paused"]), workers)
    return None


def _served(row: Any) -> Iterator[tuple[frozenset[str], frozenset[str] | None]]:
    # Any program may have written the row.
    only, queues = row["only_tasks"], row["queues"]
    only = {queue: tasks for queue, tasks in only.items() if isinstance(tasks, list)} if isinstance(only, dict) else {}
    if isinstance(queues, dict):
        yield frozenset(queues).difference(only), None if row["tasks"] is None else _names(row["tasks"])
    for queue, tasks in only.items():
        yield frozenset({queue}), _names(tasks)


def _names(values: Iterable[object]) -> frozenset[str]:
    return frozenset(value for value in values if isinstance(value, str))


@attrs.define
class ServedQueues:
    """Paused queues and queues with workers, at most a second old for any number of readers; for answers to triggers.

    There is one small read per second, for any number of triggers and queues; callers that arrive during the read wait
    for it. An answer is kept for `remembered_s` seconds, and a read may take `ask_within_s` seconds.
    """

    _database: Database
    remembered_s: float = attrs.field(default=REMEMBERED_S, kw_only=True)
    ask_within_s: float = attrs.field(default=ASK_WITHIN_S, kw_only=True)
    _known: Served | None = attrs.field(default=None, init=False)
    _read_at: float = attrs.field(default=-math.inf, init=False)
    _turn: trio.Lock = attrs.field(factory=trio.Lock, init=False)

    async def enqueue(self, enqueuer: Enqueuer, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Add jobs, all or none; return each queued one with the state of its queue that delays its claim.

        The queues are read first, while the call can still be cancelled: once the jobs are stored, their IDs are
        returned.
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
        """Return the states of the queues; None while the database does not answer."""
        if self._is_old:
            async with self._turn:
                if self._is_old:
                    self._known = await read_served(self._database, self.ask_within_s)
                    self._read_at = trio.current_time()
        return self._known

    @property
    def _is_old(self) -> bool:
        return trio.current_time() - self._read_at >= self.remembered_s
