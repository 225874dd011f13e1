"""A shielded write ends by the deadline of the scopes around it, such as a job's run, also without an answer."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from proxy import open_proxy

from dataloader import StoreUnavailable
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions

pytestmark = [pytest.mark.slow, pytest.mark.requirement("Q8")]


async def aio_in_transaction(connection, sql):
    async with connection.transaction():
        return await connection.fetchval(sql)


@pytest.fixture
async def proxy(database):
    async with open_proxy(database.dsn) as proxy:
        yield proxy


@pytest.fixture
async def store(proxy):
    # An unbounded write would wait for 10 + 30 + 2 s.
    async with open_database(DatabaseOptions(dsn=proxy.dsn)) as store:
        await store.run(aio_in_transaction, "SELECT 1")
        yield store


async def test_a_write_without_an_answer_ends_with_the_scope_around_it(proxy, store):
    proxy.freeze()
    began = trio.current_time()
    with trio.move_on_after(0.5) as scope, pytest.raises(StoreUnavailable):
        await store.write(aio_in_transaction, "SELECT 1")
    assert trio.current_time() - began < 20
    assert not scope.cancelled_caught
    proxy.thaw()
    assert await store.write(aio_in_transaction, "SELECT 2") == 2


async def test_a_write_that_waits_for_a_connection_ends_with_the_scope_around_it(proxy, store):
    async with trio.open_nursery() as nursery:
        for _ in range(store.options.pool_size):
            nursery.start_soon(store.run, aio_in_transaction, "SELECT pg_sleep(25)")
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        with trio.move_on_after(0.5), pytest.raises(StoreUnavailable):
            await store.write(aio_in_transaction, "SELECT 1")
        assert trio.current_time() - began < 8
        nursery.cancel_scope.cancel()


async def test_a_write_that_its_scope_no_longer_waits_for_still_happens(store):
    with trio.CancelScope() as scope:
        scope.cancel()
        assert await store.write(aio_in_transaction, "SELECT 3") == 3


async def test_an_argument_of_a_write_may_have_the_name_of_a_deadline(store):
    async def aio_names(connection, **names):
        return await connection.fetchval("SELECT $1::text", ", ".join(sorted(names)))

    with trio.move_on_after(20):
        assert await store.write(aio_names, until=1, deadline_s=2, timeout_s=3) == "deadline_s, timeout_s, until"
