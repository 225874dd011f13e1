"""Delete ended jobs after their retention period, with their event histories, by status (R4).

The pruner calls `prune` until it has nothing left to delete, and then sleeps. Each batch is small and a separate
transaction, oldest jobs first. It skips locked rows, so that no session waits for the deletion. It never deletes a job
that has not ended, nor one that such a job runs after. The rules for other tables are in table_rules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dataloader.jobs.states import Status
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.command_tag import row_count

# A job with failed records of a load stays until they are solved: it tells which rows are missing, and how to request
# them again. The array makes the planner fetch the chosen rows by the primary key; the status is checked again on the
# locked row. The dependents of each job are searched separately: a join read all edges of waiting jobs for each job.
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
    """Delete one batch of each status; return the number of deleted rows, so that the caller can repeat until it is 0.

    Args:
        database: the database.
        days: for each final status, the days after which its jobs are deleted; 0, or no entry, keeps them forever.
        batch: maximum number of jobs of a status.

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
