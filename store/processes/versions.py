"""Versions of process types: their numbers of processes, and whether a running worker serves them.

Shows versions without processes, and versions whose processes wait for a worker. Counts end at `EXACT`, so their cost
is constant.
"""

from __future__ import annotations

from typing import Any, Final

from dataloader.jobs.process_listings import ProcessVersion
from dataloader.jobs.processes import MAX_TYPE, check_type
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.counting import EXACT
from dataloader.store.queue.worker_rows import ALIVE_WITHIN_S

MOST_VERSIONS: Final = 200
"""Maximum versions that are counted, by type: of those with processes, and of those that are served."""

# One step of the index from each type and version to the next. Workers of the previous release only have their tasks.
STATEMENT: Final = f"""
WITH RECURSIVE stored (type, version) AS (
  (SELECT p.type, p.version FROM dl_processes p
   WHERE p.removed_at IS NULL AND ($1::text IS NULL OR p.type = $1) ORDER BY p.type, p.version LIMIT 1)
  UNION ALL
  SELECT n.type, n.version FROM stored s CROSS JOIN LATERAL (
    SELECT p.type, p.version FROM dl_processes p
    WHERE p.removed_at IS NULL AND (p.type, p.version) > (s.type, s.version) AND ($1::text IS NULL OR p.type = $1)
    ORDER BY p.type, p.version LIMIT 1) AS n
), versions AS MATERIALIZED (
  SELECT type, version FROM (SELECT type, version FROM stored LIMIT {MOST_VERSIONS}) AS first
  UNION
  SELECT type, version FROM (
    SELECT type, version FROM dl_process_types
    WHERE ($1::text IS NULL OR type = $1) AND served_until > now() AND char_length(type) BETWEEN 1 AND {MAX_TYPE}
    ORDER BY type, version LIMIT {MOST_VERSIONS}) AS served
)
SELECT v.type, v.version,
       EXISTS (SELECT FROM dl_process_types t
               WHERE t.type = v.type AND t.version = v.version AND t.served_until > now())
       OR EXISTS (SELECT FROM dl_workers w
                  WHERE w.seen_at > now() - make_interval(secs => {ALIVE_WITHIN_S})
                    AND w.queues ? ('process.' || v.type)
                    AND 'process.' || v.type || '.v' || v.version = ANY (w.tasks)) AS served,
       c.counts[1] AS init, c.counts[2] AS running, c.counts[3] AS error
FROM versions v
CROSS JOIN LATERAL (
  SELECT ARRAY(
    SELECT (SELECT count(*) FROM (
              SELECT FROM dl_processes p
              WHERE p.removed_at IS NULL AND p.type = v.type AND p.version = v.version AND p.status = s.status
              LIMIT {EXACT}) AS counted)
    FROM unnest('{{init,running,error}}'::text[]) WITH ORDINALITY AS s (status, place) ORDER BY s.place) AS counts
  OFFSET 0  -- counted once, not for each status
) AS c
ORDER BY v.type, v.version DESC
"""
_PLAN: Final = "SET LOCAL enable_seqscan = off; SET LOCAL max_parallel_workers_per_gather = 0; SET LOCAL jit = off"


async def list_versions(database: Database, process_type: str | None = None) -> list[ProcessVersion]:
    """Return the versions of one type, or of all, the newest of a type first. Raises `BadRequest`."""
    if process_type is not None:
        check_type("type", process_type)
    return await database.run(aio_versions, process_type)


async def aio_versions(connection: Any, process_type: str | None) -> list[ProcessVersion]:
    """Return the versions, see `list_versions` (asyncio-flavored)."""
    async with connection.transaction(readonly=True):
        await connection.execute(_PLAN)
        return [ProcessVersion(**dict(row)) for row in await connection.fetch(STATEMENT, process_type)]
