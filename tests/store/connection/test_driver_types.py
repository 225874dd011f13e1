"""The server's own types are looked up once a process; what a database defines itself is looked up there."""

from __future__ import annotations

from contextlib import asynccontextmanager
from uuid import UUID, uuid4

import asyncpg
import pytest
import trio

from dataloader.store.connection import driver_types
from dataloader.store.connection.bridge import DatabaseOptions
from dataloader.store.connection.connect import connect
from dataloader.store.connection.loop import open_loop

ARRAYS = "SELECT $1::uuid[] AS ids, $2::int8[] AS numbers, $3::int4multirange AS ranges, $4::timestamptz[] AS times"
VALUES = ([uuid4(), UUID(int=0)], [1, None, 3], [asyncpg.Range(1, 5)], [])


@pytest.fixture
def open_connection(database):
    """Opens a connection of ours, with the list of what it is asked."""

    @asynccontextmanager
    async def open_connection(loop):
        connection = await loop.run(connect, DatabaseOptions(dsn=database.dsn))
        asked = []
        connection.add_query_logger(lambda record: asked.append(record.query))
        try:
            yield connection, asked
        finally:
            with trio.move_on_after(5, shield=True):
                await loop.run(connection.close)

    return open_connection


async def test_a_connection_after_the_first_looks_up_no_type_of_the_servers_own(open_connection, monkeypatch):
    monkeypatch.setattr(driver_types, "_known", {})
    async with open_loop() as loop:
        for number in range(3):
            async with open_connection(loop) as (connection, asked):
                row = await loop.run(connection.fetchrow, ARRAYS, *VALUES)
                assert tuple(row) == VALUES
                assert any("typeinfo_tree" in query for query in asked) == (number == 0)
                assert number == 0 or asked == [ARRAYS]


async def test_a_databases_own_types_are_looked_up_on_each_connection(database, open_connection, monkeypatch):
    monkeypatch.setattr(driver_types, "_known", {})
    mixed = "SELECT $1::mood[] AS moods, $2::uuid[] AS ids, $3::record_of_two AS two, $4::moods AS more"
    async with open_loop() as loop:
        for labels in ("'good', 'bad'", "'bad', 'good', 'none'"):
            database.psql(f"""
                DROP TYPE IF EXISTS mood, record_of_two CASCADE;
                DROP DOMAIN IF EXISTS moods;
                CREATE TYPE mood AS ENUM ({labels});
                CREATE TYPE record_of_two AS (a int8[], b text);
                CREATE DOMAIN moods AS int4[];
            """)
            async with open_connection(loop) as (connection, asked):
                row = await loop.run(connection.fetchrow, mixed, ["good"], [UUID(int=1)], ([1, 2], "b"), [7])
                assert tuple(row) == (["good"], [UUID(int=1)], ([1, 2], "b"), [7])
                assert any("typeinfo_tree" in query for query in asked)
    assert all(oid < 10_000 for oid in driver_types._known)


async def test_it_works_where_no_statement_has_a_name(database, monkeypatch):
    # As behind a pooler that knows of none: a lookup takes the place of the statement that is being prepared.
    monkeypatch.setattr(driver_types, "_known", {})
    async with open_loop() as loop:
        for _ in range(2):
            connection = await loop.run(
                lambda: asyncpg.connect(
                    database.dsn, statement_cache_size=0, connection_class=driver_types.DriverConnection
                )
            )
            for _ in range(2):
                assert tuple(await loop.run(connection.fetchrow, ARRAYS, *VALUES)) == VALUES
            await loop.run(connection.close)
