"""A write without an answer of the database does not delay the end of its run: the service continues (F17)."""

from __future__ import annotations

import json

import pytest
import trio
from conditions import until
from etl_tasks import ITEM, Items
from proxy import open_proxy
from services import FAST, LEASE_S, SWEEP_S
from source_app import open_source_app

from dataloader.store.processes.requests import Request, aio_ask

pytestmark = [pytest.mark.full, pytest.mark.requirement("Q8", "P10", "E10")]
EVENTS = "SELECT count(*) FROM dl_process_events JOIN dl_processes USING (key) WHERE process_id = 'mirror of c'"
BEGINNING = "SELECT count(*) FROM dl_processes WHERE status = 'init'"
ENDS = """
SELECT count(*) FROM dl_jobs WHERE status = 'running' AND lease_expires_at < now() - interval '1 s'
"""


async def outlasts_the_lease(proxy, service, raw):
    """Silence the whole network for longer than the leases, and check that the service continues."""
    await until(proxy.is_frozen)
    proxy.freeze()
    await until(lambda: raw.fetchval(ENDS), within_s=LEASE_S + 20)
    await trio.sleep(SWEEP_S)
    assert service.process.poll() is None, service.lines[-1]
    proxy.thaw()


async def test_a_silent_database_ends_no_service_that_delivers_messages(serve, raw, database):
    async with open_proxy(database.dsn) as proxy:
        service = await serve({"process.again": 2}, dsn=proxy.dsn, tasks="service_processes:tasks", **FAST)
        for counter in ("c", "mirror of c"):
            await raw.run(aio_ask, Request(type="again", process_id=counter, kind="init"), LEASE_S)
        await until(lambda: raw.fetchval(BEGINNING), lambda count: count == 0)
        proxy.freeze_at("pool", b"DELETE FROM dl_process_outbox WHERE id = $1 AND ident")
        request = Request(type="again", process_id="c", kind="call", method="add_and_tell", args=1)
        await raw.run(aio_ask, request, LEASE_S)
        await outlasts_the_lease(proxy, service, raw)
        await until(lambda: raw.fetchval(EVENTS), lambda count: count == 1)
        assert service.process.poll() is None


async def test_a_silent_database_ends_no_service_whose_load_asks_for_its_turn(serve, add, row_when, raw, database):
    await raw.execute(ITEM)
    with open_source_app() as app:
        app.put("/items", Items(app, [{"id": 1, "day": "2026-01-01", "value": "a"}]).answer)
        async with open_proxy(database.dsn) as proxy:
            environment = {"ITEMS_URL": app.url, "ITEMS_PIPELINE": json.dumps({})}
            service = await serve(dsn=proxy.dsn, tasks="etl_tasks:tasks", environment=environment, **FAST)
            proxy.freeze_at("pool", b"dl_source_take")
            args = {"from": "2026-01-01", "to": "2026-01-02"}
            job = await add("items", args, lock_key="load:items", lease_ttl_sec=LEASE_S)
            await outlasts_the_lease(proxy, service, raw)
            await row_when(job, "succeeded")
            assert service.process.poll() is None
    assert await raw.fetchval("SELECT count(*) FROM item") == 1
