"""A search for processes reads the rows of a page, whatever the number of processes."""

from __future__ import annotations

import re

import pytest
import trio
from watched_database import WatchedDatabase

from dataloader.jobs.process_listings import ProcessFilter
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.processes import search

pytestmark = [pytest.mark.slow, pytest.mark.requirement("P2")]

MANY = """
INSERT INTO dl_processes (type, process_id, status, error_group, metadata)
  SELECT 't' || i % 3, 'p' || i, CASE WHEN i % 100 = 0 THEN 'error' ELSE 'running' END,
         CASE WHEN i % 100 = 0 THEN i % 7 END, jsonb_build_object('n', i, 'all', true, 'first', i < 100)
  FROM generate_series(1, 20000) AS i;
ANALYZE dl_processes;
"""


SEARCHES = [
    ({}, "dl_processes_pkey", 10),
    ({"type": "t1"}, "ix_dl_processes_status", 10),
    ({"status": "init"}, "ix_dl_processes_status", 0),
    ({"status": "error"}, "ix_dl_processes_status", 10),
    ({"error_group": "0000000000000003"}, "ix_dl_processes_error", 10),
    ({"metadata": {"n": 17}}, "ix_dl_processes_metadata", 1),
    ({"metadata": {"all": True}}, "dl_processes_pkey", 10),
    ({"metadata": {"first": True}, "type": "t1"}, "ix_dl_processes_metadata", 10),
    ({"metadata": {"all": True}, "type": "t1", "status": "error"}, "dl_processes_pkey", 10),
    ({"metadata": {"all": True}, "error_group": "0000000000000003"}, "dl_processes_pkey", 10),
    ({"metadata": {"n": 77}, "process_id": "p77"}, "dl_processes_pkey", 1),
    ({"process_id": "p77"}, "ux_dl_processes_id", 1),
]


async def test_each_process_search_uses_its_index(database):
    plans = []

    async def aio_explain(connection, sql, *values):
        if sql.lstrip().startswith(("SELECT", "WITH")):
            rows = await connection.fetch(f"EXPLAIN (ANALYZE, TIMING OFF) {sql}", *values)
            plans.append("\n".join(row[0] for row in rows))

    await trio.to_thread.run_sync(database.psql, MANY)
    async with open_database(DatabaseOptions(dsn=database.dsn)) as opened:
        for criteria, index, found in SEARCHES:
            plans.clear()
            page = await search.find_processes(
                WatchedDatabase(opened, before=aio_explain), ProcessFilter(**criteria), limit=10
            )
            assert (criteria, len(page.processes)) == (criteria, found)
            assert (criteria, index in plans[-1]) == (criteria, True)
            # The index of the numbers is scanned only for the newest processes without other criteria.
            assert (criteria, "dl_processes_pkey" in plans[-1]) == (criteria, index == "dl_processes_pkey")
            assert "Seq Scan on dl_processes" not in "".join(plans)
            if criteria == {"metadata": {"all": True}}:
                # It stops when it has found enough, of the 5,000 that it may read.
                assert re.search(r"dl_processes_pkey on dl_processes p +\(.*rows=11\.?0* loops=1\)", plans[-1])
