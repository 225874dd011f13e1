"""The checker of failovers, on invented histories."""

from __future__ import annotations

from failover_history import History


def begin(at, run, job, *, key=None, token=0):
    return {"kind": "begin", "at": at, "run": run, "job": job, "key": key, "token": token, "pid": 1, "planned": None}


def end(at, run):
    return {"kind": "end", "at": at, "run": run, "how": "returned", "by": None}


def test_overlaps_of_a_job_and_of_a_key_are_found_also_of_a_run_without_an_end():
    lines = [
        begin(1, "a", "x"),
        end(3, "a"),
        begin(2, "b", "x"),
        begin(4, "c", "y", key="k"),
        begin(9, "d", "z", key="k"),
    ]
    overlaps = History.of(lines).overlaps()
    assert [(one.former.name, one.latter.name) for one in overlaps] == [("a", "b"), ("c", "d")]
    assert overlaps[0].seconds == 1


def test_runs_that_follow_each_other_do_not_overlap():
    lines = [begin(1, "a", "x", key="k"), end(2, "a"), begin(2, "b", "x", key="k"), begin(1.5, "c", "y", key="l")]
    assert History.of(lines).overlaps() == []


def test_a_run_whose_token_the_standby_had_or_that_has_ended_before_is_not_void():
    lines = [begin(1, "a", "x", token=1), begin(1, "b", "y", token=2), begin(1, "c", "z", token=3), end(2, "c")]
    assert [run.name for run in History.of(lines).void(3, {2})] == ["a"]


def test_a_token_that_begins_twice_and_a_key_with_two_meanings_are_found():
    key = {"kind": "key", "key": "s"}
    lines = [begin(1, "a", "x", token=7), begin(2, "b", "y", token=7), begin(3, "c", "z", token=8)]
    lines += [{**key, "at": 1, "meaning": ["add", 1]}, {**key, "at": 2, "meaning": ["add", 1]}]
    assert History.of(lines).repeated_keys() == {}
    history = History.of([*lines, {**key, "at": 3, "meaning": ["add", 2]}])
    assert history.repeated_tokens() == [7]
    assert history.repeated_keys() == {"s": {("add", 1), ("add", 2)}}
