"""Conditions for passing a soak, and the drawing of its course."""

from xml.etree import ElementTree as ET

import attrs
import pytest

from benchmarks.peers.plot import LINE, MISSED, WIDTH
from benchmarks.soak.plot import LEFT, RIGHT, STRIPS, svg
from benchmarks.soak.report import page
from benchmarks.soak.verdict import FLAT, SoakOutcome, drift, judged

SVG = "{http://www.w3.org/2000/svg}"
GOOD = SoakOutcome(
    seconds=400,
    per_s=10,
    accepted=4_000,
    ended={"succeeded": 4_000, "failed": 0},
    left=0,
    overlaps=0,
    unexpected_exits=0,
)


def course(**changed):
    """Return a sample for each ten seconds with constant figures, except those `changed`: functions of the time."""
    figures = {"p50_ms": 5.0, "p99_ms": 20.0} | {flat.figure: 10.0 for flat in FLAT}
    return [
        {"at_s": at_s} | figures | {name: value(at_s) for name, value in changed.items()}
        for at_s in (float(at_s) for at_s in range(10, 401, 10))
    ]


def bad(samples, outcome=GOOD):
    return [judgement.text for judgement in judged(samples, outcome) if not judgement.is_good]


def test_a_soak_in_which_nothing_grows_or_is_lost_is_passed():
    assert bad(course()) == []
    assert len(judged(course(), GOOD)) == 4 + 2 + len(FLAT)


@pytest.mark.parametrize("flat", FLAT, ids=lambda flat: flat.figure)
def test_a_figure_that_rises_beyond_its_bound_in_the_second_half_is_bad(flat):
    assert bad(course(**{flat.figure: lambda at_s: at_s * flat.least})) == [f"flat: {flat.text}"]
    assert bad(course(**{flat.figure: lambda at_s: 10 + at_s * flat.least / 1_000})) == []
    # A figure that only rises at first, or falls, is not a leak.
    assert bad(course(**{flat.figure: lambda at_s: min(at_s, 150) * flat.least})) == []
    assert bad(course(**{flat.figure: lambda at_s: (1_000 - at_s) * flat.least})) == []


def test_a_large_figure_may_rise_by_its_share():
    memory = FLAT[0]
    assert bad(course(rss_mib=lambda at_s: 10_000 + at_s)) == []
    assert bad(course(rss_mib=lambda at_s: 1_000 + at_s)) == [f"flat: {memory.text}"]


def test_the_latency_at_the_end_must_be_that_of_the_start_one_slow_moment_apart():
    slower = bad(course(p50_ms=lambda at_s: 5 + at_s / 10))
    assert slower == ["trigger to end, p50, as at the start"]
    assert bad(course(p99_ms=lambda at_s: 5_000 if at_s in {60, 350} else 20)) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"accepted": 3_000, "ended": {"succeeded": 3_000}}, "accepted"),
        ({"ended": {"succeeded": 3_999}}, "every accepted job"),
        ({"left": 1}, "every accepted job"),
        ({"ended": {"succeeded": 4_000, "failed": 1}}, "every accepted job"),
        ({"overlaps": 1}, "no two runs"),
        ({"unexpected_exits": 1}, "no exit"),
    ],
)
def test_what_was_lost_ran_twice_at_once_or_ended_by_itself_is_bad(change, what):
    [text] = bad(course(), attrs.evolve(GOOD, **change))
    assert what in text


def test_a_figure_that_was_never_measured_is_bad():
    assert len(bad([])) == 2 + len(FLAT)
    assert bad([{name: value for name, value in sample.items() if name != "rss_mib"} for sample in course()]) == [
        f"flat: {FLAT[0].text}"
    ]


def test_a_drift_is_how_far_the_line_through_the_points_rises():
    assert drift([(0, 1), (10, 3), (20, 5)]) == pytest.approx(4)
    assert drift([(0, 5), (10, 0), (20, 5)]) == pytest.approx(0)
    assert drift([(0, 1), (1, 100)]) == 0


def test_the_report_has_the_verdict_and_the_number_of_kills():
    blows = [(20.0, "SIGKILL"), (60.0, "SIGTERM"), (90.0, "SIGKILL")]
    passed = page(judged(course(), GOOD), GOOD, blows, 7)
    assert "**Passed.**" in passed
    assert "killed 2 times and told to end 1 times" in passed
    lost = attrs.evolve(GOOD, overlaps=3)
    failed = page(judged(course(), lost), lost, blows, 7)
    assert "**1 of 16 are bad.**" in failed
    assert "| no two runs of a key at once | 3 | **bad** |" in failed


def test_the_course_has_a_strip_for_each_figure_that_was_measured_within_the_picture():
    samples = [{name: value for name, value in sample.items() if name != "threads"} for sample in course()]
    picture = ET.fromstring(svg(samples, [(200.0, "SIGKILL"), (300.0, "SIGTERM")], "a soak"))
    curves = picture.findall(f"{SVG}polyline")
    assert len(curves) == len(STRIPS) - 1
    height = float(picture.get("height"))
    for curve in curves:
        places = [tuple(map(float, place.split(","))) for place in curve.get("points").split()]
        assert len(places) == len(samples)
        assert all(LEFT <= x <= RIGHT < WIDTH and 0 < y < height for x, y in places)
    strokes = [path.get("stroke") for path in picture.findall(f"{SVG}path")]
    assert strokes.count(MISSED) == strokes.count(LINE) == len(curves)


def test_a_soak_that_saw_nothing_has_a_picture_too():
    assert ET.fromstring(svg([], [], "nothing")).findall(f"{SVG}polyline") == []
