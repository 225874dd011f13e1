"""The queue of a key is read by its indexes, whatever the number of jobs."""

from __future__ import annotations

import json

import pytest

from dataloader.store.queue.key_lines import _ROWS, key_line

pytestmark = [pytest.mark.slow, pytest.mark.requirement("E11")]


def nodes_of(plan):
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes_of(part)


async def test_a_line_is_found_among_many_jobs_without_a_look_at_the_others(store, raw):
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, finished_at, waits_for)"
        " SELECT gen_random_uuid(), 'q', 't', 'k' || i % 5000,"
        " (ARRAY['queued', 'running', 'succeeded', 'failed'])[1 + i / 10 % 4]::dl_status,"
        " CASE WHEN i / 10 % 4 > 1 THEN now() END, CASE WHEN i / 10 % 4 = 0 THEN 'lock' END"
        " FROM generate_series(1, 20000) AS i"
    )
    await raw.execute("ANALYZE dl_jobs")
    explained = await raw.fetchval(f"EXPLAIN (ANALYZE, FORMAT json) {_ROWS.replace('$1', chr(39) + 'k7' + chr(39))}")
    nodes = list(nodes_of(json.loads(explained)[0]["Plan"]))
    assert not [node for node in nodes if node["Node Type"] == "Seq Scan"], nodes
    assert sum(node.get("Rows Removed by Filter", 0) for node in nodes) < 20, nodes
    line = await key_line(store, "k7")
    assert len(line.holders) + len(line.waiting) + len(line.ended) == 4
