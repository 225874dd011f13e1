"""Signals to a service: it ends in good order, or at least in time (Q15)."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import AsyncExitStack, suppress
from functools import partial
from urllib.parse import urlsplit

import pytest
import trio
from conditions import until
from proxy import open_proxy
from services import FAST, LEASE_S, all_at_once

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Two equal pending signals are merged; these are three."""


@pytest.mark.full
@pytest.mark.requirement("Q15")
@pytest.mark.parametrize("number", STOPS)
async def test_a_signal_lets_running_jobs_finish_and_ends_with_0(serve, add, ledger, row_when, tmp_path, number):
    service = await serve()
    job_id = await add("visit", {"until": str(tmp_path / "now")})
    await until(ledger.visits)
    service.signal(number)
    await service.logged("draining: no new jobs are claimed")
    (tmp_path / "now").touch()
    assert await service.exit_code(within_s=40) == 0
    assert (await row_when(job_id, "succeeded", within_s=0))["attempt"] == 1
    drained = await service.logged("drained")
    assert (drained["finished"], drained["returned"]) == (1, 0)


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_a_job_that_does_not_finish_in_time_is_released_with_its_attempt_refunded(serve, add, row_when):
    service = await serve(drain_timeout_sec=0.3)
    job_id = await add("sleep", {"s": 3_600})
    await row_when(job_id, "running")
    service.signal(signal.SIGTERM)
    assert await service.exit_code(within_s=40) == 0
    row = await row_when(job_id, "queued", within_s=0)
    assert (row["attempt"], row["waits_for"]) == (0, None)


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_f12_an_unread_log_delays_no_drain(serve, add, row_when):
    service = await serve(drain_timeout_sec=1)
    job_id = await add("sleep", {"s": 3_600})
    await row_when(job_id, "running")
    service.is_read.clear()
    log = os.open(f"/proc/{service.process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    try:
        for _ in range(10):  # until the reader has also taken its last piece
            await until(partial(fill, log), lambda written: not written)
            await trio.sleep(0.1)
    finally:
        os.close(log)
    service.signal(signal.SIGTERM)
    # At the limit of the drain the process would exit with 1.
    assert await service.exit_code(within_s=40) == 0
    assert (await row_when(job_id, "queued", within_s=0))["attempt"] == 0
    assert not any(line["event"] == "drained" for line in service.lines)


async def fill(pipe):
    """Fill a pipe; its reader takes one more piece before it stops."""
    written = 0
    with suppress(BlockingIOError):
        while True:
            written += os.write(pipe, b"-\n" * 500)
    return written


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_a_second_signal_stops_the_jobs_immediately(serve, add, row_when):
    service = await serve(drain_timeout_sec=3_600)
    job_id = await add("sleep", {"s": 3_600})
    await row_when(job_id, "running")
    service.signal(signal.SIGTERM)
    await service.logged("signal: draining")
    service.signal(signal.SIGTERM)
    assert await service.exit_code(within_s=40) == 0
    assert sum("are stopped and released" in line["event"] for line in service.lines) == 1
    assert (await row_when(job_id, "queued", within_s=0))["attempt"] == 0


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_a_third_signal_ends_the_process_despite_running_handlers(serve, add, row_when):
    service = await serve(drain_timeout_sec=3_600)
    job_id = await add("deaf")
    await row_when(job_id, "running")
    for line in ("signal: draining", "second signal: stopping", "third signal"):
        service.signal(signal.SIGINT)
        await service.logged(line)
    assert await service.exit_code(within_s=20) == 1


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_a_thread_that_never_returns_is_named_and_left_behind(serve, add, row_when):
    service = await serve(drain_timeout_sec=0.2)
    job_id = await add("deaf thread")
    await row_when(job_id, "running")
    service.signal(signal.SIGTERM)
    assert await service.exit_code(within_s=0.2 + 10 + 20) == 1
    drained = await service.logged("not drained: handlers did not stop")
    assert (drained["level"], drained["stuck"]) == ("error", [str(job_id)])
    assert not any(line["event"] == "drained" for line in service.lines)
    assert await service.logged("exiting with code 1")


@pytest.mark.full
@pytest.mark.requirement("Q15")
async def test_a_drain_with_the_database_gone_ends_in_time(serve, add, ledger, no_claim_is_due, database):
    """Four run concurrently, each with a separate queue: the test takes long because none gives up early."""
    codes = {"cut busy": 1, "cut idle": 0, "freeze busy": 1, "freeze idle": 0}
    async with AsyncExitStack() as stack:
        proxies = {queue: await stack.enter_async_context(open_proxy(database.dsn)) for queue in codes}

        def start(queue):
            return serve({queue: 1}, dsn=proxies[queue].dsn, drain_timeout_sec=0.5, poll_sec=3_600)

        for queue in codes:
            if "busy" in queue:
                await add("visit", {"s": 3_600}, queue=queue)
        services = await all_at_once(*(partial(start, queue) for queue in codes))
        await until(ledger.visits, lambda visits: len(visits) == 2)
        for queue, service in zip(codes, services, strict=True):
            await until(partial(no_claim_is_due, service, proxies[queue]))
        for queue, service in zip(codes, services, strict=True):
            getattr(proxies[queue], queue.split()[0])()
            service.signal(signal.SIGTERM)
        # 0.5 s and ten more, and some for a slow machine.
        ends = await all_at_once(*(partial(service.exit_code, within_s=0.5 + 10 + 30) for service in services))
    assert dict(zip(codes, ends, strict=True)) == codes


@pytest.mark.slow
@pytest.mark.requirement("Q15")
@pytest.mark.parametrize("back", [True, False], ids=["back in time", "gone"])
async def test_f10_a_claim_with_a_lost_reply_is_released_or_the_exit_code_reports_it(
    serve, add, row_when, raw, database, back
):
    async with open_proxy(database.dsn) as proxy:
        service = await serve(dsn=proxy.dsn, drain_timeout_sec=0.2, poll_sec=3_600)
        proxy.freeze_at("locks", b"its claim")
        job_id = await add("sleep", {"s": 3_600}, lock_key="its claim", lease_ttl_sec=600)
        await row_when(job_id, "running")
        proxy.cut()
        proxy.thaw()
        await service.logged("the database is unavailable")
        service.signal(signal.SIGTERM)
        await service.logged("draining: no new jobs are claimed")
        if back:
            proxy.mend()
        assert await service.exit_code(within_s=0.2 + 10 + 20) == (0 if back else 1)
    await row_when(job_id, "queued" if back else "running", within_s=0)


@pytest.mark.full
@pytest.mark.requirement("Q15")
async def test_a_client_that_stops_reading_holds_nothing_up(serve, client_of):
    service = await serve(drain_timeout_sec=0.2)
    async with client_of(service) as client:
        size = len((await client.get("/openapi.json")).content)
    address = urlsplit(service.url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.connect((address.hostname, address.port))
        # More than the system's buffers hold, one answer after the other.
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * (10_000_000 // size))
        await trio.to_thread.run_sync(client.recv, 1)  # the answer has begun, and is blocked
        service.signal(signal.SIGTERM)
        assert await service.exit_code(within_s=0.2 + 10 + 20) == 0


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_a_signal_while_the_database_is_not_there_yet_ends_with_0(serve, database, client_of):
    async with open_proxy(database.dsn) as proxy:
        proxy.cut()
        service = await serve(dsn=proxy.dsn, ready="the database is unavailable")
        service.signal(signal.SIGTERM)
        assert await service.exit_code(within_s=30) == 0


@pytest.mark.full
@pytest.mark.requirement("Q15")
@pytest.mark.parametrize("signals", [1, 3])
async def test_f07_a_handler_that_blocks_the_loop_does_not_prevent_the_exit(serve, add, ledger, signals):
    service = await serve(drain_timeout_sec=0.2 if signals == 1 else 3_600)
    # The second never lets Python's signal handler run.
    await add("visit", {"block": 3_600} if signals == 3 else {"native": True})
    await until(ledger.visits)
    await service.logged("the event loop is blocked")
    for number in STOPS[:signals]:
        service.signal(number)
    assert await service.exit_code(within_s=0.2 + 10 + 20) == 1


async def chats_to_nobody(service, add, ledger):
    """Run a handler that is blocked by its own lines, since the process's log is not read any more."""
    service.is_read.clear()
    job_id = await add("visit", {"chat": 500}, lease_ttl_sec=LEASE_S)
    await until(ledger.visits)
    await trio.sleep(1)
    return job_id


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_f12_an_unread_log_does_not_keep_the_process_from_ending(serve, add, ledger):
    service = await serve(drain_timeout_sec=3_600, default_lease_ttl_sec=3_600)
    await chats_to_nobody(service, add, ledger)
    for number in STOPS:
        service.signal(number)
    assert await service.exit_code(within_s=20) == 1


@pytest.mark.full
@pytest.mark.requirement("Q8")
async def test_f07_a_process_blocked_on_its_log_exits_after_its_leases_and_the_grace(serve, add, ledger, raw, row_when):
    blocked = await serve(cancel_grace_sec=1, **FAST)
    job_id = await chats_to_nobody(blocked, add, ledger)
    await raw.execute("UPDATE dl_jobs SET args = '{}'")
    await serve(**FAST)
    assert await blocked.exit_code(within_s=LEASE_S + 1 + 30) == 1
    await ledger.died(blocked.process.pid)
    assert (await row_when(job_id, "succeeded"))["crashes"] == 1


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_signals_of_forked_children_are_not_the_process_s_own(serve, add, row_when):
    service = await serve(drain_timeout_sec=1)
    await row_when(await add("children"), "succeeded")
    await trio.sleep(2)  # three signals sent to it would have ended it by now
    await row_when(await add("quick"), "succeeded")
    assert service.process.poll() is None
    service.signal(signal.SIGTERM)
    assert await service.exit_code(within_s=40) == 0


@pytest.mark.full
@pytest.mark.requirement("Q8")
async def test_f07_a_process_with_a_blocked_loop_exits_after_its_leases_and_the_grace(
    serve, add, ledger, raw, row_when
):
    blocked = await serve(cancel_grace_sec=1, **FAST)
    job_id = await add("visit", {"block": 3_600}, lease_ttl_sec=LEASE_S)
    await until(ledger.visits)
    await raw.execute("UPDATE dl_jobs SET args = '{}'")
    await serve(**FAST)
    assert await blocked.exit_code(within_s=LEASE_S + 1 + 30) == 1
    await ledger.died(blocked.process.pid)
    assert (await row_when(job_id, "succeeded"))["crashes"] == 1
