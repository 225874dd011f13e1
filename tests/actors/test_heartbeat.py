"""Reactions of the heartbeat to its answers, and to missing ones; its database is a substitute of the test."""

from __future__ import annotations

import itertools
import math
from contextlib import asynccontextmanager

import pytest
import trio
from logged import capture_logs

from dataloader.actors.heartbeat import RETRY_S, Heartbeat
from dataloader.actors.job_runs import Run, Runs
from dataloader.actors.lease import Lease
from dataloader.actors.outage import Outage
from dataloader.jobs.errors import StoreUnavailable
from dataloader.jobs.ids import uuid7
from dataloader.jobs.lease_margin import margin_s
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import StopReason
from dataloader.store.queue.leases import Beat, Pulse
from dataloader.store.queue.worker_rows import SignOfLife

pytestmark = pytest.mark.requirement("Q8")

PERIOD_S, LEASE_S = 10, 60


class Database:
    """Renews all leases except those with another result in `found`; if it is `away`, no request is answered.

    `beats` has the times of the heartbeats, with the tokens and whether to write an event for each.
    """

    def __init__(self) -> None:
        self.away = False
        self.found: dict[int, Beat] = {}
        self.cancels: set[int] = set()
        self.beats: list[tuple[float, dict[int, bool]]] = []

    async def open(self) -> None:
        """Open the heartbeat's connection."""

    async def write(self, _show, _worker, _last_seen_at) -> SignOfLife:
        """Write the row of the worker."""
        return SignOfLife(None, "", is_kept=True)

    async def write_within(self, _timeout_s, _beat, beats):
        self.beats.append((trio.current_time(), {token: journal for _, token, journal in beats}))
        if self.away:
            raise StoreUnavailable("gone")
        pulses = [Pulse(token, self.found.get(token, Beat.RENEWED), token in self.cancels) for _, token, _ in beats]
        return trio.current_time(), pulses


class Locks:
    """Has no key, and cannot revive a lease."""

    def holds(self, _token: int) -> bool:
        return False

    async def revive(self, _keyed, *, timeout_s: float) -> set[int]:
        del timeout_s
        return set()


@asynccontextmanager
async def beating(database: Database, runs: Runs):
    """Run a heartbeat for the duration of a block."""
    heartbeat = Heartbeat(
        session=database, locks=Locks(), database=database, worker=None, runs=runs, outage=Outage(), period_s=PERIOD_S
    )  # fmt: skip
    runs.attend = heartbeat.wake.set
    async with trio.open_nursery() as nursery:
        await nursery.start(heartbeat.run)
        yield heartbeat
        nursery.cancel_scope.cancel()


def begin(runs: Runs, token: int = 1, *, lease_s: int = LEASE_S) -> Run:
    """Return a run that has just been claimed, of a job with a key."""
    now = trio.current_time()
    job = ClaimedJob(
        job_id=uuid7(), token=token, queue="q", task="t", args="{}", lock_key="k", lock_hash=1, partition_key="",
        attempt=1, max_attempts=5, lease_s=lease_s,
    )  # fmt: skip
    run = Run(job=job, lease=Lease(lease_s, now + lease_s), claimed_at=now)
    runs.add(run)
    return run


async def body_of(run: Run) -> float:
    """Run a handler that does not end by itself; return the time at which it was stopped."""
    with run.open_scope():
        await trio.sleep_forever()
    return trio.current_time()


@pytest.mark.requirement("Q11")
async def test_each_run_is_journalled_once_a_minute(autojump_clock):
    database, runs = Database(), Runs()
    async with beating(database, runs):
        first = begin(runs, 1)
        await trio.sleep(35)
        second = begin(runs, 2)
        await trio.sleep(200)
        runs.remove(first)
        runs.remove(second)
    for run in (first, second):
        told = [at - run.claimed_at for at, beats in database.beats if beats.get(run.job.token)]
        assert told[0] < 60 + PERIOD_S
        assert [later - sooner for sooner, later in itertools.pairwise(told)] == [60] * (len(told) - 1)
        assert len(told) == 3


async def test_in_an_outage_the_heartbeat_retries_and_runs_stop_before_their_lease_ends(autojump_clock):
    database, runs = Database(), Runs()
    with capture_logs():
        async with beating(database, runs):
            run, began = begin(runs), trio.current_time()
            await trio.sleep(100)
            renewed = database.beats[-1][0]
            database.away = True
            stopped_at = await body_of(run)
            assert (run.stopped_by(), stopped_at) == (StopReason.LEASE_ENDED, renewed + LEASE_S - margin_s(LEASE_S))
            assert renewed > began
            tries = [at for at, _ in database.beats if at > renewed]
            assert {round(later - sooner, 6) for sooner, later in itertools.pairwise(tries)} == {RETRY_S}


async def test_a_database_that_is_back_before_the_lease_ends_costs_no_run(autojump_clock):
    database, runs = Database(), Runs()
    with capture_logs():
        async with beating(database, runs):
            run = begin(runs)
            database.away = True
            await trio.sleep(LEASE_S - margin_s(LEASE_S) - 2 * RETRY_S)
            database.away = False
            await trio.sleep(LEASE_S)
    assert (run.stop_reason, run.is_stopped) == (None, False)
    assert run.lease.until > trio.current_time() + LEASE_S - 2 * PERIOD_S


async def test_a_lease_shorter_than_the_period_is_renewed_in_time_from_its_claim_on(autojump_clock):
    database, runs = Database(), Runs()
    async with beating(database, runs):
        begin(runs, 1)
        await trio.sleep(PERIOD_S * 2.5)
        run, claimed_at = begin(runs, 2, lease_s=3), trio.current_time()
        await trio.sleep(30)
        assert (run.stop_reason, run.is_stopped) == (None, False)
        times = [claimed_at, *(at for at, beats in database.beats if 2 in beats)]
        assert max(later - sooner for sooner, later in itertools.pairwise(times)) <= 1


@pytest.mark.requirement("Q4", "Q9")
async def test_the_heartbeat_stops_lost_and_cancelled_runs_and_repeats_unknown_ones(autojump_clock):
    database, runs = Database(), Runs()
    with capture_logs():
        async with beating(database, runs):
            lost, cancelled, locked, well = [begin(runs, token) for token in (1, 2, 3, 4)]
            await trio.sleep(PERIOD_S / 2)
            database.found = {1: Beat.LOST, 3: Beat.UNKNOWN}
            database.cancels = {2}
            began = len(database.beats)
            await trio.sleep(PERIOD_S)
            assert (lost.stop_reason, cancelled.stop_reason) == (StopReason.LEASE_LOST, StopReason.CANCEL)
            assert (locked.stop_reason, well.stop_reason) == (None, None)
            assert len(database.beats) - began > PERIOD_S / 2 / RETRY_S - 2
            database.found = {}
            await trio.sleep(PERIOD_S)
            assert locked.lease.until > trio.current_time() + LEASE_S - 2 * PERIOD_S
            assert math.isinf(well.stopped_at)


@pytest.mark.requirement("Q4")
async def test_a_notified_cancel_checks_only_its_own_run_and_immediately(autojump_clock):
    database, runs = Database(), Runs()
    async with beating(database, runs):
        first, second = begin(runs, 1), begin(runs, 2)
        await trio.sleep(PERIOD_S / 4)
        database.cancels, before = {2}, len(database.beats)
        runs.cancel(2)
        await trio.sleep(0.001)
        assert [list(beats) for _, beats in database.beats[before:]] == [[2]]
        assert (first.stop_reason, second.stop_reason) == (None, StopReason.CANCEL)
