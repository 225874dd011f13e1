"""How queues stand for the jobs in them: paused, without a worker, or with every slot taken.

Read when somebody looks at a queued job, so that claims and enqueues pay nothing for it. A queue is served by the
processes in `dl_workers`; services of others are not there, and may serve it all the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Final

import attrs
import trio

from dataloader.jobs.errors import StoreError
from dataloader.jobs.states import QueueState
from dataloader.store.database import Database
from dataloader.store.workers import ALIVE_WITHIN_S

REMEMBERED_S: Final = 1.0
ASK_WITHIN_S: Final = 0.5
"""How long an answer to a trigger may be held up for what it says of the queue."""
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

_PAUSED_AND_SERVED: Final = """
SELECT ARRAY(SELECT queue FROM dl_queues WHERE paused) AS paused,
       ARRAY(SELECT jsonb_object_keys(queues) FROM dl_workers
             WHERE seen_at > now() - make_interval(secs => $1)) AS served
"""


async def aio_queue_states(connection: Any, queues: Iterable[str]) -> dict[str, QueueState]:
    """What keeps the jobs of these queues waiting (asyncio-flavoured); a queue with a free slot is not in it."""
    asked = sorted(set(queues))
    if not asked:
        return {}
    rows = await connection.fetch(_STATES, asked, ALIVE_WITHIN_S)
    return {row["queue"]: QueueState(row["state"]) for row in rows if row["state"] is not None}


@attrs.define
class ServedQueues:
    """Which queues were paused and which had workers at most a second ago, however many ask; for answers to triggers.

    One small read a second, whatever the number of triggers and of queues.
    """

    _database: Database
    _known: tuple[frozenset[str], frozenset[str]] | None = attrs.field(default=None, init=False)
    _asked_at: float = attrs.field(default=float("-inf"), init=False)

    async def state_of(self, queues: Iterable[str]) -> dict[str, QueueState | None]:
        """PAUSED or NO_WORKER for each of these queues; None for a served one, and while the database does not tell."""
        if trio.current_time() - self._asked_at >= REMEMBERED_S:
            # Before the answer: others who come meanwhile take the one before.
            self._asked_at = trio.current_time()
            self._known = await self._ask()
        return {queue: self._state(queue) for queue in queues}

    def _state(self, queue: str) -> QueueState | None:
        if self._known is None:
            return None
        paused, served = self._known
        if queue in paused:
            return QueueState.PAUSED
        return None if queue in served else QueueState.NO_WORKER

    async def _ask(self) -> tuple[frozenset[str], frozenset[str]] | None:
        with contextlib.suppress(StoreError), trio.move_on_after(ASK_WITHIN_S):
            return await self._database.run(_aio_paused_and_served)
        return None


async def _aio_paused_and_served(connection: Any) -> tuple[frozenset[str], frozenset[str]]:
    row = await connection.fetchrow(_PAUSED_AND_SERVED, ALIVE_WITHIN_S)
    return frozenset(row["paused"]), frozenset(row["served"])
