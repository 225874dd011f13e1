"""A job for its page: its row, its event history, and why it waits, by at most two statements."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.errors import JobNotFound
from dataloader.jobs.model import JobRecord
from dataloader.jobs.states import Status
from dataloader.jobs.text import listed_json
from dataloader.jobs.wait_reasons import WaitReason
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.attempts import JOURNAL, MOST_EVENTS, Journal, JournalLine
from dataloader.store.queue.reads import job_of, select_job
from dataloader.store.queue.why import FACTS, aio_reason


def _view(*texts: str) -> str:
    """Return the columns of the job, its event history as JSON, and then the facts about why it waits."""
    return f"""
SELECT job.*, (SELECT coalesce(json_agg(e), '[]') FROM ({JOURNAL}) AS e)::text AS journal, facts.*
FROM ({select_job(*texts)} WHERE job_id = $1) AS job CROSS JOIN LATERAL ({FACTS}) AS facts
"""


_WHOLE: Final = _view("args", "progress", "result", "previous")
_BRIEF: Final = _view("progress", "result")


@attrs.frozen
class JobView:
    """A job, its latest events, and why it waits, if it waits."""

    job: JobRecord
    journal: Journal
    why: WaitReason | None


async def read_job_view(database: Database, job_id: UUID, *, brief: bool = False) -> JobView:
    """Return the job without the state of its queue; with `brief`, without its args. Raises `JobNotFound`."""
    return await database.run(_aio_job_view, job_id, _BRIEF if brief else _WHOLE)


async def _aio_job_view(connection: Any, job_id: UUID, sql: str) -> JobView:
    record = await connection.fetchrow(sql, job_id)
    if record is None:
        raise JobNotFound(f"no job has the ID {job_id}")
    # Both parts of the row have columns with the same names.
    columns = list(zip(record.keys(), record.values(), strict=True))
    at, journal = next((place, value) for place, (name, value) in enumerate(columns) if name == "journal")
    job = job_of(dict(columns[:at]), {})
    lines = listed_json(journal, JournalLine)[::-1]
    why = await aio_reason(connection, dict(columns[at + 1 :])) if job.status is Status.QUEUED else None
    return JobView(job, Journal(lines, len(lines) < MOST_EVENTS), why)
