"""Restores of an older copy of our tables, in place and under running work, as from a backup.

The copy has the rows and the sequences. It is restored without triggers, so that no notification is sent.
"""

from __future__ import annotations

from typing import Any, Final

import asyncpg

TRIES: Final = 20

_TABLES = """
SELECT c.relname AS name,
       (SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '') AS columns
FROM pg_class c
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND c.relname LIKE 'dl\\_%'
  AND c.relname NOT IN ('dl_migrations', 'dl_function_sets', 'dl_workers', 'dl_tasks', 'dl_queues')
ORDER BY 1
"""
_SEQUENCES = """
SELECT quote_ident(sequencename) AS name FROM pg_sequences
WHERE schemaname = 'public' AND sequencename LIKE 'dl\\_%' ORDER BY 1
"""


class Backup:
    """Copy of all our tables, made on a connection; `restore` restores it. `number` distinguishes copies."""

    def __init__(self, number: int = 1) -> None:
        self.schema = f"backup_{number}"
        self.tables: list[Any] = []
        self.sequences: dict[str, tuple[int, bool]] = {}

    async def make(self, raw: Any) -> None:
        """Copy the current rows and sequences."""
        self.tables = await raw.fetch(_TABLES)
        await raw.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await raw.execute(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE; CREATE SCHEMA {self.schema}")
        for table in self.tables:
            name = table["name"]
            await raw.execute(f"CREATE TABLE {self.schema}.{name} AS SELECT {table['columns']} FROM {name}")
        await raw.execute("COMMIT")
        for row in await raw.fetch(_SEQUENCES):
            state = await raw.fetchrow(f"SELECT last_value, is_called FROM {row['name']}")
            self.sequences[row["name"]] = (state["last_value"], state["is_called"])

    async def restore(self, raw: Any) -> None:
        """Restore the copy, in one transaction."""
        script = ["BEGIN; SET LOCAL session_replication_role = replica; SET LOCAL lock_timeout = '20s'"]
        script.append(f"TRUNCATE {', '.join(table['name'] for table in self.tables)}")
        for table in self.tables:
            name, columns = table["name"], table["columns"]
            script.append(
                f"INSERT INTO {name} ({columns}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM {self.schema}.{name}"
            )
        for name, (last, is_called) in self.sequences.items():
            script.append(f"SELECT setval('{name}', {last}, {str(is_called).lower()})")
        for _ in range(TRIES):
            try:
                await raw.execute("; ".join([*script, "COMMIT"]))
            except (asyncpg.DeadlockDetectedError, asyncpg.LockNotAvailableError):
                await raw.execute("ROLLBACK")  # the workers have locked the tables in another order
            else:
                return
        raise AssertionError("the tables could not be locked")
