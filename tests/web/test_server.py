"""How the server starts and ends, whatever its clients do."""

from __future__ import annotations

import socket

import httpx
import pytest
import trio

pytestmark = pytest.mark.requirement("Q5")


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
            with trio.fail_after(12):
                await web.stopped.wait()
        finally:
            lazy.close()


async def test_after_the_stop_connections_are_refused_and_a_long_poll_is_cut(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger()
        cut = trio.Event()

        async def wait() -> None:
            with pytest.raises(httpx.RemoteProtocolError):
                await web.client.get(f"/api/v1/jobs/{job_id}/status?wait=60", timeout=60)
            cut.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            while await trio.to_thread.run_sync(database.psql, "SELECT watched FROM dl_jobs") != "t":
                await trio.lowlevel.checkpoint()
            web.stop.set()
            with trio.fail_after(10):
                await web.stopped.wait()
                await cut.wait()
        async with httpx.AsyncClient() as other:
            with pytest.raises(httpx.ConnectError):
                await other.get(f"{web.url}/health")


async def test_a_reader_who_leaves_stops_waiting(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger()
        with trio.move_on_after(10) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(web.client.get, f"/api/v1/jobs/{job_id}/status?wait=60")
                while not web.services.waits._watches:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
            while web.services.waits._watches:
                await trio.sleep(0.01)
        assert not scope.cancelled_caught
