"""Deadlines of runs and the reasons to stop them, without a database (Q4, Q7, Q8)."""

from __future__ import annotations

import math

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from dataloader.actors.job_runs import REMEMBERED_CANCELS, Run, Runs
from dataloader.actors.lease import Lease
from dataloader.jobs.ids import uuid7
from dataloader.jobs.lease_margin import margin_s
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import StopReason

pytestmark = pytest.mark.requirement("Q8")

LEASE_S = 60


def new_run(token=1, *, key="k", lease_until=math.inf):
    """Return a run of a job with or without a `key`."""
    job = ClaimedJob(
        job_id=uuid7(), token=token, queue="q", task="t", args="{}", lock_key=key, lock_hash=key and hash(key),
        partition_key="", attempt=1, max_attempts=5, lease_s=LEASE_S,
    )  # fmt: skip
    return Run(job=job, lease=Lease(LEASE_S, lease_until), claimed_at=0)


MOMENTS = st.floats(0, 1_000) | st.just(math.inf)


@pytest.mark.slow
@given(lease=MOMENTS, key=MOMENTS, timeout=MOMENTS, period=MOMENTS, committed=st.booleans())
def test_a_run_ends_at_its_earliest_bound_before_its_job_or_key_is_given_away(lease, key, timeout, period, committed):
    ends, reason = Lease(LEASE_S, lease, key, timeout, period).body_ends(committed=committed)
    bounds = {StopReason.TIMEOUT: timeout, StopReason.KEY_LOST: key, StopReason.PERIOD_END: period}
    if not committed:
        bounds[StopReason.LEASE_ENDED] = lease - margin_s(LEASE_S)
    assert ends == min(bounds.values())
    assert bounds[reason] == ends
    assert Lease(LEASE_S, lease, key, timeout).commit_ends() == min(lease - margin_s(LEASE_S), key)


def test_a_renewal_that_was_sent_before_another_one_takes_nothing_from_it():
    lease = Lease(LEASE_S, 100.0)
    lease.renewed(90.0)
    lease.renewed(50.0)
    assert lease.until == 150.0


@pytest.mark.requirement("Q7")
async def test_runs_without_a_key_continue_when_keys_may_be_lost(autojump_clock):
    runs, ended = Runs(), {}
    with_key, without = new_run(1), new_run(2, key=None)

    async def body(run):
        with run.open_scope():
            await trio.sleep(LEASE_S)
        ended[run.job.token] = run.stopped_by() if run.scope.cancelled_caught else None

    async with trio.open_nursery() as nursery:
        runs.key_is_safe_until(trio.current_time() + 30)
        for run in (with_key, without):
            runs.add(run)
            nursery.start_soon(body, run)
        await trio.sleep(1)
        runs.key_is_safe_until(trio.current_time() + 4)
        assert (with_key.deadline, without.deadline) == (trio.current_time() + 4, math.inf)
    assert ended == {1: StopReason.KEY_LOST, 2: None}


@pytest.mark.requirement("Q12")
async def test_a_commit_may_take_as_long_as_lease_and_key_then_only_the_key_counts(autojump_clock):
    runs, run, now = Runs(), new_run(lease_until=trio.current_time() + LEASE_S), trio.current_time()
    runs.add(run)
    run.open_scope()
    runs.key_is_safe_until(now + 1_000)
    commit = run.shield_commit()
    assert commit.deadline == now + LEASE_S - margin_s(LEASE_S)
    runs.key_is_safe_until(now + 20)
    assert commit.deadline == now + 20
    run.commit_ended(well=True)
    runs.key_is_safe_until(now + 2_000)
    assert run.deadline == now + 2_000
    run.commit_ended(well=False)
    assert run.deadline == now + LEASE_S - margin_s(LEASE_S)


@pytest.mark.requirement("Q4")
async def test_a_cancel_means_one_run_also_where_it_comes_before_the_claims_reply(autojump_clock):
    runs, early, other = Runs(), new_run(7), new_run(8)
    runs.add(other)
    runs.cancel(7)
    assert runs.take_asked() == []
    assert not runs.asked.is_set
    runs.add(early)
    assert runs.asked.is_set
    assert runs.take_asked() == [early]
    assert runs.take_asked() == []
    runs.cancel(8)
    assert runs.take_asked() == [other]
    # It stops no run by itself: every role may notify, and the row decides.
    assert not early.is_stopped
    assert not other.is_stopped


@pytest.mark.requirement("Q4")
async def test_cancels_of_runs_that_never_come_are_forgotten_in_the_end(autojump_clock):
    runs, forgotten, remembered = Runs(), new_run(0), new_run(REMEMBERED_CANCELS)
    for token in range(REMEMBERED_CANCELS + 1):
        runs.cancel(token)
    runs.add(forgotten)
    runs.add(remembered)
    assert runs.take_asked() == [remembered]
