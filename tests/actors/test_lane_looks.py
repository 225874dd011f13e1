"""Times at which lanes are read: after a notification, when their wait is over, and all of them from time to time."""

from __future__ import annotations

import math

import pytest

from dataloader.actors.lane_looks import CLOSED_S, MAX_APART_S, MAX_LOCKED_S, LaneLooks
from dataloader.store.queue.claim import Claim


def claim(*lanes, more=False):
    return Claim([], [], more, passed_over=False, last=None, to_test=[], sent_at=0, lanes=list(lanes))


@pytest.fixture
def looks():
    """Return the state of two lanes that were read at 0, and are empty."""
    looks = LaneLooks(poll_s=10)
    looks.learned(["b", "a"])
    assert looks.due(0) == ["a", "b"]
    looks.answered(claim(("a", "empty", None), ("b", "empty", None)), 0)
    return looks


def test_an_empty_lane_is_checked_after_a_notification_or_by_the_poll(looks):
    assert looks.due(1) == []
    assert looks.wait_s(1) == 9
    assert looks.told("a")
    assert not looks.told("of others")
    assert looks.wait_s(1) == 0
    assert looks.due(1) == ["a"]
    assert looks.due(10) == ["a", "b"], "also in a queue that never rests"


def test_a_notification_during_a_claim_counts_for_the_next_claim(looks):
    looks.told("a")
    looks.due(1)
    looks.told("a")
    looks.answered(claim(("a", "empty", None)), 2)
    assert looks.due(2) == ["a"]


def test_a_closed_lane_is_looked_at_when_it_may_open(looks):
    looks.told("a")
    looks.due(1)
    looks.answered(claim(("a", "budget", 3)), 2)
    assert looks.wait_s(2) == 3
    assert (looks.due(4.9), looks.due(5)) == ([], ["a"])


def test_an_open_lane_is_looked_at_again_while_slots_are_lacking(looks):
    looks.told("a")
    looks.due(1)
    looks.answered(claim(("a", None, None), more=True), 2)
    assert looks.due(2) == ["a"]
    looks.answered(claim(("a", None, None)), 3)
    assert looks.due(3) == []


def test_a_locked_lane_is_checked_again_soon_and_then_less_often(looks):
    now, pauses = 1.0, []
    for _ in range(10):
        looks.told("a")
        looks.due(now)
        looks.answered(claim(("a", "locked", 0.01)), now)
        pauses.append(looks.wait_s(now))
    assert pauses[:3] == pytest.approx([0.01, 0.02, 0.04])
    assert pauses[-1] == MAX_LOCKED_S
    looks.answered(claim(("a", "empty", None)), now)
    looks.answered(claim(("a", "locked", 0.01)), now)
    assert looks.wait_s(now) == pytest.approx(0.01)


def test_a_claim_that_failed_has_looked_at_nothing(looks):
    looks.told("a")
    looks.failed(looks.due(1))
    assert looks.due(1) == ["a"]


def test_a_process_without_lanes_looks_at_none():
    looks = LaneLooks(poll_s=1)
    looks.learned([])
    assert (looks.wait_s(5), looks.due(5)) == (math.inf, [])


def test_lanes_of_a_paused_queue_are_due_when_it_is_resumed(looks):
    looks.told("a")
    looks.due(1)
    looks.answered(claim(), 1, ["a"])
    looks.answered(claim(), 2, [])
    assert looks.due(3) == []
    looks.queue_told()
    assert looks.due(3) == ["a"]
    looks.answered(claim(("a", "empty", None)), 3, ["a"])
    looks.queue_told()
    assert looks.due(3) == []


def judge(looks, now, bad):
    """Make a claim from each lane that is due separately, of which `bad` is refused; return their names."""
    judged = []
    while (lane := looks.due_apart(now)) is not None:
        judged.append(lane)
        if lane == bad:
            looks.refused_apart(lane, "an error", now)
        else:
            looks.answered(claim((lane, None, None)), now, [lane])
            looks.worked_apart(lane, now)
    return judged


def test_after_a_refusal_each_lane_is_judged_by_itself_and_the_bad_one_is_closed(looks):
    looks.learned(["a", "b", "c"])
    looks.refused(looks.due(1), 1)
    assert looks.due(1) == []
    assert judge(looks, 1, "b") == ["a", "b", "c"]
    for lane in ("a", "b", "c"):
        assert looks.told(lane)
    assert (looks.due(1), looks.due_apart(1), looks.closed) == (["a", "c"], None, 1)


def test_a_closed_lane_is_tried_alone_after_growing_pauses_and_changes_of_limits(looks):
    looks.refused(looks.lanes, 1)
    now, pauses = 1.0, []
    for _ in range(10):
        judge(looks, now, "a")
        looks.told("a")
        looks.due(now)
        pauses.append(looks.wait_s(now) if looks.wait_s(now) < 9 else looks._look_at["a"] - now)
        now = looks._look_at["a"]
    assert pauses[0] == pytest.approx(CLOSED_S[0], rel=0.25)
    assert pauses[1] == pytest.approx(2 * CLOSED_S[0], rel=0.25)
    assert pauses[-1] == pytest.approx(CLOSED_S[1], rel=0.25)
    looks.learned(["a", "b"])
    assert looks.due_apart(now) == "a"
    assert looks.worked_apart("a", now)
    looks.told("a")
    assert (looks.due(now), looks.closed) == (["a", "b"], 0)


def test_an_error_is_new_when_a_lane_closes_and_when_its_text_changes(looks):
    looks.refused(["a"], 1)
    assert looks.refused_apart("a", "one", 1)
    assert not looks.refused_apart("a", "one", 2)
    assert looks.refused_apart("a", "another", 3)
    looks.learned(["b"])
    assert looks.closed == 0, "its task is gone"


def test_lanes_that_are_refused_only_together_stay_apart_for_longer_each_time(looks):
    now, apart = 1.0, []
    for _ in range(9):
        looks.refused(["a", "b"], now)
        judge(looks, now, None)
        began = now
        while not looks.due(now):
            now += 0.5
            looks.told("a")
            looks.told("b")
            judge(looks, now, None)
            looks.told("a")
            looks.told("b")
        apart.append(now - began)
    assert apart[0] <= 0.5
    assert apart[1:4] == pytest.approx([4, 8, 16], abs=1)
    assert apart[-1] == pytest.approx(MAX_APART_S, abs=1)
    looks.answered(claim(("a", None, None), ("b", None, None)), now, ["a", "b"])
    looks.refused(["a", "b"], now)
    judge(looks, now, None)
    looks.told("a")
    assert looks.due(now) == ["a"]


def test_an_outage_while_a_closed_lane_is_tried_does_not_forget_the_lane(looks):
    looks.refused(["a"], 1)
    looks.refused_apart("a", "an error", 1)
    assert looks.due_apart(3) == "a"
    looks.failed(["a"])
    assert looks.due_apart(3) == "a"
