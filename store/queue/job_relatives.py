"""Jobs related to a job, for its page: those that its handler enqueued, and the last success of its task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.states import Status
from dataloader.jobs.text import read_json
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.attempts import ID_OF_LAST_SUCCESS

MOST_RELATED: Final = 10_000
"""Maximum number of jobs of a group that are counted."""
_RELATIVES: Final = f"""
SELECT (SELECT json_object_agg(status, jobs)::text FROM (
          SELECT status, count(*) AS jobs
          FROM (SELECT status FROM dl_jobs WHERE root_id = $2 AND job_id <> $2 LIMIT {MOST_RELATED}) AS related
          GROUP BY status) AS counted) AS statuses,
       CASE WHEN $3 THEN EXISTS ({ID_OF_LAST_SUCCESS}) ELSE false END AS has_success
FROM (SELECT $1::text, $2::uuid) AS given
"""


@attrs.frozen
class Relatives:
    """Related jobs of a job.

    Attributes:
        statuses: the jobs of the group that the job has begun, by status.
        has_success: whether another job of its task has succeeded lately.
    """

    statuses: Mapping[Status, int]
    has_success: bool

    @property
    def jobs(self) -> int:
        """Number of jobs of the group."""
        return sum(self.statuses.values())

    @property
    def ended(self) -> int:
        """Number of jobs of the group that have ended."""
        return sum(number for status, number in self.statuses.items() if status.is_final)


async def read_relatives(database: Database, task: str, job_id: UUID, *, success: bool) -> Relatives:
    """Return the related jobs; with `success`, also whether another job of the task has succeeded."""
    row = await database.run(_aio_read_relatives, task, job_id, success)
    found = read_json(row["statuses"]) if row["statuses"] else {}
    return Relatives({Status(status): jobs for status, jobs in found.items()}, row["has_success"])


async def _aio_read_relatives(connection: Any, task: str, job_id: UUID, success: bool) -> Any:  # noqa: FBT001 - a parameter of SQL
    return await connection.fetchrow(_RELATIVES, task, job_id, success)
