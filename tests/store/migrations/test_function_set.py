"""Functions and triggers as one set under a number, whatever a database had before."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest
import trio
from conditions import patience_s
from databases import raw_connection
from roles import a_role

from dataloader.jobs.errors import SchemaError
from dataloader.jobs.model import NewJob
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.migrations import check, function_set, migrate, migrations, render
from dataloader.store.queue.enqueue import enqueue

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
EXECUTED_BY = f"""
SELECT array_agg(proname::text ORDER BY proname) FROM pg_proc JOIN ({OURS}) AS ours USING (oid)
WHERE has_function_privilege($1::text, oid, 'EXECUTE')
"""
CHANGED = "CREATE OR REPLACE FUNCTION dl_release(p_hashes int[]) RETURNS int LANGUAGE sql AS 'SELECT 4711'"
RELEASE = "SELECT dl_release('{}')"


@pytest.mark.slow
async def test_a_role_may_execute_a_new_function_beside_one_that_it_executes(store, database, raw):
    with (
        a_role(database, "GRANT EXECUTE ON FUNCTION dl_free_keys TO jobs_service") as service,
        a_role(database, "GRANT SELECT, INSERT, UPDATE, DELETE ON dl_jobs TO jobs_service") as foreign,
    ):
        await raw.execute("DROP FUNCTION dl_lease_counts; UPDATE dl_function_sets SET number = number - 1")
        await migrate(store)
        assert await raw.fetchval(EXECUTED_BY, service.name) == ["dl_free_keys", "dl_lease_counts"]
        assert await raw.fetchval(EXECUTED_BY, foreign.name) is None
        # A right that the owner revokes later stays revoked.
        await raw.execute(f"REVOKE EXECUTE ON FUNCTION dl_lease_counts FROM {service.name}")
        await raw.execute("UPDATE dl_function_sets SET number = number - 1")
        await migrate(store)
        assert await raw.fetchval(EXECUTED_BY, service.name) == ["dl_free_keys"]


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


@pytest.mark.slow
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
    """Unchanged triggers are not created again: that waits for all writers, and they for it."""
    await raw.execute("UPDATE dl_function_sets SET number = number - 1")
    await raw.execute("BEGIN")
    await add_job()
    with trio.fail_after(patience_s()):
        assert await migrate(store) == [f"functions {function_set.NUMBER}"]
    await raw.execute("COMMIT")


async def test_a_set_that_fails_leaves_the_former_one_whole(store, raw):
    # A function near the beginning differs from ours, and one near the end is refused.
    await raw.execute(CHANGED)
    await raw.execute("""
        CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
          IF EXISTS (SELECT FROM pg_event_trigger_ddl_commands() WHERE object_identity LIKE '%dl_run_stats_of%') THEN
            RAISE 'not this function';
          END IF;
        END $$;
        CREATE EVENT TRIGGER refuse ON ddl_command_end EXECUTE FUNCTION refuse();
    """)
    before = await raw.fetch(SCHEMA)
    await raw.execute("UPDATE dl_function_sets SET number = number - 1")
    with pytest.raises(Exception, match="not this function"):
        await migrate(store)
    assert await raw.fetch(SCHEMA) == before
    await raw.execute("DROP EVENT TRIGGER refuse")
    await migrate(store)
    assert await raw.fetch(SCHEMA) != before


@asynccontextmanager
async def migrated_after(change, database):
    """Change an empty database, then migrate it; yield the store and a raw connection, both opened after the change."""
    async with raw_connection(database.dsn) as raw:
        await raw.execute(change)
    async with open_database(DatabaseOptions(dsn=database.dsn)) as store, raw_connection(database.dsn) as raw:
        await migrate(store)
        yield store, raw


@pytest.mark.slow
@pytest.mark.parametrize("schema", ["jobs", '"My jobs"'])
async def test_the_functions_work_in_any_schema(empty_database, schema):
    change = f"CREATE SCHEMA {schema}; ALTER DATABASE {empty_database.name} SET search_path = {schema}"
    async with migrated_after(change, empty_database) as (_, raw):
        await raw.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status)"
            " VALUES (gen_random_uuid(), 'q', 't', 'k', 'running')"
        )
        assert await raw.fetchval("SELECT token > 0 FROM dl_jobs")
        await raw.execute("UPDATE dl_jobs SET status = 'failed', error = 'no row 1'")
        assert await raw.fetchval("SELECT dl_error_group(error) FROM dl_errors") == "no row #"


@pytest.mark.slow
async def test_the_functions_do_not_depend_on_standard_conforming_strings(empty_database):
    change = f"ALTER DATABASE {empty_database.name} SET standard_conforming_strings = off"
    async with migrated_after(change, empty_database) as (store, raw):
        job = NewJob(task="t", queue="q", lock_key="k", idempotency_key="once")
        assert (await enqueue(store, [job]))[0].created
        assert await raw.fetchval("SHOW standard_conforming_strings") == "off"
        assert await raw.fetchval("""SELECT dl_key('lock_key', '"k:{a}"', 't', '{"a": 1}')""") == "k:1"
        args = r'{"a": 1.0, "b\\": "2.0"}'
        assert await raw.fetchval("SELECT dl_unique_key('true', 't', $1::text::jsonb)", args) == (
            r't:{"a": 1, "b\\": "2.0"}'
        )
        again = "SELECT dl_enqueue('t', '{}', queue => 'q', idempotency_key => 'twice')"
        assert await raw.fetchval(again) == await raw.fetchval(again)
        with pytest.raises(asyncpg.InvalidParameterValueError, match="lock_key"):
            await raw.fetchval("SELECT dl_enqueue('t', '{}', queue => 'q', lock_key => E'a\\nb')")


def test_literals_of_functions_with_a_backslash_are_escape_strings():
    literal = r"""(?:--[^\n]*|\$re\$.*?\$re\$|(?P<escapes>[eE]?)'(?P<text>(?:[^']|'')*)')"""
    found = re.finditer(literal, function_set.source(), re.DOTALL)
    assert [one[0] for one in found if one["text"] and "\\" in one["text"] and not one["escapes"]] == []


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
    """A database that has applied a file never applies it again: changes need a new file."""
    hashes = {one.full_name: hashlib.sha256(one.sql.encode()).hexdigest() for one in migrations()}
    assert hashes == json.loads(HASHES.read_text())["files"]


def test_functions_that_have_changed_have_a_new_number():
    """A change needs a larger `NUMBER` in function_set.py and a new hash: a database keeps a set with its number."""
    known = json.loads(HASHES.read_text())["functions"]
    assert known[str(function_set.NUMBER)] == function_set.digest()
    numbers = [int(number) for number in known]
    assert numbers == list(range(numbers[0], function_set.NUMBER + 1))
    assert len(set(known.values())) == len(known)


def test_every_file_of_the_set_is_named_in_it():
    folder = Path(function_set.__file__).with_name("functions")
    assert {path.stem for path in folder.iterdir()} == set(function_set.FILES)
