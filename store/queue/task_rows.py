"""What the tasks of a process give to their jobs, kept in the database: so it holds however a job is enqueued.

Each process writes it when it starts, and the last one wins; the statement that adds jobs reads it (enqueue.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from dataloader.jobs.tasks import Task

LAYOUT: Final = 1
"""Grows with each setting that rows get: a program leaves rows of a greater layout as they are."""

# In one order, so that processes which start at once wait for each other in it.
_DECLARE: Final = """
INSERT INTO dl_tasks AS t (task, queue, priority, lock_key, max_attempts, lease_ttl_sec, layout, declared_by)
SELECT d.task, d.queue, d.priority, d.lock_key::jsonb, d.max_attempts, d.lease_ttl_sec, $7, $8
FROM unnest($1::text[], $2::text[], $3::int[], $4::text[], $5::int[], $6::int[])
  AS d (task, queue, priority, lock_key, max_attempts, lease_ttl_sec)
ORDER BY d.task
ON CONFLICT (task) DO UPDATE SET
  queue = excluded.queue, priority = excluded.priority, lock_key = excluded.lock_key, max_attempts = excluded.max_attempts,
  lease_ttl_sec = excluded.lease_ttl_sec, layout = excluded.layout, declared_by = excluded.declared_by, declared_at = now()
WHERE t.layout <= excluded.layout
  AND (t.queue, t.priority, t.lock_key, t.max_attempts, t.lease_ttl_sec, t.layout)
      IS DISTINCT FROM (excluded.queue, excluded.priority, excluded.lock_key, excluded.max_attempts, excluded.lease_ttl_sec,
                        excluded.layout)
"""  # noqa: E501 - one line a part


async def aio_declare(connection: Any, tasks: Iterable[Task[Any]], worker: str) -> None:
    """Write what the tasks of `worker` give to their jobs (asyncio-flavoured). What is so already is not written."""
    rows = [
        (
            task.name,
            task.queue,
            task.priority,
            None if task.lock_key is None else msgspec.json.encode(task.lock_key).decode(),
            task.max_attempts,
            task.lease_ttl_sec,
        )
        for task in tasks
    ]
    columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * 6
    await connection.execute(_DECLARE, *columns, LAYOUT, worker)
