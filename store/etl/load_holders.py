"""One run of a load at a time, however its runs are started: by a schedule, a trigger, `etl run`, or in a flow.

`dl_load_holders` names the run that holds a load. It holds the load while its job runs with its token. So a run that
was killed holds its loads until its job's lease has ended, and nothing else needs a lease. The commit of a segment
requires its run to be the holder, and locks that row: a run whose load has another holder commits nothing.

All functions are asyncio-flavored and run in the caller's transaction.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final
from uuid import UUID

from dataloader.jobs.errors import DataloaderError, LeaseLost

_ADD: Final = """
INSERT INTO dl_load_holders (load, run_id, token, since) VALUES ($1, $2, $3, clock_timestamp()) ON CONFLICT DO NOTHING
"""
# A separate statement: the next one must see claims that were committed while this one waited for the row.
_LOCK: Final = "SELECT run_id, token, since FROM dl_load_holders WHERE load = $1 FOR UPDATE"
_RUNS: Final = """
SELECT extract(epoch FROM clock_timestamp() - $3)::float8 AS held_s
FROM dl_jobs WHERE job_id = $1 AND (token = $2 AND status = 'running') IS TRUE
"""
_TAKE: Final = "UPDATE dl_load_holders SET run_id = $2, token = $3, since = clock_timestamp() WHERE load = $1"
_RELEASE: Final = "DELETE FROM dl_load_holders WHERE load = $1 AND run_id = $2 AND token = $3"
_FENCE: Final = """
SELECT FROM dl_jobs j JOIN dl_load_holders h ON h.run_id = j.job_id AND h.token = j.token
WHERE j.job_id = $1 AND (j.token = $2 AND j.status = 'running') IS TRUE AND h.load = $3
FOR NO KEY UPDATE OF j FOR SHARE OF h
"""


class LoadIsHeld(DataloaderError):  # noqa: N818 - says what the load is
    """Error: another run, `run_id`, has held the load since `since`, for `held_s` seconds by now."""

    def __init__(self, load: str, run_id: UUID, since: datetime, held_s: float) -> None:
        """Name the load, and the run that holds it."""
        super().__init__(
            f"the run {run_id} of the load {load} has not ended; it started at {since:%Y-%m-%d %H:%M:%S} UTC"
        )
        self.load = load
        self.run_id = run_id
        self.since = since
        self.held_s = held_s


async def aio_hold_load(connection: Any, load: str, run_id: UUID, token: int) -> None:
    """Make the run the holder of the load. Raises `LoadIsHeld` if another run holds it."""
    holder = None
    while holder is None:  # the holder may release the load between the two statements
        await connection.execute(_ADD, load, run_id, token)
        holder = await connection.fetchrow(_LOCK, load)
    if (holder["run_id"], holder["token"]) == (run_id, token):
        return
    running = await connection.fetchrow(_RUNS, holder["run_id"], holder["token"], holder["since"])
    if running is not None:
        raise LoadIsHeld(load, holder["run_id"], holder["since"], running["held_s"])
    await connection.execute(_TAKE, load, run_id, token)


async def aio_release_load(connection: Any, load: str, run_id: UUID, token: int) -> None:
    """Release the load for other runs, if the run holds it."""
    await connection.execute(_RELEASE, load, run_id, token)


async def aio_fence_load(connection: Any, load: str, run_id: UUID, token: int) -> None:
    """Fence a commit to the load's table; this is the last statement of its transaction.

    Raises `LeaseLost` unless the job still belongs to this worker and its run holds the load.
    """
    if await connection.fetchrow(_FENCE, run_id, token, load) is None:
        raise LeaseLost(
            f"another worker has job {run_id}, or another run holds the load {load}: the write was rolled back"
        )
