"""The picture: each bar's row, whether it was measured or not."""

import math
from xml.etree import ElementTree as ET

import pytest

from benchmarks.peers.plot import DOUBLING, MIDDLE, MISSED, OUR_COLOUR, REACHED, WIDTH, svg
from benchmarks.peers.results import Result

SVG = "{http://www.w3.org/2000/svg}"


def drawn(workloads, **figures):
    return ET.fromstring(svg([Result("w1", "dataloader", 1, figures)], workloads))


def marks(picture, colour):
    return [element for element in picture if element.get("fill") == colour and element.tag != f"{SVG}text"]


def texts(picture):
    return [element.text for element in picture.iter(f"{SVG}text")]


def test_every_bar_has_a_row_and_says_when_it_was_not_measured(workloads):
    found = texts(drawn(workloads, late_ms=25.0))
    assert {bar.text for workload in workloads.values() for bar in workload.bars} <= set(found)
    assert found.count("not measured") == 3


@pytest.mark.parametrize(
    ("late_ms", "colour", "left", "right"),
    [
        (10.0, REACHED, MIDDLE, MIDDLE + DOUBLING),
        (40.0, MISSED, MIDDLE - DOUBLING, MIDDLE),
        (20.0, REACHED, MIDDLE, MIDDLE + 3),
        (20.01, MISSED, MIDDLE - 3, MIDDLE),
    ],
)
def test_a_bar_is_green_to_the_right_when_reached_and_red_to_the_left_when_missed(
    workloads, late_ms, colour, left, right
):
    picture = drawn(workloads, late_ms=late_ms)
    [mark] = marks(picture, colour)
    assert (int(mark.get("x")), int(mark.get("x")) + int(mark.get("width"))) == (left, right)
    assert not marks(picture, {REACHED: MISSED, MISSED: REACHED}[colour])


@pytest.mark.parametrize(("late_ms", "colour"), [(0.0, REACHED), (1e6, MISSED), (math.inf, MISSED)])
def test_a_bar_beyond_the_scale_ends_in_a_point(workloads, late_ms, colour):
    [mark] = marks(drawn(workloads, late_ms=late_ms), colour)
    assert mark.tag == f"{SVG}path"


def test_the_rates_of_all_are_drawn_within_the_picture_and_ours_stands_out(workloads):
    rates = {"dataloader": 5000.0, "pgqueuer": 2000.0, "chancy": 1.0}
    results = [Result("w1", name, 1, {"short_rate": rate}) for name, rate in rates.items()]
    picture = ET.fromstring(svg(results, workloads))
    assert {"5,000", "2,000", "1"} <= set(texts(picture))
    assert len(marks(picture, OUR_COLOUR)) == 1
    height = int(picture.get("height"))
    assert all(int(text.get("y")) < height for text in picture.iter(f"{SVG}text"))
    assert all(float(box.get("x")) + float(box.get("width")) <= WIDTH for box in picture.iter(f"{SVG}rect"))


def test_the_same_results_give_the_same_picture_even_none(workloads):
    results = [Result("w1", name, 1, {"short_rate": 9.0, "late_ms": 1.0}) for name in ("dataloader", "pgqueuer")]
    assert svg(results, workloads) == svg(results[::-1], workloads)
    assert texts(ET.fromstring(svg([], workloads))).count("not measured") == 4
