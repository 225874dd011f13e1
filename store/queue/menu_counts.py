"""Numbers beside the subjects of the pages' menu, read by one statement of bounded cost."""

from __future__ import annotations

from typing import Any, Final

import attrs

from dataloader.store.connection.bridge import Database
from dataloader.store.queue.overview import PROCESSES
from dataloader.store.queue.worker_rows import ALIVE_WITHIN_S

_ERRORS: Final = 1_000
_RUNS: Final = 200
_FRESH_S: Final = 300
_OPEN: Final = " + ".join(
    f"coalesce((q ->> '{name}')::bigint, 0)"
    for name in ("ready", "delayed", "blocked", "unknown_task", "dependent", "limited", "running")
)
# The count of jobs is the last one that a page has made: counting again could take seconds.
_COUNTS: Final = f"""
SELECT
  (SELECT sum({_OPEN})::bigint FROM dl_depths d CROSS JOIN LATERAL jsonb_array_elements(d.queues) AS q
   WHERE d.at > now() - interval '{_FRESH_S} s') AS jobs,
  (SELECT count(DISTINCT error_group)::int
   FROM (SELECT error_group, at, status FROM dl_errors ORDER BY error_id DESC LIMIT {_ERRORS}) AS newest
   WHERE at > now() - interval '1 hour' AND status IN ('failed', 'lost')) AS errors,
  (SELECT count(*)::int
   FROM (SELECT run_id FROM dl_etl_runs ORDER BY started_at DESC, run_id DESC LIMIT {_RUNS}) AS newest
   JOIN dl_jobs j ON j.job_id = newest.run_id AND j.status = 'running') AS runs,
  (SELECT sum(processes)::int FROM ({PROCESSES}) AS processes) AS processes,
  (SELECT count(*)::int FROM dl_workers WHERE seen_at > now() - make_interval(secs => {ALIVE_WITHIN_S})) AS workers
"""


@attrs.frozen
class MenuCounts:
    """Numbers of the menu; None if unknown.

    Attributes:
        jobs: jobs that have not ended, by a count of the last minutes.
        errors: kinds of errors of the last hour, among its last thousand.
        runs: running loads and flows, among the last 200.
        processes: durable processes, up to 10,000 of each status.
        workers: worker processes with a heartbeat.
    """

    jobs: int | None = None
    errors: int | None = None
    runs: int | None = None
    processes: int | None = None
    workers: int | None = None


async def read_menu_counts(database: Database) -> MenuCounts:
    """Read the numbers of the menu."""
    return await database.run(_aio_read_menu_counts)


async def _aio_read_menu_counts(connection: Any) -> MenuCounts:
    async with connection.transaction(readonly=True):
        await connection.execute("SET LOCAL statement_timeout = 1000; SET LOCAL enable_seqscan = on")
        return MenuCounts(**await connection.fetchrow(_COUNTS))
