"""Addresses with several hosts: each is tried within the timeout of a connection, the last working one first."""

from __future__ import annotations

import socket
import threading

import pytest

from dataloader.jobs.errors import StoreUnavailable
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.connect import hosts_of
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue.transaction import Transactions

pytestmark = pytest.mark.requirement("Q5")


@pytest.fixture
def socket_host(database):
    """Return the test's server as a host."""
    return database.dsn.partition("host=")[2].partition("&")[0]


@pytest.fixture
def silent():
    """Return a host that never answers, like one whose packets are dropped; its connections are counted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


@pytest.fixture
def closing():
    """Return a host that closes each connection, like a proxy without its server; the connections so far."""
    connections = []

    def close_all():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=close_all, daemon=True)
        thread.start()
        yield listener.getsockname()[1], connections
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def beside(database, socket_host, first, port):
    """Return the address of the test's database with another host before its own."""
    head, _, query = database.dsn.partition("?")
    rest = query.replace(f"host={socket_host}", f"host={first},{socket_host}")
    return f"{head}?{rest}&port={port},5432&sslmode=disable"


async def answer(dsn, *, connect_timeout_s=20.0):
    async with open_database(DatabaseOptions(dsn=dsn, connect_timeout_s=connect_timeout_s)) as store:
        return await store.run(aio_one)


async def aio_one(connection):
    return await connection.fetchval("SELECT 1")


@pytest.mark.slow
async def test_a_host_that_is_silent_does_not_hide_the_next_one(database, socket_host, silent):
    host, port = silent
    assert await answer(beside(database, socket_host, host, port), connect_timeout_s=4) == 1


async def test_a_host_that_closes_connections_does_not_hide_the_next_one(database, socket_host, closing):
    assert await answer(beside(database, socket_host, "127.0.0.1", closing[0])) == 1


async def test_the_host_that_served_last_comes_first(database, socket_host, closing):
    port, connections = closing
    dsn = beside(database, socket_host, "127.0.0.1", port)
    async with open_database(DatabaseOptions(dsn=dsn)) as store:
        for _ in range(3):
            await store.run(aio_one)
            await store.run(aio_close)
    assert len(connections) == 1


async def test_a_transaction_begins_on_the_host_that_served_the_pool_last(database, socket_host, closing):
    port, connections = closing
    dsn = beside(database, socket_host, "127.0.0.1", port)
    async with open_database(DatabaseOptions(dsn=dsn)) as store:
        await store.run(aio_one)
        transactions = Transactions(store, default_lease_s=60)
        assert await transactions.run(aio_one) == 1
        transactions.close()
    assert len(connections) == 1


async def aio_close(connection):
    await connection.close()


async def test_of_hosts_that_do_not_take_us_the_error_names_all(closing):
    port, _ = closing
    dsn = f"postgresql://nobody@127.0.0.1:{port},127.0.0.1:{port}/jobs?sslmode=disable"
    async with open_database(DatabaseOptions(dsn=dsn)) as store:
        with pytest.raises(StoreUnavailable):
            await store.run(aio_one)


@pytest.mark.parametrize(
    ("dsn", "hosts"),
    [
        ("postgresql://u:p@one:5433,two/db", [("one", 5433), ("two", None)]),
        ("postgresql://u:p%2C@one,two:5434/db?sslmode=require", [("one", None), ("two", 5434)]),
        ("postgresql://[::1]:5433,[fe80::2]/db", [("::1", 5433), ("fe80::2", None)]),
        ("postgresql:///db?host=/run/a,/run/b&port=5433,5434", [("/run/a", 5433), ("/run/b", 5434)]),
        ("postgresql:///db?host=one,two&port=5433", [("one", 5433), ("two", 5433)]),
        ("postgresql://one/db", [("one", None)]),
        ("postgresql:///db", []),
        ("postgresql://one:x,two/db", []),
    ],
)
def test_hosts_are_read_as_the_driver_reads_them(dsn, hosts):
    assert hosts_of(dsn) == hosts
