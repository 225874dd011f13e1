"""Search of the pages by a part of a name: queues, tasks, schedules, suppliers, loads, and processes by their ID."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from dataloader.jobs.text import listed_json
from dataloader.store.connection.bridge import Database

MOST_FOUND: Final = 8
"""Maximum number of names of each kind."""
_RUNS: Final = 500
_WITHIN: Final = "strpos(lower({0}), lower($1)) > 0"


def _names_like(kind: str, sql: str) -> str:
    shortest = f"ORDER BY length(name), name LIMIT {MOST_FOUND}"
    return f"(SELECT '{kind}' AS kind, name, NULL AS type FROM ({sql}) AS n {shortest})"


_PROCESSES: Final = f"""
(WITH RECURSIVE types AS (
   (SELECT type FROM dl_processes WHERE removed_at IS NULL ORDER BY type LIMIT 1)
   UNION ALL
   SELECT (SELECT p.type FROM dl_processes p WHERE p.removed_at IS NULL AND p.type > t.type ORDER BY p.type LIMIT 1)
   FROM types t WHERE t.type IS NOT NULL
 )
 SELECT 'process', p.process_id, p.type FROM types t CROSS JOIN LATERAL (
   SELECT type, process_id FROM dl_processes WHERE removed_at IS NULL AND type = t.type AND process_id = $1
 ) AS p LIMIT {MOST_FOUND})
"""
_KEYS: Final = """
(SELECT 'key', $1, NULL FROM dl_jobs WHERE hashtext(lock_key) = hashtext($1) AND lock_key = $1 AND keyed
   AND status IN ('queued', 'running') LIMIT 1)
"""
_PARTS: Final = (
    _names_like(
        "queue",
        "SELECT DISTINCT queue AS name FROM (SELECT q ->> 'queue' AS queue FROM dl_depths d"
        " CROSS JOIN LATERAL jsonb_array_elements(d.queues) AS q UNION ALL SELECT queue FROM dl_queues) AS q"
        f" WHERE {_WITHIN.format('queue')}",
    ),
    _names_like("task", f"SELECT task AS name FROM dl_tasks WHERE {_WITHIN.format('task')}"),
    _names_like("schedule", f"SELECT name FROM dl_schedules WHERE {_WITHIN.format('name')}"),
    _names_like("supplier", f"SELECT source AS name FROM dl_sources WHERE {_WITHIN.format('source')}"),
    _names_like(
        "load",
        "SELECT DISTINCT name FROM (SELECT name FROM dl_etl_runs ORDER BY started_at DESC, run_id DESC"
        f" LIMIT {_RUNS}) AS newest WHERE {_WITHIN.format('name')}",
    ),
    _PROCESSES,
    _KEYS,
)
_FIND: Final = f"SELECT coalesce(json_agg(f), '[]')::text FROM ({' UNION ALL '.join(_PARTS)}) AS f"


@attrs.frozen
class FoundName:
    """Name that has the searched text: its kind, and the type of a process."""

    kind: str
    name: str
    type: str | None = None


async def find_names(database: Database, text: str) -> Sequence[FoundName]:
    """Return the names with `text`, shortest first, and processes and held keys that equal it."""
    return listed_json(await database.run(_aio_find_names, text), FoundName)


async def _aio_find_names(connection: Any, text: str) -> str:
    async with connection.transaction(readonly=True):
        await connection.execute("SET LOCAL statement_timeout = 2000; SET LOCAL enable_sort = on")
        found: str = await connection.fetchval(_FIND, text)
    return found
