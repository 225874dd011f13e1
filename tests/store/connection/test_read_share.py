"""Reads over HTTP use a part of the pool, so that the queue and the actors always find a connection."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
from conditions import patience_s, until

from dataloader import StoreUnavailable
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.connection.read_share import ReadShare, read_for, share_of

pytestmark = pytest.mark.requirement("Q2")

SLEEPS = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND datname = current_database()"


async def aio_value(connection, sql="SELECT 1"):
    return await connection.fetchval(sql)


@attrs.define
class SlowReads:
    """Reads that keep their connections until they are canceled: the callers whose reads have one."""

    share: ReadShare
    nursery: trio.Nursery
    connected: list[str] = attrs.field(factory=list)

    async def start(self, *callers):
        for caller in callers:
            self.nursery.start_soon(self._read, caller)
        places = self.share.places

        async def settled():
            return len(self.connected) == places.held and places.held + places.waiting

        await until(settled, lambda number: number == len(self.nursery.child_tasks))

    async def _read(self, caller):
        read_for(caller)
        await self.share.run(self._aio_keep, caller)

    async def _aio_keep(self, connection, caller):
        await aio_value(connection)
        self.connected.append(caller)
        await asyncio.Event().wait()


@asynccontextmanager
async def slow_reads(database, pool_size):
    options = DatabaseOptions(dsn=database.dsn, pool_size=pool_size)
    async with open_database(options) as store, trio.open_nursery() as nursery:
        with trio.fail_after(patience_s()):
            yield store, SlowReads(share_of(store), nursery)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("pool_size", "reads"), [(1, 1), (2, 1), (3, 2), (5, 4)])
async def test_slow_reads_leave_a_connection_of_the_pool_to_everything_else(database, pool_size, reads):
    async with slow_reads(database, pool_size) as (store, slow):
        await slow.start(*"abcdefgh")
        assert len(slow.connected) == reads
        assert await store.run(aio_value) == 1
        assert await slow.share.write(aio_value) == 1  # a write over HTTP is not a read
        assert await slow.share.pool.run(aio_value) == 1  # nor is a ping


async def test_slow_reads_of_a_caller_leave_half_of_the_share_to_others(database):
    async with slow_reads(database, 3) as (_, slow):
        await slow.start("a", "a", "a")
        assert slow.connected == ["a"]
        read_for("b")
        assert await slow.share.run(aio_value) == 1


async def test_a_read_that_takes_too_long_is_canceled_on_the_server(database):
    async with open_database(DatabaseOptions(dsn=database.dsn)) as store:
        share = ReadShare(store, most_s=0.2)
        with trio.fail_after(patience_s()), pytest.raises(StoreUnavailable, match=r"longer than 0\.2 s"):
            await share.run(aio_value, "SELECT pg_sleep(3600)")
        await until(lambda: store.run(aio_value, SLEEPS), lambda number: number == 0)
        assert await share.run(aio_value) == 1


async def test_a_pool_has_one_share_however_often_it_is_asked_for(store):
    assert share_of(store) is share_of(store) is share_of(share_of(store))
