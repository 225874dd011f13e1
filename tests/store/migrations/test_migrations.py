"""Migration of a database to the current version, whatever state it is in (Q1)."""

from __future__ import annotations

import re

import pytest
import trio
from conditions import patience_s
from databases import raw_connection
from logged import capture_logs
from roles import service_role
from schema_catalog import schema_lines

from dataloader.jobs.errors import SchemaError, StoreUnavailable
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.migrations import LATEST, check, function_set, lock, migrate, migrations, render

INSERT = "INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES (gen_random_uuid(), 'q', 't', 'k')"
# Tables, then the functions for their rows, then the files that take long while other sessions write.
ALL = [
    *(one.full_name for one in migrations() if one.is_transactional),
    f"functions {function_set.NUMBER}",
    *(one.full_name for one in migrations() if not one.is_transactional),
]
STATUSES = ("queued", "running", "succeeded", "failed", "canceled", "lost")


def options(database):
    return DatabaseOptions(dsn=database.dsn)


def columns_reversed(ddl):
    """Return statements that make the same tables with their columns in the opposite order."""

    def reverse(table):
        return f"{table[1]} (\n" + ",\n".join(line.rstrip(",") for line in reversed(table[2].splitlines())) + "\n);"

    return re.sub(r"(CREATE TABLE \w+) \(\n(.*?)\n\);", reverse, ddl, flags=re.DOTALL)


@pytest.mark.requirement("Q1")
@pytest.mark.parametrize("order", [str, columns_reversed])
async def test_adopted_tables_get_the_schema_of_new_ones_without_a_rewrite(empty_database, document_ddl, raw, order):
    of_files = "SELECT pg_relation_filenode('dl_jobs'), pg_relation_filenode('dl_job_events')"
    async with raw_connection(empty_database.dsn) as adopted, open_database(options(empty_database)) as database:
        await adopted.execute(order(document_ddl))
        before = await adopted.fetchrow(of_files)
        assert await migrate(database) == ALL
        assert await adopted.fetchrow(of_files) == before
        assert await schema_lines(adopted) == await schema_lines(raw)


@pytest.mark.requirement("Q1")
@pytest.mark.parametrize("published", [False, True])
async def test_tables_of_the_document_are_adopted_with_every_row_in_every_status(
    empty_database, document_ddl, published
):
    columns = "job_id, queue, task, args, lock_key, status, attempt, priority, available_at, created_at, error"
    async with raw_connection(empty_database.dsn) as raw, open_database(options(empty_database)) as database:
        await raw.execute(document_ddl)
        if published:  # then UPDATE and DELETE need a primary key
            await raw.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        for n, status in enumerate(STATUSES):
            await raw.execute(
                "INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, status, available_at)"
                " SELECT gen_random_uuid(), 'q', 't', '{\"n\": 1}', 'k', $1::text::dl_status,"
                " now() + $2 * interval '1 hour'"
                " FROM generate_series(1, 20)",
                status,
                n % 2,
            )
        await raw.execute("INSERT INTO dl_job_events (job_id, queue, kind) SELECT job_id, queue, 'queued' FROM dl_jobs")
        await raw.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, available_at)"
            " VALUES (gen_random_uuid(), 'q', 't', 'later', now() + interval '1 hour')"
        )
        before = await raw.fetch(f"SELECT {columns} FROM dl_jobs ORDER BY job_id")
        assert await migrate(database) == ALL
        assert await raw.fetch(f"SELECT {columns} FROM dl_jobs ORDER BY job_id") == before
        assert await raw.fetchval("SELECT count(*) FROM dl_job_events") == 120
        assert await raw.fetchval("SELECT waits_for FROM dl_jobs WHERE lock_key = 'later'") == "time"
        assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'queued' AND waits_for IS NULL") == 20
        grouped = "SELECT count(*) FROM dl_jobs WHERE (error_group IS NOT NULL) = (status IN ('failed', 'lost'))"
        assert await raw.fetchval(grouped) == len(before)
        assert await migrate(database) == []


@pytest.mark.slow
@pytest.mark.requirement("Q1")
async def test_many_concurrent_migrations_apply_each_file_once(empty_database):
    applied = []

    async def start():
        async with open_database(options(empty_database)) as database:
            applied.extend(await migrate(database))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(start)
    assert applied == ALL


@pytest.mark.requirement("Q1")
async def test_an_index_that_an_interruption_left_half_made_is_made_again(database):
    invalid = "SELECT count(*) FROM pg_index WHERE NOT indisvalid"
    async with raw_connection(database.dsn) as raw, open_database(options(database)) as store:
        await raw.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_dl_jobs_ready'::regclass")
        with pytest.raises(SchemaError, match="an index of the queue is invalid"):
            await check(store)
        await migrate(store)
        assert await raw.fetchval(invalid) == 0
        await check(store)


@pytest.mark.requirement("Q1")
async def test_an_index_that_is_being_built_is_waited_for_and_not_called_half_made(database):
    index = "CREATE INDEX CONCURRENTLY IF NOT EXISTS ix_dl_jobs_ready ON dl_jobs (queue)"
    async with (
        raw_connection(database.dsn) as raw,
        raw_connection(database.dsn) as writer,
        raw_connection(database.dsn) as builder,
    ):
        with service_role(database) as role:
            async with open_database(DatabaseOptions(dsn=role.dsn)) as store, trio.open_nursery() as nursery:
                await raw.execute("DROP INDEX ix_dl_jobs_ready")
                await writer.execute("BEGIN")
                await writer.execute(INSERT)
                nursery.start_soon(builder.execute, index)
                with trio.fail_after(patience_s()):
                    while not await raw.fetchval("SELECT to_regclass('ix_dl_jobs_ready') IS NOT NULL"):  # noqa: ASYNC110
                        await trio.sleep(0.02)
                with pytest.raises(StoreUnavailable, match=r"^server process \d+ \(.*\) is migrating the schema"):
                    await check(store)
                await writer.execute("COMMIT")
            async with open_database(DatabaseOptions(dsn=role.dsn)) as store:
                await check(store)


@pytest.mark.slow
@pytest.mark.requirement("Q1")
async def test_a_wait_for_a_migration_names_its_process_and_ends_after_its_limit(database):
    async with raw_connection(database.dsn) as raw, open_database(options(database)) as store:
        pid = await raw.fetchval("SELECT pg_backend_pid()")
        await raw.execute("DELETE FROM dl_function_sets; SET application_name = 'the other'")
        await raw.execute(f"SELECT pg_advisory_lock({lock.KEY})")
        holder = f"server process {pid} (the other)"
        with trio.fail_after(patience_s()):
            with pytest.raises(StoreUnavailable, match=f"^{re.escape(holder)} has held the migration lock for"):
                await migrate(store, wait_s=0.5)
            with pytest.raises(StoreUnavailable, match=f"^{re.escape(holder)} is migrating the schema"):
                await check(store)
            async with trio.open_nursery() as nursery:
                warned = trio.Event()
                words = []

                def warn(word):
                    words.append(word)
                    warned.set()

                async def aio_take(connection):
                    await lock.aio_lock(connection, wait_s=60, warn=warn, tell_after_s=0.1)
                    await connection.execute(f"SELECT pg_advisory_unlock({lock.KEY})")

                nursery.start_soon(store.run, aio_take)
                await warned.wait()
                await raw.execute(f"SELECT pg_advisory_unlock({lock.KEY})")
        assert [word.startswith(f"waiting for {holder}, which is migrating the schema: ") for word in words] == [True]
        await migrate(store)
        await check(store)


@pytest.mark.full
@pytest.mark.requirement("Q1")
async def test_a_reader_with_an_old_snapshot_delays_an_index_but_leaves_it_valid(empty_database, document_ddl):
    async with raw_connection(empty_database.dsn) as raw, raw_connection(empty_database.dsn) as reader:
        await raw.execute(document_ddl)
        await raw.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES (gen_random_uuid(), 'q', 't', 'k')"
        )
        await reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await reader.execute("SELECT count(*) FROM dl_jobs")
        async with open_database(options(empty_database)) as database, trio.open_nursery() as nursery:
            nursery.start_soon(migrate, database)
            await trio.sleep(5)
            await reader.execute("COMMIT")
        assert await raw.fetchval("SELECT count(*) FROM pg_index WHERE NOT indisvalid") == 0
        assert await raw.fetchval("SELECT max(number) FROM dl_migrations") == LATEST


@pytest.mark.full
@pytest.mark.requirement("Q1")
async def test_indexes_are_built_despite_transactions_older_than_the_lock_timeout(database):
    ended = False

    async def read(reader, after_s):
        await trio.sleep(after_s)
        while not ended:
            await reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            await reader.execute("SELECT count(*) FROM pg_class")
            # There is always a transaction that is older than LOCK_TIMEOUT.
            await trio.sleep(4)
            await reader.execute("COMMIT")

    async with (
        raw_connection(database.dsn) as first,
        raw_connection(database.dsn) as second,
        open_database(options(database)) as store,
        trio.open_nursery() as nursery,
    ):
        await first.execute("DROP INDEX ix_dl_jobs_ready; DELETE FROM dl_migrations WHERE number = 7")
        nursery.start_soon(read, first, 0)
        nursery.start_soon(read, second, 2)
        await trio.sleep(2.1)
        with trio.fail_after(60):
            assert await migrate(store) == [one.full_name for one in migrations() if one.number == 7]
        ended = True


@pytest.mark.slow
@pytest.mark.requirement("Q1")
async def test_a_migration_that_waits_for_a_writer_holds_up_no_other(empty_database):
    async with raw_connection(empty_database.dsn) as raw, open_database(options(empty_database)) as database:
        await migrate(database)
        await raw.execute("DROP TABLE dl_etl_runs CASCADE; DELETE FROM dl_migrations WHERE number = 5")
        await raw.execute("BEGIN")
        await raw.execute(INSERT)
        async with trio.open_nursery() as nursery, raw_connection(empty_database.dsn) as other:
            nursery.start_soon(migrate, database)
            waits = "SELECT count(*) FROM pg_locks WHERE relation = 'dl_jobs'::regclass AND NOT granted"
            with trio.fail_after(patience_s()):
                while not await raw.fetchval(waits):  # noqa: ASYNC110 - the database has no event
                    await trio.sleep(0.02)
            with trio.fail_after(patience_s()):
                await other.execute(INSERT)
            await raw.execute("COMMIT")
        assert await raw.fetchval("SELECT max(number) FROM dl_migrations") == LATEST


@pytest.mark.requirement("Q1")
async def test_an_invalid_foreign_index_is_ignored(database):
    async with raw_connection(database.dsn) as raw, open_database(options(database)) as store:
        await raw.execute("CREATE INDEX theirs ON dl_jobs (producer)")
        await raw.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'theirs'::regclass")
        await check(store)
        assert await migrate(store) == []


@pytest.mark.slow
@pytest.mark.requirement("Q1")
async def test_the_script_does_all_that_is_left_also_when_it_is_run_again(empty_database, document_ddl):
    async with raw_connection(empty_database.dsn) as raw:
        await raw.execute(document_ddl)
        await raw.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, available_at)"
            " SELECT gen_random_uuid(), 'q', 't', 'k', now() + interval '1 hour' FROM generate_series(1, 5001)"
        )
        await trio.to_thread.run_sync(empty_database.psql, render())
        assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE waits_for IS NULL") == 0
        await raw.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_dl_jobs_ready'::regclass")
        await trio.to_thread.run_sync(empty_database.psql, render())
        async with open_database(options(empty_database)) as store:
            await check(store)


@pytest.mark.requirement("Q1")
async def test_a_program_runs_with_newer_tables_and_logs_a_warning(database):
    async with raw_connection(database.dsn) as raw, open_database(options(database)) as store:
        await raw.execute("INSERT INTO dl_migrations (number, name) VALUES (999, 'future')")
        # A later program may not need one of our files.
        await raw.execute("DELETE FROM dl_migrations WHERE number = 5")
        said = []
        assert await migrate(store, warn=said.append) == []
        with capture_logs() as lines:
            await check(store)
        assert [line["event"] for line in lines] == said
        assert re.fullmatch(
            r"the database's schema is at 0999 .*, newer than this version .* which remains compatible", *said
        )


@pytest.mark.requirement("Q16")
async def test_a_schema_open_to_function_creation_is_warned_about_until_it_is_closed(empty_database):
    said = []
    async with raw_connection(empty_database.dsn) as raw, open_database(options(empty_database)) as store:
        await raw.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
        for applied in (ALL, []):
            assert await migrate(store, warn=said.append) == applied
            assert "all roles may create functions in the schema public" in said[-1]
        with capture_logs() as lines:
            await check(store)
        assert [line["event"] for line in lines] == [said[0]]
        await raw.execute(said[0].partition("should run: ")[2])
        del said[:]
        await migrate(store, warn=said.append)
    assert said == []


@pytest.mark.requirement("Q1")
async def test_a_program_refuses_tables_that_need_a_newer_one(database):
    async with raw_connection(database.dsn) as raw, open_database(options(database)) as store:
        await raw.execute("INSERT INTO dl_migrations (number, name, oldest) VALUES (999, 'future', 998)")
        for start in (migrate, check):
            with pytest.raises(SchemaError, match=f"at 0999 .*, too new for this version \\({LATEST:04} .*; upgrade"):
                await start(store)


@pytest.mark.requirement("Q1")
async def test_tables_of_another_owner_are_named_with_what_to_do(empty_database, document_ddl):
    async with raw_connection(empty_database.dsn) as raw:
        await raw.execute(document_ddl)
        await raw.execute("DROP ROLE IF EXISTS outsider")
        await raw.execute("CREATE ROLE outsider LOGIN PASSWORD 'outsider'")
        await raw.execute("GRANT ALL ON SCHEMA public TO outsider; GRANT SELECT, INSERT, UPDATE ON dl_jobs TO outsider")
        dsn = empty_database.dsn.replace("postgres:", "outsider:", 1)
        head, _, tail = dsn.partition("outsider:")
        dsn = f"{head}outsider:outsider@{tail.partition('@')[2]}"
        async with open_database(DatabaseOptions(dsn=dsn)) as database:
            with pytest.raises(SchemaError, match="Let their owner run the output of `dataloader migrate --sql`"):
                await migrate(database)
        await raw.execute("DROP OWNED BY outsider; DROP ROLE outsider")
