"""The cost of gauges of processes does not depend on their number (P8)."""

from __future__ import annotations

import json

import pytest

from dataloader.store.processes.counting import EXACT
from dataloader.store.processes.gauges import CALLS, read_gauges
from dataloader.store.processes.versions import MOST_VERSIONS, STATEMENT, list_versions

pytestmark = [pytest.mark.slow, pytest.mark.requirement("P8")]
FILL = """
INSERT INTO dl_processes (type, process_id, status)
  SELECT 'many', i::text, 'running' FROM generate_series(1, 30000) AS i;
INSERT INTO dl_processes (type, process_id, status, running_task)
  VALUES ('few', '1', 'error', NULL), ('few', '2', 'init', 1000007);
INSERT INTO dl_process_tasks (task_id, key, type, kind, status, created_at)
  SELECT i, key, 'few', 'call', 'waiting', now() - (i - 1000000) * interval '1 min'
  FROM generate_series(1000006, 1000008) AS i, dl_processes WHERE type = 'few' AND process_id = '2';
INSERT INTO dl_process_tasks (key, type, kind, status)
  SELECT key, 'many', 'call', 'finished' FROM dl_processes WHERE type = 'many';
INSERT INTO dl_process_sinks VALUES ('books', NULL, '{event}', now());
INSERT INTO dl_process_outbox (sink, partition, key, kind, at)
  SELECT 'books', i % 16, 1, 'event', now() - (12000 - i) * interval '1 s' FROM generate_series(1, 12000) AS i;
INSERT INTO dl_process_holdups (sink, key, partition, tries, error) VALUES ('books', 1, 1, 3, 'away');
VACUUM ANALYZE dl_processes, dl_process_tasks, dl_process_outbox;
"""


async def rows_read(raw, query):
    """Return the number of rows that the plan's scans have read."""
    text = await raw.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {query}")

    def scans(node):
        own = node["Actual Rows"] * node["Actual Loops"] if "Relation Name" in node else 0
        removed = node.get("Rows Removed by Filter", 0) * node["Actual Loops"]
        return own + removed + sum(map(scans, node.get("Plans", ())))

    return scans(json.loads(text)[0]["Plan"])


async def test_process_gauges_count_up_to_a_bound_and_estimate_beyond_it(store, raw):
    for statement in FILL.split(";\n"):
        if statement.strip():
            await raw.execute(statement)
    found = await read_gauges(store)
    assert {name: count for name, count in found.processes.items() if name[0] == "few"} == {
        ("few", 1, "init"): 1, ("few", 1, "running"): 0, ("few", 1, "error"): 1,
    }  # fmt: skip
    assert 25_000 < found.processes["many", 1, "running"] < 35_000
    [calls] = found.calls
    assert (calls.type, calls.waiting) == ("few", 2)
    assert calls.oldest_at == await raw.fetchval("SELECT min(created_at) FROM dl_process_tasks WHERE task_id = 1000008")
    [sink] = found.sinks
    assert (sink.sink, sink.held_up, sink.held) == ("books", 1, 1)
    assert 9_000 < sink.waiting < 15_000
    assert sink.oldest_at == await raw.fetchval("SELECT min(at) FROM dl_process_outbox WHERE id = 1")
    await raw.execute("SET enable_seqscan = off")
    assert await rows_read(raw, STATEMENT.replace("$1", "NULL")) <= EXACT + 100
    assert await rows_read(raw, CALLS) <= 100


async def test_versions_are_bounded_whatever_another_program_says_it_serves(store, raw):
    await raw.execute("INSERT INTO dl_processes (type, process_id, status) VALUES ('zz', '1', 'running')")
    await raw.execute(
        "INSERT INTO dl_process_types (type, version, served_until)"
        " SELECT type, n - 100, 'infinity' FROM unnest(ARRAY['', 'a', repeat('x', 10000)]) AS type,"
        " generate_series(1, 300) AS n"
    )
    found = await list_versions(store)
    assert len(found) == MOST_VERSIONS + 1
    assert [(one.type, one.running) for one in found if one.type != "a"] == [("zz", 1)]
    assert len(await list_versions(store, "a")) == MOST_VERSIONS
    assert len((await read_gauges(store)).processes) == 3 * (MOST_VERSIONS + 1)
