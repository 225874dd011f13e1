"""When lanes are looked at: when something tells, when their wait is over, and all of them once in a while."""

from __future__ import annotations

import math

import pytest

from dataloader.actors.lane_looks import MAX_LOCKED_S, LaneLooks
from dataloader.store.queue.claim import Claim


def claim(*lanes, more=False):
    return Claim([], [], more, passed_over=False, last=None, to_test=[], sent_at=0, lanes=list(lanes))


@pytest.fixture
def looks():
    """Two lanes that have been looked at, at 0, and are empty."""
    looks = LaneLooks(poll_s=10)
    looks.learned(["b", "a"])
    assert looks.due(0) == ["a", "b"]
    looks.answered(claim(("a", "empty", None), ("b", "empty", None)), 0)
    return looks


def test_an_empty_lane_is_looked_at_when_something_tells_or_the_poll_comes(looks):
    assert looks.due(1) == []
    assert looks.wait_s(1) == 9
    assert looks.told("a")
    assert not looks.told("of others")
    assert looks.wait_s(1) == 0
    assert looks.due(1) == ["a"]
    assert looks.due(10) == ["a", "b"], "also in a queue that never rests"


def test_what_is_told_while_a_claim_is_under_way_counts_for_the_next(looks):
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


def test_a_lane_that_somebody_has_locked_is_looked_at_soon_and_then_less_often(looks):
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


def test_lanes_of_a_paused_queue_are_looked_at_when_it_is_resumed_whatever_was_claimed_meanwhile(looks):
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
