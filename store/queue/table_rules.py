"""Retention of rows in our own tables (R4, S6) that grow and are not deleted together with a job.

docs/retention.md has a table with the rule, or the reason for its absence, for each of our tables; a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dataloader.store.connection.bridge import Database
from dataloader.store.connection.command_tag import row_count

# Deletes the oldest rows of a table whose numbers grow with time, so that no index by time is needed.
_NUMBERED: Final = """
DELETE FROM {table} WHERE {number} = ANY (ARRAY(
  SELECT {number} FROM (SELECT {number}, {at} AS at FROM {table} ORDER BY {number} LIMIT $2) AS oldest
  WHERE at < now() - make_interval(days => $1)))
"""

BY_DAYS: Final[Mapping[str, str]] = {
    "dl_audit": _NUMBERED.format(table="dl_audit", number="audit_id", at="ts"),
    "dl_errors": _NUMBERED.format(table="dl_errors", number="error_id", at="at"),
    "dl_schedule_events": _NUMBERED.format(table="dl_schedule_events", number="event_id", at="at"),
    "dl_bulk": """
        DELETE FROM dl_bulk WHERE bulk_id = ANY (ARRAY(
          SELECT bulk_id FROM (SELECT bulk_id, ended_at FROM dl_bulk ORDER BY created_at, bulk_id LIMIT $2) AS oldest
          WHERE ended_at < now() - make_interval(days => $1)))
        """,
    # A day is deleted only when its last hour is old enough.
    "dl_run_stats": """
        WITH days AS (
          DELETE FROM dl_run_stats_days WHERE (day, queue, task, outcome) IN (
            SELECT day, queue, task, outcome FROM dl_run_stats_days WHERE day < now() - make_interval(days => $1 + 1)
            ORDER BY day, queue, task, outcome LIMIT $2)
        )
        DELETE FROM dl_run_stats WHERE (hour, queue, task, outcome) IN (
          SELECT hour, queue, task, outcome FROM dl_run_stats WHERE hour < now() - make_interval(days => $1)
          ORDER BY hour, queue, task, outcome LIMIT $2)
        """,
}
"""For each table, the statement that deletes up to $2 rows older than $1 days; a setting has the days."""

_OF_REMOVED: Final = """
DELETE FROM {table} WHERE ctid = ANY (ARRAY(
  SELECT r.ctid FROM (
    SELECT key FROM dl_processes p WHERE removed_at < now() - interval '1 day'
      AND NOT EXISTS (SELECT FROM dl_process_outbox o WHERE o.key = p.key)
    ORDER BY removed_at LIMIT 1000) AS p
  CROSS JOIN LATERAL (SELECT ctid FROM {table} WHERE key = p.key LIMIT 1000) AS r LIMIT 1000))
"""
ALWAYS: Final[Mapping[str, str]] = {
    "dl_workers": "DELETE FROM dl_workers WHERE seen_at < now() - interval '1 day'",
    "dl_ended_sessions": """
        DELETE FROM dl_ended_sessions WHERE session = ANY (ARRAY(
          SELECT session FROM dl_ended_sessions WHERE until < now() LIMIT 1000))
        """,
    # Jobs of a bulk operation that was stopped or failed.
    "dl_bulk_jobs": """
        DELETE FROM dl_bulk_jobs WHERE ctid = ANY (ARRAY(
          SELECT f.ctid FROM dl_bulk b CROSS JOIN LATERAL (
            SELECT ctid FROM dl_bulk_jobs WHERE bulk_id = b.bulk_id LIMIT 5000
          ) AS f WHERE b.ended_at IS NOT NULL LIMIT 5000))
        """,
    # No process notifies any more: there have been no targets since.
    "dl_notices": """
        DELETE FROM dl_notices WHERE notice_id = ANY (ARRAY(
          SELECT notice_id FROM (SELECT notice_id, at FROM dl_notices ORDER BY notice_id LIMIT 1000) AS oldest
          WHERE at < now() - interval '7 days'))
        """,
    # Nothing has failed in this way since, so a new notification would not be a repetition.
    "dl_notice_groups": """
        DELETE FROM dl_notice_groups WHERE last_at < now() - interval '7 days'
        """,
    # The longest span of a rate limit is a week. Requests to a supplier delete the rows that its rate limits need no
    # more.
    "dl_source_calls": """
        DELETE FROM dl_source_calls WHERE ctid = ANY (ARRAY(
          SELECT c.ctid FROM dl_sources s CROSS JOIN LATERAL (
            SELECT ctid FROM dl_source_calls WHERE source = s.source AND at < now() - interval '8 days' LIMIT 1000
          ) AS c LIMIT 1000))
        """,
    # Deliveries to sinks that are no longer configured, and rows of held-up deliveries that hold up nothing.
    "dl_process_outbox": """
        DELETE FROM dl_process_outbox WHERE id = ANY (ARRAY(
          SELECT o.id FROM dl_process_sinks s CROSS JOIN LATERAL (
            SELECT id FROM dl_process_outbox WHERE sink = s.sink LIMIT 1000
          ) AS o WHERE s.until < now() - interval '7 days' LIMIT 1000))
        """,
    "dl_process_holdups": """
        DELETE FROM dl_process_holdups WHERE (sink, key) IN (
          SELECT h.sink, h.key FROM dl_process_holdups h
          WHERE h.since < now() - interval '1 day'
            AND NOT EXISTS (SELECT FROM dl_process_outbox o WHERE o.key = h.key AND o.sink = h.sink) LIMIT 1000)
        """,
    "dl_process_sinks": """
        DELETE FROM dl_process_sinks s WHERE s.until < now() - interval '7 days'
          AND NOT EXISTS (SELECT FROM dl_process_outbox o WHERE o.sink = s.sink AND NOT o.held_up)
          AND NOT EXISTS (SELECT FROM dl_process_outbox o WHERE o.sink = s.sink AND o.held_up)
        """,
    "dl_process_partitions": """
        DELETE FROM dl_process_partitions p WHERE p.sink <> 'messages' AND p.job_id IS NULL
          AND NOT EXISTS (SELECT FROM dl_process_sinks s WHERE s.sink = p.sink)
        """,
    # Idempotency keys are forgotten a day after the removal of a process. The rows of a process are deleted before it,
    # once all its deliveries have been made.
    "dl_process_events": _OF_REMOVED.format(table="dl_process_events"),
    "dl_process_tasks": _OF_REMOVED.format(table="dl_process_tasks"),
    "dl_processes": """
        DELETE FROM dl_processes WHERE key = ANY (ARRAY(
          SELECT p.key FROM dl_processes p WHERE p.removed_at < now() - interval '1 day'
            AND NOT EXISTS (SELECT FROM dl_process_events e WHERE e.key = p.key)
            AND NOT EXISTS (SELECT FROM dl_process_tasks t WHERE t.key = p.key)
            AND NOT EXISTS (SELECT FROM dl_process_outbox o WHERE o.key = p.key)
          ORDER BY p.removed_at LIMIT 1000))
        """,
}
"""For each table, the statement that deletes rows that are no longer read."""


async def prune_tables(database: Database, days: Mapping[str, int], *, batch: int = 1_000) -> int:
    """Delete one batch of old rows of each table in `BY_DAYS` and `ALWAYS`; return the number of deleted rows.

    Args:
        database: the database.
        days: for each table, the days after which its rows are deleted; 0, or no entry, keeps them forever.
        batch: maximum number of rows of a table.
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
