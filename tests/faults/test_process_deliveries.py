"""Services that deliver are killed: sinks get all events at least once and in order, messages arrive once."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from contextlib import suppress
from functools import partial

import pytest
import trio
from conditions import patience_s
from services import FAST, LEASE_S

from dataloader.store.processes.requests import Request, aio_ask

pytestmark = [pytest.mark.full, pytest.mark.requirement("P9", "P10")]
CALLS, KILLS = 25, 4
EVENTS = "SELECT process_id, payload::int FROM dl_process_events JOIN dl_processes USING (key) ORDER BY key, event_id"


class Hook:
    """Webhook that stores its requests, refuses some of them, and is slow, so that deliveries are in progress."""

    def __init__(self):
        self.got = []
        self.times = 0

    async def serve(self, stream):
        with suppress(trio.BrokenResourceError):  # the service was killed
            await self.answer(stream)

    async def answer(self, stream):
        data = b""
        async for chunk in stream:
            data += chunk
            head, end, body = data.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            if not end or len(body) < int(length[1]):
                continue
            self.times += 1
            refused = self.times % 7 == 0
            if not refused:
                delivery = json.loads(body)
                assert f"idempotency-key: {delivery['key']}".encode() in head.lower()
                self.got.append(delivery)
            await trio.sleep(0.01)
            await stream.send_all(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % (503 if refused else 204))
            data = b""


@pytest.mark.long
async def test_services_are_killed_that_deliver_and_nothing_is_lost_or_passed_on_twice(serve, raw):
    hook = Hook()
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, hook.serve, 0, host="127.0.0.1"))
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/"
        sinks = json.dumps(
            [{"name": "books", "url": url, "secret": "books-0123456789", "kinds": ["event"], "max_tries": 1000}]
        )
        start = partial(serve, {"process.again": 4}, tasks="service_processes:tasks", sinks=sinks, **FAST)
        services = [await start() for _ in range(2)]
        for counter in ("c0", "c1"):
            await raw.run(aio_ask, Request(type="again", process_id=counter, kind="init"), LEASE_S)
        while await raw.fetchval("SELECT count(*) FROM dl_processes WHERE status = 'init'"):  # noqa: ASYNC110
            await trio.sleep(0.02)
        for number in range(CALLS * 2):
            request = Request(
                type="again", process_id=f"c{number % 2}", kind="call", method="add_and_tell", args=number + 1
            )
            await raw.run(aio_ask, request, LEASE_S)
            if number % 10 == 5 and number < 10 * KILLS:
                # Stored and not delivered, or delivered and not recorded.
                with trio.fail_after(patience_s()):
                    while not await raw.fetchval("SELECT count(*) FROM dl_process_outbox"):  # noqa: ASYNC110
                        await trio.sleep(0.001)
                services.pop(0).process.kill()
                services.append(await start())
        with trio.fail_after(90):
            while await raw.fetchval(  # noqa: ASYNC110
                "SELECT (SELECT count(*) FROM dl_process_outbox)"
                " + (SELECT count(*) FROM dl_process_tasks WHERE status = 'waiting')"
            ):
                await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    check(hook.got, await raw.fetch(EVENTS))


def check(got, rows):
    """Check that the deliveries equal the stored events, in their order, and the passed-on messages the sent ones."""
    events = defaultdict(list)
    for process_id, payload in rows:
        events[process_id].append(payload)
    for counter, first in (("c0", 1), ("c1", 2)):
        assert events[counter] == list(range(first, CALLS * 2 + 1, 2))
        # Once each, in the order in which they were sent.
        assert events[f"mirror of {counter}"] == events[counter]
    told, keys = defaultdict(list), set()
    for delivery in got:
        if delivery["key"] not in keys:
            keys.add(delivery["key"])
            told[delivery["process_id"]].append(delivery["payload"])
    assert told == events
