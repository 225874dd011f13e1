"""Texts and JSON in their stored form."""

from __future__ import annotations

import json
import sys

import attrs
import pytest

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.text import (
    MAX_BEGINNING,
    MAX_DEPTH,
    MAX_JSON,
    exact_json,
    growth,
    has_long_number,
    listed_json,
    said_by,
    shown_json,
    storable_json,
    stored_json,
    stored_object,
)


@pytest.mark.parametrize(
    ("encoded", "grows"),
    [
        (b'{"a":1e308}', 308),
        (b'{"a":[1.5e-300,-2e+20]}', 320),
        (b'{"a":"1e308 1e308"}', 0),
        (b'{"a":"\\"1e308\\\\","b":1e99}', 99),
        (b'{"3e100":1.5}', 0),
        (b"{}", 0),
    ],
)
def test_json_grows_by_the_exponents_of_its_numbers_and_not_by_what_stands_in_texts(encoded, grows):
    assert growth(encoded) == grows
    assert isinstance(json.loads(encoded), dict)


@pytest.mark.parametrize(
    ("encoded", "long"),
    [
        (b'{"a":%d}' % 10**308, True),
        (b'{"a":%d}' % 10**307, False),
        (b'{"a":"%d"}' % 10**400, False),
        (b'{"a":"%d","b":%d}' % (10**400, 10**400), True),
    ],
)
def test_an_integer_beyond_the_range_of_floats_is_distinguished_from_a_text(encoded, long):
    assert has_long_number(encoded) is long


def test_a_result_whose_numbers_grow_beyond_the_bound_is_cut_like_a_long_one():
    stored = json.loads(storable_json([1e308] * 100_000))
    assert stored.keys() == {"truncated", "bytes"}
    assert stored["bytes"] > 30 * MAX_JSON // 2
    assert json.loads(storable_json([1e308] * 1_000)) == [1e308] * 1_000


def _nested(depth, opens="[", closes="]"):
    return opens * depth + "1" + closes * depth


@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 990, 5_000])
def test_json_that_is_nested_too_deeply_is_shown_by_its_beginning(depth, opens, closes):
    text = _nested(depth, opens, closes)
    assert shown_json(text) == {"truncated": text[:10_000], "bytes": len(text)}
    assert shown_json(_nested(MAX_DEPTH, opens, closes)) == json.loads(_nested(MAX_DEPTH, opens, closes))
    assert shown_json("[" + "[]," * 5_000 + "[]]") == [[]] * 5_001


def test_nested_json_is_truncated_even_where_the_stack_is_nearly_exhausted():
    text = _nested(MAX_DEPTH)

    def descend(depth):
        return descend(depth - 1) if depth else shown_json(text)

    frame, used = sys._getframe(), 0
    while frame is not None:
        frame, used = frame.f_back, used + 1
    assert descend(sys.getrecursionlimit() - used - MAX_DEPTH // 2) == {"truncated": text, "bytes": len(text)}


@attrs.frozen
class Reading:
    celsius: float
    note: str | None = None


@pytest.mark.parametrize(
    ("value", "refused"),
    [
        (float("nan"), "args: must be a finite number, not nan"),
        ({"a": [1, {"b": float("inf")}], "none": None}, r"args.a\[1\].b: must be a finite number, not inf"),
        ([None, (2**70, float("-inf"))], r"args\[1\]\[1\]: must be a finite number, not -inf"),
        ([Reading(20.5), Reading(float("nan"))], r"args\[1\].celsius: must be a finite number, not nan"),
    ],
)
def test_a_number_that_json_does_not_have_is_refused_by_its_path(value, refused):
    with pytest.raises(BadRequest, match=refused):
        exact_json("args", value, MAX_JSON)


def test_null_is_no_such_number_and_in_a_result_it_is_written_as_a_text():
    assert exact_json("args", [None, 2**70, Reading(1e308), "null"], MAX_JSON)
    assert json.loads(storable_json([None, "\ud800", 2**70, float("nan")])) == [None, "\\ud800", 2**70, "nan"]
    assert json.loads(storable_json({"loss": float("nan"), "none": None, "at": [float("-inf")]})) == {
        "loss": "nan",
        "none": None,
        "at": ["-inf"],
    }


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_an_error_that_can_not_say_what_it_is_is_named_by_its_class():
    assert said_by(UnspeakableError()) == "UnspeakableError: (its text is not available)"
    assert said_by(KeyError()) == "KeyError"


def test_any_content_of_a_row_is_read():
    deep = "[" * 3_000 + "]" * 3_000
    assert stored_json(deep) == {"truncated": deep[:MAX_BEGINNING], "bytes": 6_000}
    assert stored_json("1e400") == float("inf")
    assert stored_object("[1]") == {"value": [1]}
    assert listed_json('[{"a": 1}, {"a": "x"}, 7, {"a": 2}]', dict[str, int]) == [{"a": 1}, {"a": 2}]
    assert listed_json("7", int) == []
