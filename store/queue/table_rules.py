"""Which rows of our own tables go when (R4, S6): the tables that grow and that no deleted job takes with it.

docs/operations.md has a table with a rule, or the reason why there is none, for each of our tables; a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dataloader.store.connection.bridge import Database
from dataloader.store.connection.command_tag import row_count

# The oldest rows of a table whose numbers grow with time: no index by time is needed.
_NUMBERED: Final = """
DELETE FROM {table} WHERE {number} = ANY (ARRAY(
  SELECT {number} FROM (SELECT {number}, {at} AS at FROM {table} ORDER BY {number} LIMIT $2) AS oldest
  WHERE at < now() - make_interval(days => $1)))
"""

BY_DAYS: Final[Mapping[str, str]] = {
    "dl_audit": _NUMBERED.format(table="dl_audit", number="audit_id", at="ts"),
    "dl_errors": _NUMBERED.format(table="dl_errors", number="error_id", at="at"),
    "dl_schedule_events": _NUMBERED.format(table="dl_schedule_events", number="event_id", at="at"),
    "dl_run_stats": """
        DELETE FROM dl_run_stats WHERE (hour, queue, task, outcome) IN (
          SELECT hour, queue, task, outcome FROM dl_run_stats WHERE hour < now() - make_interval(days => $1)
          ORDER BY hour, queue, task, outcome LIMIT $2)
        """,
}
"""By table, the statement that deletes up to $2 rows older than $1 days, which a setting says."""

ALWAYS: Final[Mapping[str, str]] = {
    "dl_workers": "DELETE FROM dl_workers WHERE seen_at < now() - interval '1 day'",
    # Nobody tells any more: there have been no targets since.
    "dl_notices": """
        DELETE FROM dl_notices WHERE notice_id = ANY (ARRAY(
          SELECT notice_id FROM (SELECT notice_id, at FROM dl_notices ORDER BY notice_id LIMIT 1000) AS oldest
          WHERE at < now() - interval '7 days'))
        """,
    # Nothing has failed in this way since: to be told of it anew is no repetition.
    "dl_notice_groups": """
        DELETE FROM dl_notice_groups WHERE last_at < now() - interval '7 days'
        """,
    # The longest span of a budget is a week. A supplier's own requests delete what their budgets need no more.
    "dl_source_calls": """
        DELETE FROM dl_source_calls WHERE ctid = ANY (ARRAY(
          SELECT c.ctid FROM dl_sources s CROSS JOIN LATERAL (
            SELECT ctid FROM dl_source_calls WHERE source = s.source AND at < now() - interval '8 days' LIMIT 1000
          ) AS c LIMIT 1000))
        """,
}
"""By table, the statement that deletes what nobody reads any more."""


async def prune_tables(database: Database, days: Mapping[str, int], *, batch: int = 1_000) -> int:
    """Delete one batch of old rows of each table in `BY_DAYS` and `ALWAYS`; how many rows went comes back.

    Args:
        database: where.
        days: by table, after how many days its rows go; 0, or no entry, keeps them for ever.
        batch: how many rows of a table go at most.
    """
    return await database.write(_aio_prune_tables, days, batch)


async def _aio_prune_tables(connection: Any, days: Mapping[str, int], batch: int) -> int:
    tags = [
        await connection.execute(statement, days[table], batch)
        for table, statement in BY_DAYS.items()
        if days.get(table, 0) > 0
    ]
    tags += [await connection.execute(statement) for statement in ALWAYS.values()]
    return sum(map(row_count, tags))
