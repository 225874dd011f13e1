"""The cost of reads for pages does not depend on the number of processes, or on the length of their histories (E11)."""

from __future__ import annotations

import json

import pytest

from dataloader.jobs.process_listings import ProcessFilter
from dataloader.store.connection.bridge import Session
from dataloader.store.processes import process_rows, process_story
from dataloader.store.queue import overview

pytestmark = [pytest.mark.requirement("E11"), pytest.mark.slow]

MANY = """
INSERT INTO dl_processes (type, process_id, status, metadata, last_event_id, detail, error_group)
  SELECT 'pay ' || i % 3, 'p' || i, CASE WHEN i % 10 = 0 THEN 'error' ELSE 'running' END,
         jsonb_build_object('n', i), 2, 'odd', i % 10
  FROM generate_series(1, 30000) AS i;
INSERT INTO dl_process_tasks (task_id, key, type, kind, status, finished_at)
  SELECT key, key, type, 'init', 'finished', now() FROM dl_processes;
INSERT INTO dl_process_events (key, event_id, task_id, payload) SELECT key, n, key, '1'
  FROM dl_processes, generate_series(1, 2) AS n;
-- One has lived for long, and many wait for it.
INSERT INTO dl_processes (type, process_id, status, last_event_id) VALUES ('pay 0', 'old', 'running', 40000);
INSERT INTO dl_process_tasks (task_id, key, type, kind, status, finished_at)
  SELECT 1000000 + i, (SELECT max(key) FROM dl_processes), 'pay 0', 'call', 'finished', now() + make_interval(secs => i)
  FROM generate_series(1, 20000) AS i;
INSERT INTO dl_process_events (key, event_id, task_id, at, payload)
  SELECT t.key, 2 * (t.task_id - 1000000) + n - 1, t.task_id, t.finished_at, to_jsonb(t.task_id)
  FROM dl_process_tasks t, generate_series(0, 1) AS n WHERE t.task_id > 1000000;
INSERT INTO dl_process_tasks (task_id, key, type, kind) SELECT 2000000 + i, (SELECT max(key) FROM dl_processes), 'pay 0', 'call'
  FROM generate_series(1, 3000) AS i;
"""  # noqa: E501 - a statement's line
TABLES = ("dl_processes", "dl_process_tasks", "dl_process_events")


def literal(value):
    """Return a value as SQL text."""
    if isinstance(value, list):
        value = f"{{{','.join(map(str, value))}}}"
    return "'" + str(value).replace("'", "''") + "'"


class Explaining:
    """Connection that explains each statement before it runs it, and records all buffers and scanned indexes."""

    def __init__(self, connection):
        self.connection, self.blocks, self.scanned = connection, 0, []

    def transaction(self, **options):
        return self.connection.transaction(**options)

    async def execute(self, sql):
        await self.connection.execute(sql)

    async def fetch(self, sql, *args):
        # As a session that has run it often: with a generic plan, unless the statement requires one for its values.
        [mode] = await self.connection.fetch("SHOW plan_cache_mode")
        if mode[0] == "auto":
            await self.connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        await self.connection.execute(f"PREPARE measured AS {sql}")
        values = f"({', '.join(map(literal, args))})" if args else ""
        text = await self.connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE measured{values}")
        await self.connection.execute("DEALLOCATE measured")
        plan = json.loads(text)[0]["Plan"]
        self.blocks += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        self._note(plan)
        return await self.connection.fetch(sql, *args)

    async def fetchrow(self, sql, *args):
        return next(iter(await self.fetch(sql, *args)), None)

    async def fetchval(self, sql, *args):
        return (await self.fetchrow(sql, *args))[0]

    def _note(self, plan):
        if plan["Node Type"] == "Seq Scan":
            self.scanned.append(plan.get("Relation Name"))
        for part in plan.get("Plans", ()):
            self._note(part)


async def test_pages_of_processes_read_little_of_thirty_thousand_and_of_a_long_life(store, raw):
    await raw.execute(MANY)
    for table in TABLES:
        await raw.execute(f"VACUUM ANALYZE {table}")
    session = Session(store, "page plans")

    async def taken(read, *args, **options):
        found = {}

        async def explained(connection):
            explaining = Explaining(connection)
            found["result"] = await read(explaining, *args, **options)
            found["blocks"] = explaining.blocks
            assert not {*explaining.scanned} & {*TABLES}, explaining.scanned

        await session.run(explained)
        return found["result"], found["blocks"]

    newest = 2**63 - 1
    filters = {
        "all": ({}, 600), "type": ({"type": "pay 1"}, 600), "status": ({"status": "init"}, 100),
        "error": ({"status": "error"}, 700), "group": ({"type": "pay 0", "error_group": "0000000000000000"}, 500),
        "id": ({"process_id": "p77"}, 100),
    }  # fmt: skip
    for name, (criteria, most) in filters.items():
        (rows, _), blocks = await taken(
            process_rows._aio_list_process_rows, ProcessFilter(**criteria), 50, newest, count=False
        )
        assert (name, blocks <= most, blocks) == (name, True, blocks)
        assert len(rows) == {"status": 0, "id": 1}.get(name, 51)
    (row, tasks), blocks = await taken(process_story._aio_story, "pay 0", "old", newest, 26, is_first=True)
    assert blocks < 3_500, blocks  # 1,000 waiting calls are counted, 3,000 are skipped
    story = process_story._story_of(row, tasks, 25)
    assert (story.waiting, len(story.open), len(story.ended)) == (1_000, 10, 25)
    # Each task has its own events, whose position is found by binary search.
    for task in story.ended:
        number = 2 * (task.task_id - 1_000_000) - 1
        assert [event.event_id for event in task.events] == [number, number + 1]
        assert {event.payload.value for event in task.events} == {task.task_id}
    (_, older), blocks = await taken(process_story._aio_story, "pay 0", "old", 1_005_000, 26, is_first=False)
    assert ({task["task_id"] for task in older}, blocks < 3_500) == ({*range(1_004_974, 1_005_000)}, True)
    (row, tasks), blocks = await taken(process_story._aio_story, "pay 1", "p1", newest, 26, is_first=True)
    assert (len(tasks), blocks < 60) == (1, True), blocks
    _, blocks = await taken(overview._aio_overview)
    assert blocks < 1_500, blocks
    await session.close()
