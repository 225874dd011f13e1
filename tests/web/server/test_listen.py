"""Start and end of the server, whatever its clients do."""

from __future__ import annotations

import importlib
import pkgutil
import socket
from contextlib import suppress

import httpx2
import pytest
import trio
from conditions import patience_s
from logged import capture_logs

from dataloader import web
from dataloader.web.server.limits import HttpLimits

pytestmark = pytest.mark.requirement("Q5")


@pytest.mark.slow
async def test_a_client_that_stops_reading_does_not_hold_up_the_shutdown(open_web):
    async with open_web(max_batch_body_bytes=16 << 20, max_body_bytes=16 << 20) as web:
        job_id = await web.trigger(args={"text": "x" * 12_000_000})
        host, port = web.url.removeprefix("http://").split(":")
        lazy = socket.create_connection((host, int(port)))
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            lazy.sendall(f"GET /api/v1/jobs/{job_id} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert await trio.to_thread.run_sync(lazy.recv, 100)
            web.stop.set()
            with trio.fail_after(patience_s()):
                await web.stopped.wait()
        finally:
            lazy.close()


@pytest.mark.slow
async def test_after_the_stop_connections_are_refused_and_a_long_poll_is_cut(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger()
        cut = trio.Event()

        async def wait() -> None:
            with pytest.raises(httpx2.RemoteProtocolError):
                await web.client.get(f"/api/v1/jobs/{job_id}/status?wait=60", timeout=60)
            cut.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            while await trio.to_thread.run_sync(database.psql, "SELECT watched FROM dl_jobs") != "t":
                await trio.lowlevel.checkpoint()
            web.stop.set()
            with trio.fail_after(patience_s()):
                await web.stopped.wait()
                await cut.wait()
        async with httpx2.AsyncClient(verify=False) as other:
            with pytest.raises(httpx2.ConnectError):
                await other.get(f"{web.url}/health")


async def test_a_disconnected_reader_stops_waiting(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger()
        with trio.move_on_after(10) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(web.client.get, f"/api/v1/jobs/{job_id}/status?wait=60")
                while not web.services.performer.waits._watches:
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            while web.services.performer.waits._watches:
                await trio.lowlevel.checkpoint()
        assert not scope.cancelled_caught


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_line", ["GET /health HTTP/1.1\r\nHost: a\r\nConnection: close", "GET /health HTTP/1.0"]
)
async def test_a_connection_is_closed_when_the_client_asks_for_it(open_web, request_line):
    async with open_web() as web:
        host, port = web.url.removeprefix("http://").split(":")
        with trio.fail_after(patience_s()):
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                await stream.send_all(f"{request_line}\r\n\r\n".encode())
                received = b"".join([part async for part in stream])
        assert received.endswith(b'{"status":"ok"}')


async def test_an_unread_body_is_answered_and_cut_off(open_web):
    async with open_web(limits=HttpLimits(close_s=0.1)) as web:
        host, port = web.url.removeprefix("http://").split(":")
        with trio.fail_after(patience_s()):
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                await stream.send_all(
                    b"POST /api/v1/jobs/trigger HTTP/1.1\r\nHost: localhost\r\n"
                    b"Content-Type: application/json\r\nContent-Length: 40000000000\r\n\r\n"
                )
                with suppress(trio.BrokenResourceError):
                    while True:
                        await stream.send_all(b"x" * 1_000_000)
                assert b" 413 " in await stream.receive_some(4096)


@pytest.mark.slow
@pytest.mark.parametrize("more", [b"", b"\xff" * 3_000], ids=["alone", "with frames"])
@pytest.mark.parametrize(
    "body",
    [b"\r\n", b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n"],
    ids=["no body", "a body", "an endless body"],
)
async def test_a_websocket_request_is_answered_by_http_without_a_logged_error(open_web, body, more):
    with capture_logs() as lines:
        async with open_web() as web:
            host, port = web.url.removeprefix("http://").split(":")
            with trio.fail_after(patience_s()):
                async with await trio.open_tcp_stream(host, int(port)) as stream:
                    await stream.send_all(
                        b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n" + body + more
                    )
                    assert b"HTTP/1.1 40" in await stream.receive_some(4096)
    assert [line for line in lines if line["log_level"] in {"error", "critical"}] == []


def test_no_module_keeps_what_belongs_to_one_app():
    """A limiter or an event of Trio belongs to one run; two apps in one process may each have a separate run."""
    shared = [
        f"{module.name}.{name}"
        for module in pkgutil.iter_modules(web.__path__, "dataloader.web.")
        for name, value in vars(importlib.import_module(module.name)).items()
        if isinstance(value, trio.CapacityLimiter | trio.Semaphore | trio.Lock | trio.Event)
    ]
    assert shared == []
