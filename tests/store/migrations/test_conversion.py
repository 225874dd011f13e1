"""Conversion of a database that a program from before the first release has migrated; removed with conversion.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from databases import raw_connection
from roles import a_role
from schema_catalog import schema_lines

from dataloader.jobs.errors import SchemaError
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.migrations import LATEST, check, conversion, function_set, migrate, migrations, render

pytestmark = pytest.mark.requirement("Q1")

FORMER = Path(__file__).parents[2] / "data" / "before_first_release.sql"
ROWS = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, token)
SELECT gen_random_uuid(), 'q', 't', 'k' || i, 'succeeded', i FROM generate_series(1, 9) AS i;
INSERT INTO dl_source_calls (source, at, n) VALUES ('s', now(), 3);
INSERT INTO dl_processes (type, process_id) VALUES ('pay', 'a');
"""
PARKED = """
INSERT INTO dl_tasks (task, limited, layout, declared_by) VALUES ('laned', true, 1, 'w');
INSERT INTO dl_lanes (lane) VALUES ('laned');
INSERT INTO dl_jobs (job_id, queue, task, lock_key, waits_for)
SELECT gen_random_uuid(), 'q', task, task, 'task' FROM unnest('{laned,plain}'::text[]) AS task;
"""
OF_ROWS = """
SELECT (SELECT jsonb_agg(j ORDER BY token) FROM dl_jobs j), (SELECT jsonb_agg(c) FROM dl_source_calls c),
       (SELECT jsonb_agg(p) FROM dl_processes p)
"""
LISTED = "SELECT number, name, oldest FROM dl_migrations ORDER BY number"
TOO_OLD = "too old for this version; stop all services and migrate it with the commit [0-9a-f]{7,} of dataloader first"


@pytest.fixture
async def former(empty_database):
    """Open our store and a raw connection on a database that the last program before the release has migrated."""
    await trio.to_thread.run_sync(empty_database.psql, FORMER.read_text() + ROWS)
    async with (
        raw_connection(empty_database.dsn) as raw,
        open_database(DatabaseOptions(dsn=empty_database.dsn)) as store,
    ):
        yield store, raw


def without_the_check_of_workers(lines):
    """Return the lines without the one difference: in a former table the check holds for rows written after it."""
    return {line.replace(" NOT VALID", "") if "dl_workers_shapes" in line else line for line in lines}


@pytest.mark.parametrize("by_script", [False, True], ids=["migrate", "script"])
async def test_a_former_database_gets_the_new_list_and_the_schema_of_a_new_one(former, empty_database, raw, by_script):
    store, converted = former
    rows = await converted.fetchrow(OF_ROWS)
    with pytest.raises(
        SchemaError, match=r"at 0063 with functions 52, from before the first release, .* run `dataloader m"
    ):
        await check(store)
    if by_script:
        await trio.to_thread.run_sync(empty_database.psql, render())
    else:
        new = [one for one in migrations() if one.number > conversion.CONVERTED_TO]
        tables = [one.full_name for one in new if one.is_transactional]
        others = [one.full_name for one in new if not one.is_transactional]
        functions = f"functions {function_set.NUMBER}"
        assert await migrate(store) == [conversion.NAME, *tables, functions, *others]
    assert await converted.fetch(LISTED) == await raw.fetch(LISTED)
    lines = without_the_check_of_workers(await schema_lines(converted))
    assert lines == without_the_check_of_workers(await schema_lines(raw))
    assert await converted.fetchrow(OF_ROWS) == rows
    await check(store)
    assert await migrate(store) == []


async def test_jobs_that_were_parked_for_their_unknown_task_are_ready_after_the_upgrade(former):
    store, converted = former
    await converted.execute(PARKED)
    await migrate(store)
    waiting = "SELECT task, waits_for, lane FROM dl_jobs WHERE status = 'queued' ORDER BY task"
    assert list(map(tuple, await converted.fetch(waiting))) == [("laned", "limit", "laned"), ("plain", None, None)]


async def test_a_database_without_the_last_former_files_is_refused_and_left_as_it_is(former, empty_database):
    store, old = former
    await old.execute(
        "DELETE FROM dl_migrations WHERE number >= 62; ALTER TABLE dl_history DROP COLUMN clock_jumped_at"
    )
    before = await schema_lines(old), await old.fetch(LISTED)
    for start in (migrate, check):
        with pytest.raises(SchemaError, match=f"^the database's schema is at 0061 .*, {TOO_OLD}$"):
            await start(store)
    with pytest.raises(AssertionError, match=TOO_OLD):
        await trio.to_thread.run_sync(empty_database.psql, render())
    assert (await schema_lines(old), await old.fetch(LISTED)) == before


async def test_a_program_from_before_the_first_release_refuses_a_converted_database(former, monkeypatch):
    """Otherwise it would apply its own files again. It also refuses if nothing except the conversion has happened."""
    store, converted = former
    await converted.execute(conversion.conversion_script(["NULL"]))
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(function_set, "NUMBER", 52)
            with pytest.raises(SchemaError, match="too new for this version"):
                await migrate(store)
        await migrate(store)
    assert await converted.fetchval("SELECT max(number) FROM dl_migrations") == LATEST


async def test_the_conversion_drops_no_function_of_another_role(former, empty_database):
    store, converted = former
    theirs = "CREATE FUNCTION public.dl_claim(int) RETURNS int LANGUAGE sql AS 'SELECT 1'"
    with a_role(empty_database, "GRANT CREATE ON SCHEMA public TO jobs_service") as role:
        async with raw_connection(role.dsn) as creator:
            await creator.execute(theirs)
        await migrate(store)
        assert await converted.fetchval(
            "SELECT array_agg(oid::regprocedure::text) FROM pg_proc WHERE proname = 'dl_claim'"
        ) == ["dl_claim(integer)"]
