"""The functions and triggers as one set under a number, whatever a database had before."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import trio
from databases import raw_connection
from roles import a_role

from dataloader.jobs.errors import SchemaError
from dataloader.store.connection.bridge import DatabaseOptions, open_database
from dataloader.store.migrations import check, function_set, migrate, migrations, render

pytestmark = pytest.mark.requirement("Q1")

HASHES = Path(__file__).with_name("schema_hashes.json")
OURS = "SELECT oid, proacl FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND proname LIKE 'dl\\_%'"
SCHEMA = f"""
SELECT pg_get_functiondef(oid) || proacl::text FROM ({OURS}) AS ours
UNION ALL
SELECT pg_get_triggerdef(oid) || obj_description(oid, 'pg_trigger') FROM pg_trigger
WHERE tgrelid = 'dl_jobs'::regclass AND NOT tgisinternal
ORDER BY 1
"""
OF_TABLES = """
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO jobs_service;
GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO jobs_service;
"""
EXECUTED_BY = f"""
SELECT proname, prorettype = 'trigger'::regtype AS is_trigger FROM pg_proc JOIN ({OURS}) AS ours USING (oid)
WHERE has_function_privilege($1::text, oid, 'EXECUTE') ORDER BY proname
"""
CHANGED = "CREATE OR REPLACE FUNCTION dl_release(p_hashes int[]) RETURNS int LANGUAGE sql AS 'SELECT 4711'"
RELEASE = "SELECT dl_release('{}')"


@pytest.mark.slow
async def test_a_database_from_before_the_set_gets_it_and_is_then_as_a_new_one(store_at_0007, empty_database, raw):
    async with raw_connection(empty_database.dsn) as former:
        assert len(await former.fetch(OURS)) == 11
        with pytest.raises(
            SchemaError, match=r"at 0007 with functions 0, this version needs .*; run `dataloader migrate`"
        ):
            await check(store_at_0007)
        assert f"functions {function_set.NUMBER}" in await migrate(store_at_0007)
        assert await former.fetch(SCHEMA) == await raw.fetch(SCHEMA)
        await check(store_at_0007)
        assert await migrate(store_at_0007) == []


@pytest.mark.slow
async def test_who_worked_by_the_right_of_everybody_to_execute_keeps_it_and_nobody_else_does(
    store_at_0007, empty_database
):
    """A service of the release before goes on while the owner migrates; its page granted tables and sequences alone."""
    with (
        a_role(empty_database, OF_TABLES) as service,
        a_role(empty_database, "GRANT SELECT, INSERT, DELETE ON dl_jobs TO jobs_service") as foreign,
    ):
        async with raw_connection(empty_database.dsn) as owner, raw_connection(service.dsn) as replica:
            before = await owner.fetch(EXECUTED_BY, service.name)
            assert await owner.fetch(EXECUTED_BY, foreign.name) == before
            await migrate(store_at_0007)
            kept = {one["proname"] for one in before if not one["is_trigger"]}
            assert {one["proname"] for one in await owner.fetch(EXECUTED_BY, service.name)} == kept | {
                "dl_claim_jobs",
                "dl_claim_runs",
            }
            assert await owner.fetch(EXECUTED_BY, foreign.name) == []
            assert await replica.fetchval(RELEASE) == 0
            # What the owner takes away later stays away.
            await owner.execute(f"REVOKE EXECUTE ON FUNCTION dl_claim_jobs FROM {service.name}")
            await owner.execute("UPDATE dl_function_sets SET number = number - 1")
            await migrate(store_at_0007)
            assert "dl_claim_jobs" not in {one["proname"] for one in await owner.fetch(EXECUTED_BY, service.name)}


@pytest.mark.slow
async def test_the_script_for_the_owner_brings_it_too(store_at_0007, empty_database, raw):
    await trio.to_thread.run_sync(empty_database.psql, render())
    async with raw_connection(empty_database.dsn) as former:
        assert await former.fetch(SCHEMA) == await raw.fetch(SCHEMA)
    await check(store_at_0007)


async def test_a_program_replaces_no_newer_functions(store, database, raw):
    await raw.execute("INSERT INTO dl_function_sets (number, hash) VALUES (999, 'of the future')")
    await raw.execute(CHANGED)
    assert await migrate(store) == []
    await trio.to_thread.run_sync(database.psql, render())
    assert await raw.fetchval(RELEASE) == 4711
    await check(store)


async def test_a_program_refuses_functions_that_need_a_newer_one(store, raw):
    await raw.execute("INSERT INTO dl_function_sets (number, hash, oldest) VALUES (999, 'of the future', 998)")
    for start in (migrate, check):
        with pytest.raises(SchemaError, match="with functions 999, too new for this version"):
            await start(store)


@pytest.mark.parametrize("ledger", ["number = number - 1", "hash = 'of another branch'"])
async def test_other_functions_than_the_programs_own_are_replaced(store, raw, ledger):
    await raw.execute(CHANGED)
    await raw.execute(f"UPDATE dl_function_sets SET {ledger}")
    with pytest.raises(SchemaError, match="run `dataloader migrate`"):
        await check(store)
    assert await migrate(store) == [f"functions {function_set.NUMBER}"]
    assert await raw.fetchval(RELEASE) == 0
    assert await migrate(store) == []


async def test_functions_are_replaced_while_a_writer_is_in_its_transaction(store, raw, add_job):
    """Triggers that are the same already are left alone: to make one waits for all writers, and they for it."""
    await raw.execute("UPDATE dl_function_sets SET number = number - 1")
    await raw.execute("BEGIN")
    await add_job()
    with trio.fail_after(20):
        assert await migrate(store) == [f"functions {function_set.NUMBER}"]
    await raw.execute("COMMIT")


async def test_a_set_that_fails_leaves_the_former_one_whole(store, raw, monkeypatch):
    before = await raw.fetch(SCHEMA)
    await raw.execute("UPDATE dl_function_sets SET number = number - 1")
    whole = function_set.source()
    monkeypatch.setattr(
        function_set, "source", lambda: f"DROP FUNCTION {{schema}}.dl_claim_runs; {whole} SELECT 1 / 0;"
    )
    with pytest.raises(Exception, match="division by zero"):
        await migrate(store)
    assert await raw.fetch(SCHEMA) == before


@pytest.mark.slow
@pytest.mark.parametrize("schema", ["jobs", '"My jobs"'])
async def test_the_functions_work_in_any_schema(empty_database, schema):
    async with raw_connection(empty_database.dsn) as raw:
        await raw.execute(f"CREATE SCHEMA {schema}; ALTER DATABASE {empty_database.name} SET search_path = {schema}")
    async with (
        open_database(DatabaseOptions(dsn=empty_database.dsn)) as store,
        raw_connection(empty_database.dsn) as raw,
    ):
        await migrate(store)
        await raw.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status)"
            " VALUES (gen_random_uuid(), 'q', 't', 'k', 'running')"
        )
        assert await raw.fetchval("SELECT token FROM dl_jobs") == 1
        await raw.execute("UPDATE dl_jobs SET status = 'failed', error = 'no row 1'")
        assert await raw.fetchval("SELECT dl_error_group(error) FROM dl_errors") == "no row #"


async def test_a_schema_whose_name_can_not_stand_in_a_function_is_refused(empty_database):
    async with raw_connection(empty_database.dsn) as raw:
        await raw.execute(
            f"""CREATE SCHEMA "o'brien"; ALTER DATABASE {empty_database.name} SET search_path = "o'brien" """
        )
    async with open_database(DatabaseOptions(dsn=empty_database.dsn)) as store:
        with pytest.raises(SchemaError, match="the schema's name \"o'brien\" must not contain"):
            await migrate(store)


async def test_a_search_path_that_leads_nowhere_is_named(empty_database):
    async with raw_connection(empty_database.dsn) as raw:
        await raw.execute(f"ALTER DATABASE {empty_database.name} SET search_path = nowhere")
    async with open_database(DatabaseOptions(dsn=empty_database.dsn)) as store:
        with pytest.raises(SchemaError, match="search_path names no schema that exists"):
            await migrate(store)


def test_files_that_have_landed_never_change():
    """A database that has applied one never applies it again: what is to change goes into a new file."""
    hashes = {one.full_name: hashlib.sha256(one.sql.encode()).hexdigest() for one in migrations()}
    assert hashes == json.loads(HASHES.read_text())["files"]


def test_functions_that_have_changed_have_a_new_number():
    """Raise `NUMBER` in function_set.py and add its hash: a database that has this number never gets the change."""
    known = json.loads(HASHES.read_text())["functions"]
    assert known[str(function_set.NUMBER)] == function_set.digest()
    assert [int(number) for number in known] == list(range(1, function_set.NUMBER + 1))
    assert len(set(known.values())) == len(known)


def test_every_file_of_the_set_is_named_in_it():
    folder = Path(function_set.__file__).with_name("functions")
    assert {path.stem for path in folder.iterdir()} == set(function_set.FILES)
