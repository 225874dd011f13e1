"""Which jobs a job runs after (R8): its edges, added in one transaction with the job that waits.

Nothing is judged there; see `ready_after` in make_ready.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import NewJob

_NAMED: Final = 5
"""Unknown ids that an error names."""

_ADD: Final = """
INSERT INTO dl_job_after (job_id, after_id) SELECT * FROM unnest($1::uuid[], $2::uuid[]) AS e (job_id, after_id)
"""
_UNKNOWN: Final = """
SELECT u.id FROM unnest($1::uuid[]) AS u (id) WHERE (SELECT j.job_id FROM dl_jobs j WHERE j.job_id = u.id) IS NULL
"""


def check_order(jobs: Sequence[NewJob]) -> None:
    """Raise `BadRequest` unless each job that runs after others of the list stands behind them: no circles."""
    if all(job.after is None for job in jobs):
        return
    places = {job.job_id: place for place, job in enumerate(jobs)}
    for place, job in enumerate(jobs):
        for after_id in job.after or ():
            if places.get(after_id, -1) >= place:
                raise BadRequest("after", f"must name jobs that stand before the job in the list: {after_id} does not")


async def aio_add_edges(connection: Any, edges: Mapping[UUID, Sequence[UUID]]) -> None:
    """Add the edges of jobs that were added in this transaction: (job, those it runs after) (asyncio-flavoured).

    Raises `BadRequest` with the first ids that no job has.
    """
    pairs = [(job_id, after_id) for job_id, after in edges.items() for after_id in after]
    if not pairs:
        return
    named = {after_id for _, after_id in pairs}
    unknown = [record["id"] for record in await connection.fetch(_UNKNOWN, sorted(named))]
    if unknown:
        first = ", ".join(map(str, unknown[:_NAMED])) + (" and others" if len(unknown) > _NAMED else "")
        raise BadRequest("after", f"must be the ids of jobs that exist; no job has the id {first}")
    await connection.execute(_ADD, *map(list, zip(*pairs, strict=True)))
