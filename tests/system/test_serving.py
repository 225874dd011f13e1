"""A service under load and its logs (Q5, Q16)."""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
from pathlib import Path

import pytest
import trio
from conditions import until


@pytest.mark.full
@pytest.mark.requirement("Q5")
async def test_health_answers_within_20_ms_while_200_slots_churn(unmeasured, serve, raw, client_of):
    service = await serve({"a": 100, "b": 100})
    more = (
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key) SELECT gen_random_uuid(),"
        " CASE n % 2 WHEN 0 THEN 'a' ELSE 'b' END, 'churn', gen_random_uuid()::text FROM generate_series(1, 4000) AS n"
    )
    done = "SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'"
    left = "SELECT count(*) FROM dl_jobs WHERE status = 'queued'"
    least_left = []

    async def feed(*, task_status):
        await raw.execute(more)
        await until(lambda: raw.fetchval(done), lambda count: count > 200)
        task_status.started()
        while True:
            least_left.append(await raw.fetchval(left))
            if least_left[-1] < 3_000:
                await raw.execute(more)
            await trio.sleep(0.05)

    ours_ms = []
    async with client_of(service) as client, trio.open_nursery() as nursery:
        await nursery.start(feed)
        await client.get("/health")
        for _ in range(300):
            pids = (service.process.pid, os.getpid())
            began, before = trio.current_time(), [queued_for_a_core_s(pid) for pid in pids]
            answer = await client.get("/health")
            took_s = trio.current_time() - began
            queued_s = [queued_for_a_core_s(pid) - was for pid, was in zip(pids, before, strict=True)]
            ours_ms.append((took_s - max(queued_s)) * 1_000)
            assert answer.status_code == 200
            await trio.sleep(0.005)
        nursery.cancel_scope.cancel()
    assert min(least_left) > 0, "the slots had nothing to do for a while"
    # A benchmark measures the 99th percentile. Here other processes share the cores: their time is subtracted.
    assert statistics.median(ours_ms) <= 20


def queued_for_a_core_s(pid):
    """Return the seconds for which a process's main thread was ready to run while others had the cores."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


@pytest.mark.slow
@pytest.mark.requirement("Q3", "Q16", "Q17")
async def test_every_line_of_a_job_says_whose_it_is_and_none_shows_a_secret(serve, add, row_when, client_of):
    service = await serve()
    # A job of another service is run and shown.
    job_id = await add("quick", {"answer": 42})
    await row_when(job_id, "succeeded")
    async with client_of(service) as client:
        shown = (await client.get(f"/api/v1/jobs/{job_id}")).json()
    assert (shown["status"], shown["result"], shown["attempt"]) == ("succeeded", 42, 1)

    job_id = await add("log", {"password": "sesame"})
    row = await until(lambda: row_when(job_id, "queued"), lambda row: row["error"])
    written = await service.logged("a line")
    assert (written["job_id"], written["queue"], written["task"], written["attempt"]) == (str(job_id), "q", "log", 1)
    assert (written["password"], written["url"], written["rows"]) == ("***", "https://***@h/", 3)
    failed = await service.logged("the job failed")
    assert (failed["job_id"], failed["queue"], failed["task"], failed["attempt"]) == (str(job_id), "q", "log", 1)
    assert failed["exception"].startswith("Traceback (most recent call last):")
    assert "in log\n" in failed["exception"]
    warned = await service.logged("what is worth a look")
    assert (warned["logger"], warned["level"], warned["job_id"]) == ("dataloader.job", "warning", str(job_id))
    assert warned["fields"] == {"password": "***", "event": 7}
    assert "what is only kept" not in json.dumps(service.lines)
    assert "sesame" not in json.dumps(service.lines)
    assert "sesame" not in row["error"]
    assert all(line["level"] != "no JSON" for line in service.lines)


@pytest.mark.slow
@pytest.mark.requirement("Q16")
async def test_a_setting_sends_logs_of_jobs_and_requests_to_the_processs_log(serve, add, row_when, client_of):
    service = await serve(log_level="debug", job_log_level="info")
    job_id = await add("log")
    await until(lambda: row_when(job_id, "queued"), lambda row: row["error"])
    await service.logged("the job failed")
    assert _logged_by_jobs(service) == ["what is only kept", "what is worth a look"]

    # The lines of a request contain its ID.
    async with client_of(service) as client:
        answer = await client.post(
            "/api/v1/jobs/trigger",
            json={"queue": "q", "task": "quick", "lock_key": "k"},
            headers={"X-Request-ID": "from-outside-1"},
        )
        assert answer.headers["x-request-id"] == "from-outside-1"
    request = await service.logged("request")
    assert request["request_id"] == "from-outside-1"


@pytest.mark.slow
@pytest.mark.requirement("Q16")
async def test_logs_of_jobs_are_not_in_the_processs_log_if_switched_off(serve, add, row_when):
    service = await serve(job_log_level="off")
    job_id = await add("log")
    await until(lambda: row_when(job_id, "queued"), lambda row: row["error"])
    await service.logged("the job failed")
    assert _logged_by_jobs(service) == []


def _logged_by_jobs(service):
    return [line["event"] for line in service.lines if line["logger"] == "dataloader.job"]


@pytest.mark.full
@pytest.mark.requirement("Q15")
async def test_a_part_that_gives_up_drains_the_process_which_ends_with_1_and_names_it(serve, add, row_when, raw):
    service = await serve(drain_timeout_sec=0.5, poll_sec=0.2, claim_backoff_sec=0.1)
    job_id = await add("sleep", {"s": 3_600})
    await row_when(job_id, "running")
    # Waiting does not repair that, and it is no outage.
    await raw.execute("DROP FUNCTION dl_claim_known")
    await add("quick")
    assert await service.exit_code(within_s=90) == 1
    assert "the claims of q gave up" in service.lines[-1]["cause"]
    assert (await row_when(job_id, "queued", within_s=0))["attempt"] == 0


@pytest.mark.full
@pytest.mark.requirement("Q3", "Q15")
async def test_waiting_readers_are_answered_on_shutdown_and_do_not_delay_it(serve, add, client_of, raw):
    service = await serve()
    job_id = await add("quick", queue="nobody serves it")
    answers = []

    async def wait(client):
        answers.append(await client.get(f"/api/v1/jobs/{job_id}/status?wait=60", timeout=60))

    async with client_of(service) as client, trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(wait, client)
        await until(lambda: raw.fetchval("SELECT watched FROM dl_jobs"))
        at_work = 'dataloader_http_connections{phase="working"}'

        async def waiting():
            lines = (await client.get("/metrics")).text.splitlines()
            return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(at_work))

        await until(waiting, lambda number: number >= 30)
        service.signal(signal.SIGTERM)
    assert [(answer.status_code, answer.json()["status"]) for answer in answers] == [(200, "queued")] * 30
    assert await service.exit_code(within_s=60) == 0
    assert [line["event"] for line in service.lines if line["level"] in {"error", "critical", "no JSON"}] == []


@pytest.mark.slow
@pytest.mark.requirement("Q5")
async def test_a_service_opens_as_many_files_as_it_is_allowed_and_serves_fewer_connections(serve, tmp_path):
    """The process itself may raise the usual limit of 1,024, but not a hard one of 64."""
    few = tmp_path / "few"
    few.write_text('#!/bin/sh\nulimit -Sn 64\nexec "$@"\n')
    few.chmod(0o755)
    service = await serve(launcher=[str(few)])
    soft, hard = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
    assert soft == hard > 64
    few.write_text('#!/bin/sh\nulimit -n 64\nexec "$@"\n')
    service = await serve(launcher=[str(few)])
    said = await service.logged("fewer connections than")
    assert (said["served"], said["max_connections"]) == (48, 500)
