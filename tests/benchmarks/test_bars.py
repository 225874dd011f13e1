"""Results against a bar: reached, missed or not measured, and the distance from it."""

import json
import math
from importlib import import_module

import attrs
import pytest

from benchmarks.peers.results import Result, as_json, closing, read, table, verdicts
from benchmarks.peers.workload import FULL, QUICK, Bar

OURS = {"short_rate": 5000.0, "late_ms": 25.0}


def race(run, ours, pgqueuer):
    return [Result("w1", "dataloader", run, ours), Result("w1", "pgqueuer", run, {"short_rate": pgqueuer})]


def test_a_bar_is_reached_missed_or_not_measured(workloads):
    found = [(verdict.value, verdict.is_reached) for verdict in verdicts(race(1, OURS, 2000.0), workloads)]
    assert found == [(2.5, True), (None, None), (25.0, False), (None, None)]


def test_of_several_runs_the_median_of_the_ratios_counts(workloads):
    results = race(1, OURS, 1000.0) + race(2, OURS, 5000.0) + race(3, {"short_rate": 100.0}, 100.0)
    assert verdicts(results, workloads)[0].value == 1


@pytest.mark.parametrize(
    ("bounds", "value"),
    [({"least": 1, "of": ("pgqueuer", "awa")}, 1.5), ({"most": 1, "of": ("pgqueuer", "awa")}, 1.0), ({"most": 1}, 4.0)],
)
def test_of_several_rows_the_better_one_counts_for_ours_as_for_theirs(bounds, value):
    found = {"dataloader": {"x": 4.0}, "dataloader tuned": {"x": 6.0}, "pgqueuer": {"x": 4.0}, "awa": {}}
    bar = Bar(text="", figure="x", ours=("dataloader", "dataloader tuned"), **bounds)
    assert bar.value(found) == value
    assert attrs.evolve(bar, ours=("dataloader keyed",)).value(found) is None


@pytest.mark.parametrize(
    ("bar", "value", "share"),
    [
        (Bar(text="", figure="", least=0.8), 0.8, 1),
        (Bar(text="", figure="", least=0.8), 0.4, 0.5),
        (Bar(text="", figure="", most=20), 10, 2),
        (Bar(text="", figure="", most=20), 80, 0.25),
        (Bar(text="", figure="", most=20), 0, math.inf),
        (Bar(text="", figure="", most=20), math.inf, 0),
        (Bar(text="", figure="", most=0), 0, 1),
        (Bar(text="", figure="", most=0), 3, 0),
    ],
)
def test_a_share_of_one_is_just_enough_and_more_is_better(bar, value, share):
    assert bar.share(value) == share
    assert bar.is_reached(value) == (share >= 1)


def test_the_table_has_each_figure_and_each_bar_of_the_measurements(workloads):
    lines = table(race(1, OURS, 2000.0), workloads).splitlines()
    assert lines[0] == "| | | dataloader | pgqueuer |"
    assert lines[2:] == [
        "| **W1** | **a race** | | |",
        "| | jobs/s | 5,000 | 2,000 |",
        "| bar | ≥ 2 × pgqueuer | 2.5 reached |  |",
        "| bar | ≥ 20 × procrastinate | – |  |",
        "| bar | within 20 ms | 25 **missed** |  |",
    ]


def test_the_table_shows_a_failed_measurement(workloads):
    assert table([Result("w2", "dataloader", 1, {}, "TimeoutError: no event")], workloads).splitlines()[-1] == (
        "Failed: w2 dataloader run 1: TimeoutError: no event"
    )


def test_the_closing_counts_the_bars_that_were_measured_and_says_what_is_no_proof(workloads):
    full = [attrs.evolve(result, sizes=attrs.asdict(FULL)) for result in race(1, OURS, 2000.0) + race(2, OURS, 2000.0)]
    assert closing(full, workloads) == "2 bars measured: 1 reached, 1 missed. Medians of 2 runs."
    quick = [attrs.evolve(result, sizes=attrs.asdict(QUICK)) for result in race(1, OURS, 2000.0)]
    assert closing(quick, workloads) == (
        "2 bars measured: 1 reached, 1 missed. One run, no medians. Not the plan's sizes: a look, no proof."
    )


def test_machines_get_the_same_with_nothing_that_json_cannot_say(workloads):
    results = [*race(1, OURS | {"late_ms": math.inf}, 2000.0), Result("w2", "dataloader", 1, {}, "OSError: no")]
    data = json.loads(as_json(results, workloads))
    assert data["medians"]["w1"]["pgqueuer"] == {"short_rate": 2000}
    assert data["bars"][0] == {"workload": "w1", "bar": "≥ 2 × pgqueuer", "value": 2.5, "reached": True}
    assert data["bars"][2] == {"workload": "w1", "bar": "within 20 ms", "value": None, "reached": False}
    assert data["failed"] == [{"workload": "w2", "contender": "dataloader", "run": 1, "error": "OSError: no"}]


def test_a_repeated_measurement_replaces_a_failed_one(tmp_path):
    kept = tmp_path / "results.jsonl"
    failed, good = Result("w2", "dataloader", 1, {}, "OSError: no"), Result("w2", "dataloader", 1, {"lost": 0})
    for result in (failed, good):
        result.append_to(kept)
    assert read(kept) == [good]


def test_the_pickup_ratio_compares_the_last_eighth_with_the_first():
    pytest.importorskip("psutil")  # it comes with the embedded server
    w15, latency = import_module("benchmarks.peers.workloads.w15_held"), import_module("benchmarks.peers.latency")
    took_ms = {number: 2.0 if number < 70 else 6.0 for number in reversed(range(80))}
    paced = latency.Paced(took_ms, {number: number / 10 for number in took_ms})
    assert w15.pickup(paced) == {"first_ms": 2, "last_ms": 6, "ratio": 3, "per_s": pytest.approx(80 / 7.9)}
