"""A lock on the jobs' table: a session that waits for it is not silent, and a waiting commit ends with its lease."""

from __future__ import annotations

import pytest
import trio
from conditions import until
from databases import raw_connection
from services import FAST, LEASE_S

pytestmark = pytest.mark.slow

HELD = "LOCK TABLE dl_jobs IN ACCESS EXCLUSIVE MODE"
WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE application_name LIKE '% ' || $1 AND wait_event_type = 'Lock' AND state = 'active'
"""
"""Number of sessions of role $1 that wait for a lock."""


@pytest.mark.requirement("Q8", "Q12")
async def test_a_table_lock_beyond_the_leases_ends_no_process_and_repeats_no_commit(
    serve, add, row_when, raw, ledger, database, tmp_path
):
    await raw.execute("CREATE TABLE target (job_id uuid, attempt int)")
    service = await serve({"q": 20}, poll_sec=0.2, **FAST)
    commits = tmp_path / "commit"
    committing = await add("commit", {"when": str(commits)}, lease_ttl_sec=LEASE_S)
    beside = [await add("visit", {"s": 2}, lease_ttl_sec=LEASE_S) for _ in range(10)]
    await until(ledger.visits, lambda visits: len(visits) == len(beside))
    async with raw_connection(database.dsn) as other:
        await other.execute(f"BEGIN; {HELD}")
        commits.touch()
        for role in ("locks", "transaction"):
            await until(lambda role=role: raw.fetchval(WAITING, role))
        # For the leases, and the grace of a handler that does not stop.
        await trio.sleep(LEASE_S + 2)
        assert service.process.poll() is None, service.lines[-1]
        await other.execute("ROLLBACK")
    for job_id in (committing, *beside):
        await row_when(job_id, "succeeded")
    assert await raw.fetchval("SELECT count(*) FROM target") == 1
    assert service.process.poll() is None
    assert await ledger.overlaps() == []
    critical = [line for line in service.lines if line["level"] in {"error", "critical"}]
    assert critical == []
