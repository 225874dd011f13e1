"""The service that the ETL tests load from must record requests correctly, or those tests prove nothing."""

from __future__ import annotations

import pytest
import trio
from source_app import Answer
from walking import ask

from dataloader.flows.etl.sources.http import Http
from dataloader.flows.etl.sources.source import Request, SourceError

pytestmark = pytest.mark.requirement("S7")


@pytest.mark.slow
async def test_requests_at_once_and_pauses_between_them_are_seen(service):
    service.put("/x", Answer(b"[]"))
    source, request = Http(service.url), Request(endpoint="/x")
    with trio.fail_after(60):
        async with source.open() as connection:
            for _ in range(3):
                await connection.fetch(request, timeout_s=30)
                await trio.sleep(0.05)
            assert service.most_at_once() == 1
            assert len(service.pauses()) == 2
            assert all(pause >= 0.04 for pause in service.pauses())  # its clock stops a little late
            service.misbehave(times=None, delay_s=0.5)
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(lambda: connection.fetch(request, timeout_s=30))
    assert service.most_at_once() == 3


async def test_faults_count_down_and_hit_what_they_match(service):
    service.put("/a", Answer(b"[]"))
    service.put("/b", Answer(b"[]"))
    service.misbehave("/a", times=2, status=500)
    service.misbehave("/b", times=None, status=503)
    source, seen = Http(service.url), []
    for path in "aaabb":
        try:
            seen.append((await ask(source, Request(endpoint=f"/{path}"))).status)
        except SourceError as error:
            seen.append(error.status)
    assert seen == [500, 500, 200, 503, 503]
    assert [one.status for one in service.requests] == seen
    assert len(service.asked("/a")) == 3
    service.behave()
    assert (await ask(source, Request(endpoint="/b"))).status == 200
