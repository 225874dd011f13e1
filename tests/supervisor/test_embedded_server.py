"""The embedded PostgreSQL of a running service: however it ends, it is started again, and jobs continue."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import threading
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import httpx2
import pytest
import trio
from conditions import until
from logged import capture_logs

from dataloader import ActorGaveUp, Settings, Tasks
from dataloader.jobs.errors import EmbeddedDatabaseError
from dataloader.store.embedded.cluster import VERSION, Cluster
from dataloader.store.embedded.postgres import embedded_postgres
from dataloader.store.embedded.server_account import open_path
from dataloader.store.embedded.server_programs import programs_of
from dataloader.supervisor.embedded_server import keep_server
from dataloader.supervisor.supervisor import open_starting

pytestmark = pytest.mark.requirement("Q7")

GOES_ON_S = 30
"""Maximum seconds for which jobs may stop after the server's death."""
TASKS = """
import trio
from dataloader.jobs.tasks import Tasks
tasks = Tasks()

@tasks.task("quick")
async def quick(job):
    return {}

@tasks.task("long")
async def long(job):
    await trio.sleep(2.5)
    return {}
"""


class Service:
    """A running `dataloader serve` on an embedded database, and its log lines."""

    def __init__(self, process):
        self.process = process
        self.lines = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(json.loads(line))

    async def logged(self, event):
        async def found():
            return next((line for line in [*self.lines] if line["event"] == event), None)

        return await until(found, within_s=60)

    def count(self, event):
        return sum(line["event"] == event for line in [*self.lines])


@pytest.fixture
def cluster(tmp_path):
    """Return a function that returns the files of the services' database."""
    return lambda: Cluster.in_directory(tmp_path / ".dataloader", 18)


@pytest.fixture
def serve(start, tmp_path):
    """Return a function that starts a service and waits until it is ready."""
    (tmp_path / "my_tasks.py").write_text(TASKS)

    async def serve():
        arguments = ("--tasks", "my_tasks:tasks", "--port", 0, "--workers", '[{"queue": "q", "concurrency": 8}]')
        service = Service(start("serve", *arguments, DL_LOG_FORMAT="json", DL_HEARTBEAT_SEC="1"))
        service.url = (await service.logged("serving"))["url"]
        return service

    return serve


@asynccontextmanager
async def asking(service):
    """Trigger jobs of the service like a client that retries, and wait for their ends."""
    async with httpx2.AsyncClient(base_url=service.url, timeout=20) as client:

        async def trigger(task, key):
            async def triggered():
                job = {"queue": "q", "task": task, "idempotency_key": key, "lock_key": key}
                answer = await client.post("/api/v1/jobs/trigger", json=job)
                return answer.json()["job_id"] if answer.status_code in {200, 201, 202} else None

            return await until(triggered, within_s=GOES_ON_S)

        async def succeeded(job_id):
            async def job():
                answer = await client.get(f"/api/v1/jobs/{job_id}/status")
                return answer.status_code == 200 and answer.json()

            ended = await until(job, lambda job: job and job["status"] not in {"queued", "running"}, within_s=60)
            assert ended["status"] == "succeeded", ended

        yield trigger, succeeded


def kill_backend(cluster):
    backends = [
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdigit() and b"dataloader" in _command_of(process) and b"idle" in _command_of(process)
    ]
    os.kill(next(pid for pid in backends if cluster.owns_process(pid)), signal.SIGKILL)


def _command_of(process):
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def kill_postmaster(cluster):
    os.kill(cluster.postmaster().pid, signal.SIGKILL)


def stop_by_hand(cluster):
    account = {"user": cluster.programs.uid, "group": cluster.programs.gid} if os.geteuid() == 0 else {}
    command = [cluster.programs.bin_dir / "pg_ctl", "stop", "--pgdata=.", "--mode=fast"]
    subprocess.run(command, cwd=cluster.directory, check=True, timeout=60, stdout=subprocess.DEVNULL, **account)


@pytest.mark.full
async def test_jobs_continue_after_each_end_of_the_embedded_server(serve, cluster):
    service = await serve()
    async with asking(service) as (trigger, succeeded):
        for number, end in enumerate([kill_postmaster, kill_backend, stop_by_hand, kill_postmaster]):
            running = [await trigger("long", f"long {number} {place}") for place in range(4)]
            await trio.to_thread.run_sync(end, cluster())
            with trio.fail_after(GOES_ON_S):
                await succeeded(await trigger("quick", f"quick {number}"))
            for job_id in running:
                await succeeded(job_id)
    service.process.send_signal(signal.SIGTERM)
    assert await trio.to_thread.run_sync(partial(service.process.wait, timeout=60)) == 0
    assert not (cluster().directory / "postmaster.pid").exists()
    # The server itself recovers from the death of one of its processes. Its own death is one log line, with its last
    # output.
    failures = [line for line in service.lines if line["event"] == "a part failed and is restarted"]
    hows = ["it was killed", "it was shut down", "it was killed"]
    assert [how in line["cause"] for how, line in zip(hows, failures, strict=True)] == [True] * 3
    assert not any("exception" in line for line in failures)


@pytest.mark.full
async def test_one_of_two_services_restarts_their_shared_server_and_both_continue(serve, cluster):
    services = [await serve(), await serve()]
    former = cluster().postmaster().pid
    kill_postmaster(cluster())
    pids = set()
    for number, service in enumerate(services):
        async with asking(service) as (trigger, succeeded):
            await succeeded(await trigger("quick", f"quick {number}"))
        pids.add(cluster().postmaster().pid)
    assert len(pids) == 1
    assert former not in pids
    # It continues for the other when the service that may have started it ends.
    await ended(services[0], 0)
    assert cluster().state() == "ready"
    # A second signal while it is about to stop the server makes it report that the server was not stopped.
    with cluster().serialized():
        services[1].process.send_signal(signal.SIGTERM)
        await services[1].logged("left the embedded PostgreSQL, which stops when no other process uses it")
        # After a signal before it waits here, it would nevertheless stop the server.
        lock = cluster().data_dir / "start.lock"
        await until(partial(trio.to_thread.run_sync, has_open, services[1].process.pid, lock))
        await ended(services[1], 128 + signal.SIGTERM)
    await services[1].logged("ended by a signal after the drain; an embedded PostgreSQL may still be running")
    assert cluster().state() == "ready"
    cluster().stop()


def has_open(pid, path):
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if file.readlink() == path:
                return True
    return False


async def ended(service, code):
    service.process.send_signal(signal.SIGTERM)
    assert await trio.to_thread.run_sync(partial(service.process.wait, timeout=60)) == code


@pytest.mark.slow
async def test_where_processes_can_not_be_watched_the_server_is_asked(tmp_path, monkeypatch):
    def no_such_call(_pid):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", no_such_call)

    async def kill_later(server):
        # Nothing is logged while it runs.
        await trio.sleep(1)
        os.kill(server.pid, signal.SIGKILL)

    with embedded_postgres(tmp_path, extra_settings={"fsync": "off"}) as server, trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_later, server)
            # Its own processes may still write a last line.
            killed = rf"process {server.pid}\) has ended: it was killed (.|\n)* is ready to accept connections(\n|$)"
            with pytest.raises(EmbeddedDatabaseError, match=killed):
                await keep_server(server, look_s=0.05)


# PostgreSQL's pg_ctl, which kills and records each server that it has started, once the file next to it exists.
KILLING = """#!/bin/sh
{real} "$@"
status=$?
if [ "$1" = start ] && [ -e {started} ]; then
  head -1 postmaster.pid >> {started}
  kill -KILL "$(head -1 postmaster.pid)"
fi
exit $status
"""


@pytest.mark.full
async def test_a_server_that_keeps_ending_uses_up_its_restarts_and_ends_the_supervisor(tmp_path):
    """Each one ends before it has been found ready: its starter must not start another one for it."""
    programs, note = tmp_path / "programs", tmp_path / "programs" / "started"
    programs.mkdir()
    open_path(programs)
    for program in programs_of(VERSION).iterdir():
        (programs / program.name).symlink_to(program)
    pg_ctl = programs / "pg_ctl"
    pg_ctl.unlink()
    pg_ctl.write_text(KILLING.format(real=programs_of(VERSION) / "pg_ctl", started=note))
    pg_ctl.chmod(0o755)
    with (
        embedded_postgres(tmp_path / "data", extra_settings={"fsync": "off"}, bin_dir=programs) as server,
        capture_logs() as lines,
        trio.fail_after(120),
    ):
        note.touch()
        note.chmod(0o666)  # the server runs as another account
        os.kill(server.pid, signal.SIGKILL)
        settings = Settings(db_dsn=server.dsn, workers=())
        gave_up = "the embedded PostgreSQL gave up after 5 restarts in 60 s; the last cause was EmbeddedDatabaseError: "
        with pytest.raises(ActorGaveUp, match=gave_up + "PostgreSQL ended immediately after its start"):
            async with open_starting(settings, Tasks(), with_web=False, server=server) as supervisor:
                await supervisor.wait_drained()
        started = note.read_text().split()
    # On a slow machine, more than five may start in more than a minute.
    assert len(started) >= 1 + 5
    assert not server.is_running()
    said = [line for line in lines if line["event"] == "a part failed and is restarted"]
    assert len(said) == len(started)
    assert not any("exc_info" in line for line in said)
