"""Operations on the queue in each of the possible ways; the suites of jobs and of loads run on all of them."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio.from_thread
import attrs
import pytest
import trio
from databases import raw_connection
from web_server import TOKENS, all_tokens, open_server

from dataloader import open_client
from dataloader.jobs.client.client_part import ClientPart
from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.client.loads import Loads


@attrs.frozen
class OnAsyncio:
    """A part of a client on an asyncio loop in another thread, for a test on Trio."""

    part: ClientPart
    portal: anyio.from_thread.BlockingPortal

    def __getattr__(self, name):
        async def forward(*args, **kwargs):
            future = self.portal.start_task_soon(partial(getattr(self.part, name), *args, **kwargs))
            try:
                return await trio.to_thread.run_sync(future.result, abandon_on_cancel=True)
            except trio.Cancelled:
                future.cancel()
                raise

        return forward


@asynccontextmanager
async def _on_asyncio(url, token):
    with (
        anyio.from_thread.start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(open_client(url=url, token=token)) as client,
    ):
        yield attrs.evolve(client, jobs=OnAsyncio(client.jobs, portal), loads=OnAsyncio(client.loads, portal))


@attrs.frozen
class Way:
    """A way to the queue: `jobs`, `loads`, and clients with faults. `raw` is a connection that bypasses it."""

    kind: str
    jobs: Jobs
    loads: Loads
    raw: object
    stranger: object
    nowhere: object


@pytest.fixture(params=["database", "service", "service from asyncio"])
async def way(request, database):
    """Return the queue of the test's database, in one of the ways."""
    async with AsyncExitStack() as stack:
        raw = await stack.enter_async_context(raw_connection(database.dsn))
        if request.param == "database":
            client = await stack.enter_async_context(open_client(database.dsn, operator="chief"))
            nowhere = open_client("postgresql://postgres@127.0.0.1:1/jobs")
            stranger = open_client(database.server.dsn_of("nowhere"))
        else:
            # The server of the tests receives no notifications, so it reads often.
            web = await stack.enter_async_context(open_server(database.dsn, reread_s=0.1, tokens=all_tokens()))
            opened = (
                _on_asyncio
                if request.param.endswith("asyncio")
                else lambda url, token: open_client(url=url, token=token)
            )
            client = await stack.enter_async_context(opened(web.url, TOKENS["chief"]))
            nowhere = opened("http://127.0.0.1:1", None)
            stranger = opened(web.url, "n" * 20)
        yield Way(request.param, client.jobs, client.loads, raw, stranger, nowhere)
