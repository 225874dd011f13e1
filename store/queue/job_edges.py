"""Dependencies of jobs (R8): edges to the jobs that a job runs after, added in the transaction that adds the job.

Whether the job is ready is decided by `ready_after` in make_ready.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import NewJob

_NAMED: Final = 5
"""Maximum number of unknown IDs named in an error."""

_ADD: Final = """
INSERT INTO dl_job_after (job_id, after_id) SELECT * FROM unnest($1::uuid[], $2::uuid[]) AS e (job_id, after_id)
"""
_UNKNOWN: Final = """
SELECT u.id FROM unnest($1::uuid[]) AS u (id) WHERE (SELECT j.job_id FROM dl_jobs j WHERE j.job_id = u.id) IS NULL
"""


def check_order(jobs: Sequence[NewJob]) -> None:
    """Raise `BadRequest` unless each job follows the jobs of the list that it runs after, so that no cycle exists."""
    if all(job.after is None for job in jobs):
        return
    places = {job.job_id: place for place, job in enumerate(jobs)}
    for place, job in enumerate(jobs):
        for after_id in job.after or ():
            if places.get(after_id, -1) >= place:
                raise BadRequest("after", f"must refer to earlier jobs in the list, not {after_id}")


async def aio_add_edges(connection: Any, edges: Mapping[UUID, Sequence[UUID]]) -> None:
    """Add the edges of jobs added in this transaction, as (job, jobs that it runs after) (asyncio-flavored).

    Raises `BadRequest` that names the first unknown IDs.
    """
    pairs = [(job_id, after_id) for job_id, after in edges.items() for after_id in after]
    if not pairs:
        return
    named = {after_id for _, after_id in pairs}
    unknown = [record["id"] for record in await connection.fetch(_UNKNOWN, sorted(named))]
    if unknown:
        first = ", ".join(map(str, unknown[:_NAMED])) + (" and others" if len(unknown) > _NAMED else "")
        raise BadRequest("after", f"must have IDs of existing jobs; no job has the ID {first}")
    await connection.execute(_ADD, *map(list, zip(*pairs, strict=True)))
