"""Primary keys: a publication for all tables makes UPDATE and DELETE fail on a table without one."""

from __future__ import annotations

import pytest
import trio
from databases import raw_connection

from dataloader.store import migrations as module
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.migrations import migrate, migrations, render

pytestmark = pytest.mark.requirement("Q1")

WITHOUT_KEY = """
SELECT c.relname FROM pg_class c
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p')
  AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indisvalid)
ORDER BY 1
"""
CALLS = "SELECT n, cost, at FROM dl_source_calls WHERE source = 's' ORDER BY n"
PUBLISH = "CREATE PUBLICATION everything FOR ALL TABLES"


@pytest.fixture
def before_the_keys(monkeypatch):
    """Migrates as the release before did."""

    async def before_the_keys(store):
        with monkeypatch.context() as patch:
            patch.setattr(module, "migrations", lambda: [one for one in migrations() if one.number < 52])
            await migrate(store)

    return before_the_keys


async def test_every_table_has_a_primary_key(raw):
    assert [row["relname"] for row in await raw.fetch(WITHOUT_KEY)] == []


@pytest.mark.slow
@pytest.mark.parametrize("by_script", [False, True], ids=["migrate", "script"])
async def test_tables_with_repeated_calls_get_keys_also_in_a_published_database(
    empty_database, before_the_keys, by_script
):
    async with (
        raw_connection(empty_database.dsn) as raw,
        open_database(DatabaseOptions(dsn=empty_database.dsn)) as store,
    ):
        await before_the_keys(store)
        await raw.execute("INSERT INTO dl_sources (source, last_n) VALUES ('s', 9)")
        # Three from before calls had numbers.
        await raw.execute(
            "INSERT INTO dl_source_calls (source, at, n, cost)"
            " SELECT 's', to_timestamp(i), 0, 1 FROM generate_series(1, 3) AS i"
        )
        await raw.execute("INSERT INTO dl_source_calls (source, at, n, cost) VALUES ('s', to_timestamp(4), 9, 6)")
        await raw.execute(PUBLISH)
        assert len(await raw.fetch(WITHOUT_KEY)) == 3
        for _ in range(2):
            if by_script:
                await trio.to_thread.run_sync(empty_database.psql, render())
            else:
                await migrate(store)
        assert await raw.fetch(WITHOUT_KEY) == []
        assert [(row["n"], row["cost"], row["at"].timestamp()) for row in await raw.fetch(CALLS)] == [
            (0, 3, 3),
            (9, 6, 4),
        ]
        await raw.execute("SELECT dl_take_units('s', 2, 60)")
        assert (await raw.fetch(CALLS))[-1]["n"] == 11
        await raw.execute("DELETE FROM dl_source_calls; DELETE FROM dl_run_stats_new; DELETE FROM dl_etl_details")
        identities = "SELECT DISTINCT relreplident FROM pg_class WHERE oid = 'dl_source_calls'::regclass"
        assert await raw.fetchval(identities) == b"d"


async def test_an_older_program_writes_rows_without_naming_their_keys(raw):
    for _ in range(2):
        await raw.execute(
            "INSERT INTO dl_run_stats_new (queue, task, outcome, runs, total_s, max_s)"
            " VALUES ('q', 't', 'failed', 1, 1, 1)"
        )
    assert await raw.fetchval("SELECT count(DISTINCT row_id) FROM dl_run_stats_new") == 2
