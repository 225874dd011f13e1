"""Selection of measurements."""

from importlib import import_module

import attrs
import pytest

from benchmarks.peers.contenders import ALL
from benchmarks.peers.plan import planned
from benchmarks.peers.results import Result

CONTENDERS = [ALL[name] for name in ("dataloader", "dataloader keyed", "pgqueuer", "pgqueuer tuned")]


def names(steps):
    return [str(step) for step in steps]


def test_contenders_take_turns_and_modes_that_do_the_same_are_measured_once(workloads):
    assert names(planned(workloads.values(), CONTENDERS, 2)) == [
        "w1 dataloader run 1",
        "w1 pgqueuer run 1",
        "w1 pgqueuer tuned run 1",
        "w1 dataloader run 2",
        "w1 pgqueuer run 2",
        "w1 pgqueuer tuned run 2",
        "w2 dataloader run 1",
        "w2 pgqueuer run 1",
        "w2 dataloader run 2",
        "w2 pgqueuer run 2",
    ]


def test_ours_is_measured_in_the_modes_that_a_workload_asks_for(workloads):
    keyed = attrs.evolve(workloads["w2"], our_modes=("keyed",))
    assert names(planned([keyed], CONTENDERS, 1)) == ["w2 dataloader keyed run 1", "w2 pgqueuer run 1"]
    tuned = attrs.evolve(workloads["w2"], our_modes=("tuned",))
    assert names(planned([tuned], [ALL["dataloader tuned"]], 1)) == ["w2 dataloader tuned run 1"]
    assert not planned([tuned], [ALL["dataloader tuned"]], 1, for_bars=True)


def test_all_that_a_bar_compares_is_measured_by_its_workload():
    pytest.importorskip("psutil")  # it comes with the embedded server
    for workload in import_module("benchmarks.peers.workloads").WORKLOADS.values():
        measured = {step.contender.name for step in planned([workload], ALL.values(), 1)}
        assert {name for bar in workload.bars for name in (*bar.ours, *bar.of)} <= measured


def test_a_plan_for_the_bars_has_no_peer_that_no_bar_compares_with(workloads):
    steps = planned(workloads.values(), CONTENDERS, 1, for_bars=True)
    assert names(steps) == ["w1 dataloader run 1", "w1 pgqueuer run 1", "w2 dataloader run 1"]


def test_a_kept_result_is_not_measured_again_unless_it_failed(workloads):
    kept = [
        Result("w1", "dataloader", 1, {"short_rate": 1.0}),
        Result("w1", "pgqueuer", 1, {}, "OSError: no"),
        Result("w2", "dataloader", 2, {"lost": 0}),
    ]
    steps = planned(workloads.values(), CONTENDERS, 2, kept=kept, for_bars=True)
    assert names(steps) == ["w1 pgqueuer run 1", "w1 dataloader run 2", "w1 pgqueuer run 2", "w2 dataloader run 1"]
