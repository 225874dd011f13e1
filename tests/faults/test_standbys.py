"""A server that is still in recovery, as after a failover to a standby before its promotion."""

from __future__ import annotations

import shutil

import pytest

from dataloader.jobs.errors import StoreUnavailable
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.history import read_history
from dataloader.store.connection.options import DatabaseOptions

pytestmark = [pytest.mark.slow, pytest.mark.requirement("Q5")]


async def test_a_standby_is_an_outage_and_its_promotion_another_history(own_server):
    async with open_database(DatabaseOptions(dsn=own_server.dsn)) as store:
        before = await read_history(store)
    await own_server.stop("fast")
    directory = own_server.cluster.directory
    signal = directory / "standby.signal"
    signal.touch()
    shutil.chown(signal, directory.stat().st_uid, directory.stat().st_gid)
    await own_server.start()
    async with open_database(DatabaseOptions(dsn=own_server.dsn)) as store:
        with pytest.raises(StoreUnavailable, match="standby"):
            await read_history(store)
        assert not await store.crossing.is_served()
        await own_server.fetch("SELECT pg_promote()")
        after = await read_history(store)
        assert after.is_new
        assert after.id != before.id
        assert await store.crossing.is_served()
