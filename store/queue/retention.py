"""Deletes ended jobs that are too old to keep, with their journals, by status (R4).

The pruner calls `prune` until it has nothing left to delete, and then sleeps. Each batch is small and a transaction of
its own, oldest jobs first. It skips locked rows, so that nobody waits for the deletion. It never deletes a job that has
not ended, nor one that such a job runs after. Other tables are in table_rules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dataloader.jobs.states import Status
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.command_tag import row_count

# What failed in a load stays until it is solved: it tells which rows are missing, and how to ask for them again.
# The array makes the planner fetch the chosen rows by the primary key; the status is judged again on the locked row.
# Who waits for a job is looked up for each by itself: as a join, all edges of waiting jobs were gone through for each.
_DELETE_JOBS: Final = """
DELETE FROM dl_jobs WHERE job_id = ANY (ARRAY(
  SELECT j.job_id FROM dl_jobs j WHERE j.status = $1 AND j.finished_at < now() - make_interval(days => $2)
  AND NOT EXISTS (SELECT FROM dl_etl_failures f WHERE f.run_id = j.job_id AND f.solved_at IS NULL)
  AND (SELECT true FROM dl_job_after a
       WHERE a.after_id = j.job_id
         AND (SELECT w.status FROM dl_jobs w WHERE w.job_id = a.job_id) IN ('queued', 'running')
       LIMIT 1) IS NULL
  ORDER BY j.finished_at LIMIT $3 FOR UPDATE OF j SKIP LOCKED))
"""


async def prune(database: Database, days: Mapping[Status, int], *, batch: int = 1_000) -> int:
    """Delete one batch of each status; how many rows went comes back, so that the caller repeats until it is 0.

    Args:
        database: where.
        days: for each final status, after how many days its jobs go; 0, or no entry, keeps them for ever.
        batch: how many jobs of a status go at most.

    Raises:
        ValueError: `days` has a status that is not final.
    """
    living = [status for status in days if not status.is_final]
    if living:
        raise ValueError(f"days: {', '.join(living)} is not final; only jobs that have ended are deleted")
    return await database.write(_aio_prune, {status: limit for status, limit in days.items() if limit > 0}, batch)


async def _aio_prune(connection: Any, days: Mapping[Status, int], batch: int) -> int:
    tags = [await connection.execute(_DELETE_JOBS, status, limit, batch) for status, limit in days.items()]
    return sum(map(row_count, tags))
