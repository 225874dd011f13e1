"""Where the next claim looks and how much it asks for, without a database and without a clock (Q6)."""

from __future__ import annotations

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
    PAUSE_S,
    Ask,
    ClaimCursor,
)
from dataloader.jobs.ids import uuid7
from dataloader.store.queue.lock_session import Claim

pytestmark = pytest.mark.requirement("Q6")

JOB = uuid7()
POLL_S = 2.0
JITTER = 1.2


def brought(jobs=0, *, more=False, passed_over=False, last=None):
    """What a claim brought. Nobody looks at the jobs themselves."""
    return Claim([None] * jobs, [0.0] * jobs, more, passed_over, last, [], 0.0)


def after(cursor, now, *, woken=False):
    return cursor.next(8, now, woken=woken).after


def test_what_became_ready_is_looked_for_at_once_unless_looks_at_the_front_are_dear():
    cursor, now = ClaimCursor(), 100.0

    def claim(*, behind, takes_s):
        nonlocal now
        began, now = now, now + takes_s
        cursor.answered(Ask(8, 0, behind, began), brought(8, more=True, last=JOB), now)

    assert after(cursor, now) is None
    claim(behind=None, takes_s=LOOK_BACK_S - 0.1)  # held up, once
    assert (after(cursor, now, woken=True), after(cursor, now)) == (None, JOB)
    claim(behind=None, takes_s=CHEAP_LOOK_S)
    assert (after(cursor, now, woken=True), after(cursor, now)) == (None, JOB)
    now += LOOK_BACK_S
    assert after(cursor, now) is None

    for _ in range(2):
        claim(behind=None, takes_s=CHEAP_LOOK_S + 0.04)
    claim(behind=JOB, takes_s=LOOK_BACK * 0.04 - 0.1)
    assert after(cursor, now, woken=True) == JOB
    assert after(cursor, now + 0.1, woken=True) is None


def test_behind_a_crowd_that_can_not_run_each_claim_looks_further_until_the_slots_are_taken():
    cursor, looks = ClaimCursor(), []
    for _ in range(5):
        ask = cursor.next(4, 0.0, woken=False)
        looks.append(ask.look)
        cursor.answered(ask, brought(1, more=True), 0.0)
    assert looks == [0, 16, 64, 256, MAX_LOOK]
    cursor.answered(cursor.next(4, 0.0, woken=False), brought(4, more=True), 0.0)
    assert cursor.next(4, 0.0, woken=False).look == 0


def test_a_claim_that_fails_is_made_again_after_ever_longer_pauses_for_ever_fewer_jobs():
    cursor = ClaimCursor()
    cursor.answered(cursor.next(100, 0.0, woken=False), brought(), 0.0)
    pauses, slots = [], []
    for _ in range(9):
        slots.append(cursor.next(100, 0.0, woken=False).slots)
        pauses.append(cursor.failed())
        assert cursor.more
    assert slots == [64, 32, 16, 8, 4, 2, 1, 1, 1]
    assert PAUSE_S / JITTER <= pauses[0] <= PAUSE_S * JITTER
    assert MAX_PAUSE_S / JITTER - 1 <= pauses[-1] <= MAX_PAUSE_S * JITTER
    cursor.answered(cursor.next(100, 0.0, woken=False), brought(1, more=True), 0.0)
    assert cursor.next(100, 0.0, woken=False).slots == 2
    assert cursor.failed() <= PAUSE_S * JITTER


def test_rows_that_were_locked_are_looked_for_soon_and_then_more_and_more_rarely():
    cursor, waits = ClaimCursor(), []
    assert cursor.wait_s(POLL_S) == POLL_S
    for _ in range(9):
        cursor.answered(cursor.next(4, 0.0, woken=False), brought(passed_over=True), 0.0)
        assert not cursor.more
        waits.append(cursor.wait_s(POLL_S))
    assert waits[0] <= LOCKED_PAUSE_S * JITTER
    assert MAX_LOCKED_PAUSE_S / JITTER - 0.1 <= waits[-1] <= MAX_LOCKED_PAUSE_S * JITTER
    cursor.answered(cursor.next(4, 0.0, woken=False), brought(), 0.0)
    assert cursor.wait_s(POLL_S) == POLL_S


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


@given(STEPS)
def test_whatever_claims_bring_the_next_one_is_within_its_bounds_and_the_front_is_never_forgotten(steps):
    cursor, now, front_at = ClaimCursor(), 0.0, 0.0
    for free, takes_s, woken, outcome, more, passed_over in steps:
        ask = cursor.next(free, now, woken=woken)
        assert 1 <= ask.slots <= min(free, MAX_CLAIM)
        assert ask.look <= MAX_LOOK
        # The longest a look at the front can be put off: some claims of a second each, ten times their excess apart.
        assert ask.after is None or now - front_at <= LOOK_BACK
        front_at = now if ask.after is None else front_at
        now += takes_s
        if outcome == "failed":
            now += cursor.failed()
            continue
        jobs = {"none": 0, "some": ask.slots // 2, "all": ask.slots}[outcome]
        cursor.answered(ask, brought(jobs, more=more, passed_over=passed_over, last=JOB if more else None), now)
        assert cursor.more == more
        assert 0 < cursor.wait_s(POLL_S) <= POLL_S
