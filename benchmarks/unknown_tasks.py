"""Cost of jobs of unknown tasks for a claim: skipped before it, and while they are moved into their limit queue.

    python benchmarks/unknown_tasks.py [--jobs 100000] [--json]

On an embedded PostgreSQL: a claim of 64 jobs in a queue without unknown jobs; with `--jobs` unknown ones before it,
from the front and from behind the last claim; the time to move them, without the pauses between the statements; and a
claim from the front after that, and after a vacuum. Each is the median of nine claims by wall-clock time. Figures of
different machines are not comparable.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import trio

from dataloader import embedded_postgres
from dataloader.store.connection.bridge import Database, open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.limits.unknown_blocks import file_block
from dataloader.store.migrations import migrate
from dataloader.store.queue.claim import Claim
from dataloader.store.queue.lock_session import LockSession

CLAIMED = 64
TIMES = 9
ADD = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, created_at)
SELECT gen_random_uuid(), $1, $2, n::text, false, now() - make_interval(mins => $4) + make_interval(secs => n / 1000.0)
FROM generate_series(1, $3::int) AS n
"""


async def execute(database: Database, sql: str, *values: object) -> None:
    async def aio_execute(connection: Any) -> None:
        await connection.execute(sql, *values)

    await database.run(aio_execute)


async def median_ms(locks: LockSession, queue: str, *, behind: bool = False) -> tuple[float, Claim]:
    """Return the median time of some claims in milliseconds, and the last claim."""
    claim, times = await locks.claim(queue, CLAIMED, ["known"], 30), []
    for _ in range(TIMES):
        began = time.perf_counter()
        claim = await locks.claim(queue, CLAIMED, ["known"], 30, after=claim.last if behind else None)
        times.append((time.perf_counter() - began) * 1_000)
        assert len(claim.jobs) == CLAIMED
    return statistics.median(times), claim


async def measure(dsn: str, number: int) -> dict[str, float]:
    found: dict[str, float] = {}
    async with open_database(DatabaseOptions(dsn=dsn, statement_timeout_s=60)) as database:
        await migrate(database)
        await execute(database, "ALTER TABLE dl_jobs SET (autovacuum_enabled = off)")
        for queue in ("plain", "shared"):
            await execute(database, ADD, queue, "known", CLAIMED * (TIMES + 1) * 5, 10)
        await execute(database, ADD, "shared", "unknown", number, 60)
        await execute(database, "VACUUM ANALYZE dl_jobs")
        locks = LockSession(database, "benchmark", lost=lambda _tokens: None)
        for _ in range(2):  # until the plans are cached
            found["without unknown jobs, ms"], _ = await median_ms(locks, "plain")
        found["from the front, ms"], _ = await median_ms(locks, "shared")
        found["behind the last claim, ms"], _ = await median_ms(locks, "shared", behind=True)
        began, after, moved = time.perf_counter(), None, 0
        while (filed := await file_block(database, "shared", ["known"], after)).is_block:
            moved, after = moved + filed.jobs, filed.last
        found["moved, jobs"], found["moved in, s"] = moved, time.perf_counter() - began
        found["from the front after that, ms"], _ = await median_ms(locks, "shared")
        await execute(database, "VACUUM dl_jobs")
        found["from the front after a vacuum, ms"], _ = await median_ms(locks, "shared")
        await locks.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=100_000, help="jobs of an unknown task")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, embedded_postgres(Path(folder)) as server:
        found = trio.run(measure, server.dsn, asked.jobs)
    if asked.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:36} {value:10,.2f}")


if __name__ == "__main__":
    main()
