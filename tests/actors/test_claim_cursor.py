"""Position and size of the next claim, without a database and without a clock (Q6)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloader.actors.claim_cursor import (
    CHEAP_LOOK_S,
    LOCKED_PAUSE_S,
    LOOK_BACK,
    LOOK_BACK_S,
    MAX_CLAIM,
    MAX_LOCKED_PAUSE_S,
    MAX_LOOK,
    MAX_PAUSE_S,
    MIN_CLAIM,
    PAUSE_S,
    ClaimCursor,
    NextClaim,
    largest_claim,
)
from dataloader.jobs.ids import uuid7
from dataloader.store.queue.claim import Claim

pytestmark = pytest.mark.requirement("Q6")

JOB = uuid7()
POLL_S = 2.0
JITTER = 1.2


def brought(jobs=0, *, more=False, passed_over=False, blocked=False, last=None):
    """Return the result of a claim. The jobs themselves are not read."""
    return Claim([None] * jobs, [0.0] * jobs, more, passed_over, last, [], 0.0, blocked=blocked)


def after(cursor, now, *, woken=False):
    return cursor.next(8, now, woken=woken).after


def claim(cursor, now, *, behind=None, takes_s=0.0, jobs=8, **brings):
    """Make a claim that begins at `now`; return the time of its answer."""
    brings = {"more": True} | brings
    cursor.answered(NextClaim(8, 0, behind, now), brought(jobs, last=JOB if jobs else None, **brings), now + takes_s)
    return now + takes_s


def test_in_a_backlog_newly_ready_jobs_are_searched_immediately():
    cursor = ClaimCursor()
    assert after(cursor, 100.0) is None
    now = claim(cursor, 100.0, takes_s=LOOK_BACK_S - 0.1)  # delayed, once
    assert after(cursor, now) == JOB
    assert after(cursor, now, woken=True) is None
    now = claim(cursor, now, takes_s=CHEAP_LOOK_S)
    assert after(cursor, now) == JOB
    assert after(cursor, now + LOOK_BACK_S) is None


def test_slow_checks_of_the_front_take_at_most_a_tenth_of_the_time():
    cursor, now, fronts, behind = ClaimCursor(), 0.0, [], 0
    while now < 20:
        woken = cursor.wait_s(POLL_S, now) > 0
        ask = cursor.next(8, now, woken=woken)
        if ask.after is None:
            fronts.append(now)
        else:
            behind += 1
        takes_s = 0.1 if ask.after is None else 0.001
        # While a slow check runs, other callers add jobs, whose rows it has not seen.
        now = claim(cursor, now, behind=ask.after, takes_s=takes_s, jobs=1, more=False, passed_over=ask.after is None)
        now += 0.001  # until the next job becomes ready
    pauses = [later - earlier for earlier, later in itertools.pairwise(fronts[2:])]
    assert behind > 5_000
    assert min(pauses) >= LOOK_BACK * (0.1 - CHEAP_LOOK_S)
    assert max(pauses) <= LOOK_BACK * 0.1 + 0.1 + 0.01


def test_a_slow_check_of_the_front_follows_its_pause_without_new_ready_jobs():
    cursor = ClaimCursor()
    now = claim(cursor, claim(cursor, 0.0, takes_s=0.1), takes_s=0.1, more=False)
    assert cursor.wait_s(POLL_S, now) == POLL_S
    ask = cursor.next(8, now, woken=True)
    assert ask.after == JOB
    # An urgent job, which is ahead of those that were claimed.
    now = claim(cursor, now, behind=JOB, takes_s=0.001, jobs=0, more=False)
    assert not cursor.more
    assert not cursor.found_all
    assert 0 < cursor.wait_s(POLL_S, now) <= LOOK_BACK * 0.1
    now += cursor.wait_s(POLL_S, now)
    assert after(cursor, now) is None
    claim(cursor, now, takes_s=0.1, jobs=1, more=False)
    assert cursor.found_all


def test_a_backlog_ends_with_a_check_of_the_front():
    cursor = ClaimCursor()
    now = claim(cursor, 0.0, takes_s=CHEAP_LOOK_S)
    assert after(cursor, now) == JOB
    now = claim(cursor, now, behind=JOB, jobs=1, more=False)
    assert cursor.more
    # It also finds jobs that became ready meanwhile: no other check is due for them.
    assert after(cursor, now, woken=True) is None
    claim(cursor, now, takes_s=CHEAP_LOOK_S, jobs=1, more=False)
    assert cursor.found_all


def test_a_slow_check_of_the_front_at_the_end_of_a_backlog_waits_for_its_pause():
    """A job that becomes ready meanwhile is claimed immediately, instead of after the check."""
    cursor = ClaimCursor()
    checked_at = claim(cursor, 0.0, takes_s=0.1)
    now = claim(cursor, claim(cursor, checked_at, takes_s=0.1), behind=JOB, jobs=1, more=False)
    assert not cursor.more
    assert after(cursor, now, woken=True) == JOB
    cursor = ClaimCursor()
    checked_at = claim(cursor, 0.0, takes_s=0.1)
    now = claim(cursor, claim(cursor, checked_at, takes_s=0.1), behind=JOB, jobs=1, more=False)
    assert now + cursor.wait_s(POLL_S, now) == pytest.approx(checked_at + LOOK_BACK * (0.1 - CHEAP_LOOK_S))
    assert after(cursor, now + cursor.wait_s(POLL_S, now)) is None


def test_checks_of_the_front_are_not_delayed_if_all_claims_are_slow():
    cursor = ClaimCursor()
    now = claim(cursor, claim(cursor, 0.0, behind=JOB, takes_s=0.1), behind=JOB, takes_s=0.1)
    now = claim(cursor, claim(cursor, now, takes_s=0.12), takes_s=0.12)
    assert after(cursor, now, woken=True) is None


def test_claims_scan_further_past_blocked_jobs_until_the_slots_are_filled():
    cursor, looks = ClaimCursor(), []
    for _ in range(5):
        ask = cursor.next(4, 0.0, woken=False)
        looks.append(ask.look)
        cursor.answered(ask, brought(1, more=True), 0.0)
    assert looks == [0, 16, 64, 256, MAX_LOOK]
    cursor.answered(cursor.next(4, 0.0, woken=False), brought(4, more=True), 0.0)
    assert cursor.next(4, 0.0, woken=False).look == 0


def test_a_failed_claim_is_retried_with_growing_pauses_and_fewer_slots():
    cursor = ClaimCursor()
    cursor.answered(cursor.next(100, 0.0, woken=False), brought(), 0.0)
    pauses, slots = [], []
    for _ in range(9):
        slots.append(cursor.next(100, 0.0, woken=False).slots)
        pauses.append(cursor.failed())
        assert cursor.more
    assert slots == [64, 32, 16, 8, 4, 2, 1, 1, 1]
    assert PAUSE_S * 0.8 <= pauses[0] <= PAUSE_S * JITTER
    assert MAX_PAUSE_S * 0.8 - 1 <= pauses[-1] <= MAX_PAUSE_S * JITTER
    cursor.answered(cursor.next(100, 0.0, woken=False), brought(1, more=True), 0.0)
    assert cursor.next(100, 0.0, woken=False).slots == 2
    assert cursor.failed() <= PAUSE_S * JITTER


def test_rows_that_were_locked_are_looked_for_soon_and_then_more_and_more_rarely():
    cursor, waits = ClaimCursor(), []
    assert cursor.wait_s(POLL_S, 0.0) == POLL_S
    for _ in range(9):
        cursor.answered(cursor.next(4, 0.0, woken=False), brought(passed_over=True), 0.0)
        assert not cursor.more
        waits.append(cursor.wait_s(POLL_S, 0.0))
    assert waits[0] <= LOCKED_PAUSE_S * JITTER
    assert MAX_LOCKED_PAUSE_S * 0.8 - 0.1 <= waits[-1] <= MAX_LOCKED_PAUSE_S * JITTER
    cursor.answered(cursor.next(4, 0.0, woken=False), brought(), 0.0)
    assert cursor.wait_s(POLL_S, 0.0) == POLL_S


def test_behind_a_block_rows_that_may_be_locked_are_looked_for_soon():
    """Such a claim does not search for locked rows, and no notification is sent when a lock is released."""
    cursor = ClaimCursor()
    for _ in range(20):
        now = claim(cursor, 0.0, jobs=0, more=False, blocked=True)
        assert not cursor.found_all
        assert cursor.wait_s(POLL_S, now) <= MAX_LOCKED_PAUSE_S * JITTER


def test_a_queue_claims_half_of_its_slots_in_one_statement_within_bounds():
    sizes = [largest_claim(concurrency) for concurrency in (1, 100, 200, 1_000)]
    assert sizes == [MIN_CLAIM, MIN_CLAIM, 100, MAX_CLAIM]


STEPS = st.lists(
    st.tuples(
        st.integers(1, 200),  # free slots
        st.floats(0, 1),  # seconds that the claim takes
        st.booleans(),  # woken
        st.sampled_from(["failed", "none", "some", "all"]),
        st.booleans(),  # more
        st.booleans(),  # passed over
    ),
    max_size=40,
)


@pytest.mark.slow
@given(STEPS, st.integers(MIN_CLAIM, MAX_CLAIM))
def test_each_claim_stays_within_bounds_and_the_front_is_checked_regularly(steps, most):
    cursor, now, front_at = ClaimCursor(most), 0.0, 0.0
    for free, takes_s, woken, outcome, more, passed_over in steps:
        ask = cursor.next(free, now, woken=woken)
        assert 1 <= ask.slots <= min(free, most)
        assert ask.look <= MAX_LOOK
        # Maximum delay of a check of the front: some claims of a second each, with pauses of ten times their excess.
        assert ask.after is None or now - front_at <= LOOK_BACK
        front_at = now if ask.after is None else front_at
        now += takes_s
        if outcome == "failed":
            now += cursor.failed()
            continue
        jobs = {"none": 0, "some": ask.slots // 2, "all": ask.slots}[outcome]
        cursor.answered(ask, brought(jobs, more=more, passed_over=passed_over, last=JOB if more else None), now)
        assert cursor.more or not more
        assert 0 <= cursor.wait_s(POLL_S, now) <= POLL_S
