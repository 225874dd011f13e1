"""Handlers in child processes: none outlives its lease, its service or its stop, whatever it does and what is killed.

A handler holds a kernel lock for its key (`flock`), and so does a daemon that it leaves behind: only their end frees
it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
from collections import Counter
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
from conditions import until
from services import FAST, LEASE_S

CHAOS_S = float(os.environ.get("CHILD_CHAOS_SECONDS", "60"))
SLOTS = 3
TURNS = 10
FAULTS = {"service killed", "service stopped", "body", "guard killed", "guard stopped"}


def state_of(pid):
    """Return the state and the parent of a process; an ended one has none."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
    except OSError:
        return b"X", 0
    return state, int(parent)


def is_alive(pid):
    return state_of(pid)[0] not in {b"Z", b"X"}


def end(shown):
    """End the processes that a build without a guard leaves behind."""
    for pid in (shown["pid"], shown["daemon"]):
        with suppress(OSError):
            if b"DATALOADER_CHILD=" in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)


def processes_with(variable):
    """Return all live processes that have inherited this variable."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if variable.encode() in (entry / "environ").read_bytes().split(b"\0") and is_alive(int(entry.name)):
                found.append(int(entry.name))
    return found


@pytest.fixture
def ignoring(serve, add, raw):
    """Return a context with a service whose only job ignores everything, and a second service for its next run."""

    @asynccontextmanager
    async def ignoring():
        service = await serve({"q": 1}, tasks="child_tasks:tasks", **FAST)
        job = await add("ignores", lease_ttl_sec=LEASE_S)

        async def shown():
            text = await raw.fetchval("SELECT progress::text FROM dl_jobs WHERE job_id = $1", job)
            return None if text is None else json.loads(text)

        first = await until(shown)
        try:
            yield service, first
        except BaseException:
            end(first)
            raise
        await serve({"q": 1}, tasks="child_tasks:tasks", **FAST)

        async def is_another():
            return await shown() != first

        await until(is_another)
        begun.append(first)

    begun = []
    yield ignoring
    for first in begun:
        end(first)


@pytest.mark.full
async def test_handlers_of_a_killed_service_die_immediately(ignoring):
    async with ignoring() as (service, first):
        service.signal(signal.SIGKILL)

        async def are_gone():
            return not is_alive(first["pid"]) and not is_alive(first["daemon"])

        await until(are_gone, within_s=LEASE_S / 2)


@pytest.mark.slow
async def test_no_handler_of_a_suspended_service_lives_when_its_job_may_run_again(ignoring):
    async with ignoring() as (service, first):
        service.signal(signal.SIGSTOP)
    assert not is_alive(first["pid"])
    assert not is_alive(first["daemon"])
    service.signal(signal.SIGCONT)
    await service.logged("the job was stopped")


@pytest.mark.full
async def test_a_handler_whose_service_and_guard_are_suspended_dies_before_its_lease_ends(ignoring):
    async with ignoring() as (service, first):
        service.signal(signal.SIGSTOP)
        os.kill(state_of(first["pid"])[1], signal.SIGSTOP)
    assert not is_alive(first["pid"])
    service.signal(signal.SIGCONT)
    await service.logged("the job was stopped")

    async def is_gone():
        return not is_alive(first["daemon"])

    await until(is_gone)


@pytest.mark.full
async def test_a_service_answers_and_cancels_beside_bodies_that_compute(serve, add, raw, counts, client_of):
    """Answers take no longer than with idle handlers, on the same machine in the same seconds."""
    service = await serve({"q": 4}, tasks="child_tasks:tasks", child_grace_sec=1)
    for _ in range(2):
        await add("ignores")

    async def shown():
        rows = await raw.fetch("SELECT progress->>'pid' AS pid FROM dl_jobs WHERE progress ? 'pid'")
        return [int(row["pid"]) for row in rows]

    bodies = await until(shown, lambda pids: len(pids) == 2)
    took = {signal.SIGSTOP: [], signal.SIGCONT: []}
    async with client_of(service) as client:
        await client.get("/health")
        for _turn, number in itertools.product(range(TURNS), took):
            for body in bodies:
                os.kill(body, number)
            await trio.sleep(0.05)
            for _ in range(50):
                began = trio.current_time()
                await client.get("/health")
                took[number].append(trio.current_time() - began)
                await trio.sleep(0.005)
    # The medians: a busy machine delays some answers of both kinds.
    resting_s, computing_s = map(statistics.median, took.values())
    assert computing_s <= max(0.02, 2 * resting_s)
    began = trio.current_time()
    await raw.execute("UPDATE dl_jobs SET cancel_requested = true")
    await until(counts, lambda now: now == {"canceled": 2})
    assert trio.current_time() - began < 1 + 1


class Chaos:
    """Two services, and faults of them and their children: one fault at a time for each child."""

    def __init__(self, start, mark):
        self.start, self.mark, self.chance = start, mark, random.Random(0)
        self.services = []
        self.happened = Counter()

    def children_of(self, parent):
        return [pid for pid in processes_with(self.mark) if state_of(pid)[1] == parent]

    async def fault(self):
        what = self.chance.choice(sorted(FAULTS))
        index = self.chance.randrange(2)
        service = self.services[index]
        if what == "service killed":
            service.process.kill()
            await trio.to_thread.run_sync(service.process.wait, 20)
            self.services[index] = await self.start()
        elif what == "service stopped":
            service.signal(signal.SIGSTOP)
            await trio.sleep(self.chance.choice((0.5, LEASE_S + 3)))
            service.signal(signal.SIGCONT)
        elif guards := self.children_of(service.process.pid):
            with suppress(ProcessLookupError):
                await self.fault_of_child(what, self.chance.choice(guards))
        else:
            return
        self.happened[what] += 1

    async def fault_of_child(self, what, guard):
        if what == "body":
            for body in self.children_of(guard)[:1]:
                os.kill(body, self.chance.choice((signal.SIGKILL, signal.SIGSTOP)))
        elif what == "guard killed":
            os.kill(guard, signal.SIGKILL)
            await trio.sleep(1)  # its service must live meanwhile
        else:
            os.kill(guard, signal.SIGSTOP)
            await trio.sleep(self.chance.choice((0.5, LEASE_S)))
            os.kill(guard, signal.SIGCONT)
            await trio.sleep(1)


@pytest.mark.long
@pytest.mark.full
async def test_chaos_never_runs_two_handlers_of_a_key_and_leaves_no_process(serve, add, counts, tmp_path):
    """For `CHILD_CHAOS_SECONDS`, 60: services, guards and handlers are killed and stopped."""
    folder = tmp_path / "locks"
    folder.mkdir()

    async def start():
        settings = FAST | {"child_grace_sec": 0.5, "drain_timeout_sec": 5}
        return await serve({"q": SLOTS}, tasks="child_tasks:tasks", environment={"CHAOS": str(folder)}, **settings)

    async def all_ended():
        return {"queued", "running"}.isdisjoint(await counts())

    chaos = Chaos(start, f"CHAOS={folder}")
    chaos.services = [await start(), await start()]
    ends_at = trio.current_time() + CHAOS_S
    # A busy machine takes longer until each kind of fault has happened.
    while (now := trio.current_time()) < ends_at or (chaos.happened.keys() != FAULTS and now < ends_at + 180):
        for _ in range(8 - (await counts()).get("queued", 0)):
            s, key = chaos.chance.choice((0.1, 0.5, 1.5, 3_600)), chaos.chance.randrange(5)
            await add("holds", {"s": s}, lock_key=f"key {key}", lease_ttl_sec=LEASE_S)
        await trio.sleep(chaos.chance.uniform(0.2, 1.0))
        await chaos.fault()
    await until(all_ended, within_s=240)
    overlaps = folder / "overlaps"
    assert not overlaps.exists(), overlaps.read_text()
    # No slot is lost: each service runs as many jobs as it has slots.
    for _ in range(4 * SLOTS):
        await add("noop")
    await until(all_ended, within_s=120)
    for service in chaos.services:
        service.signal(signal.SIGTERM)
    for service in chaos.services:
        assert await service.exit_code(within_s=90) == 0, "\n".join(map(str, service.lines[-20:]))

    async def nothing_is_left():
        return not processes_with(chaos.mark)

    await until(nothing_is_left, within_s=60)
    assert chaos.happened.keys() == FAULTS, chaos.happened
