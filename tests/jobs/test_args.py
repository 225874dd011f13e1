"""Values that `args=` reads and writes: classes of four kinds, by their own field names; errors name the field."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import pathlib
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NotRequired, Required, TypedDict, TypeVar
from uuid import UUID

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloader.jobs.args import ArgsType, args_of
from dataloader.jobs.errors import BadRequest

T = TypeVar("T")


class Kind(enum.Enum):
    FULL = "full"
    PART = "part"


def upper(text: str) -> str:
    return text.upper()


@attrs.frozen
class Part:
    """Private names have aliases; a converter changes the value."""

    _number: int = attrs.field(validator=attrs.validators.ge(0))
    code: str = attrs.field(default="", converter=upper)
    day: dt.date | None = None
    total: int = attrs.field(init=False)

    def __attrs_post_init__(self):
        object.__setattr__(self, "total", self._number * 2)


@dataclasses.dataclass
class Box:
    parts: list[Part]
    by_name: dict[str, Part | None] = dataclasses.field(default_factory=dict)
    pair: tuple[int, Part] | None = None
    tail: tuple[Part, ...] = ()
    unique: frozenset[int] = frozenset()


class Small(msgspec.Struct, tag=True, rename="camel"):
    first_name: str
    weight: float = 0.5


class Big(msgspec.Struct, tag=True):
    box: Box


class Note(TypedDict, total=False):
    text: Required[str]
    part: Part


class Plain(TypedDict):
    a: int
    b: NotRequired[Literal["x", "y"]]


@attrs.frozen
class Everything:
    year: int
    kind: Kind = Kind.FULL
    few: Annotated[int, msgspec.Meta(ge=1, le=5)] = 3
    what: Small | Big | None = None
    notes: list[Note] = attrs.field(factory=list)
    when: dt.datetime | None = None
    key: UUID | None = None
    amount: Decimal = Decimal(1)
    raw: bytes = b""
    free: Any = None


PARTS = st.builds(
    Part, number=st.integers(0, 2**40), code=st.text(max_size=5).map(str.lower), day=st.none() | st.dates()
)
BOXES = st.builds(
    Box,
    parts=st.lists(PARTS, max_size=2),
    by_name=st.dictionaries(st.text(max_size=3), st.none() | PARTS, max_size=2),
    pair=st.none() | st.tuples(st.integers(), PARTS),
    tail=st.lists(PARTS, max_size=2).map(tuple),
    unique=st.frozensets(st.integers(), max_size=3),
)
SMALL = st.builds(Small, first_name=st.text(), weight=st.floats(allow_nan=False, allow_infinity=False))
NOTES = st.fixed_dictionaries({"text": st.text()}, optional={"part": PARTS})
EVERYTHING = st.builds(
    Everything,
    year=st.integers(-(2**60), 2**60),
    kind=st.sampled_from(Kind),
    few=st.integers(1, 5),
    what=st.none() | SMALL | st.builds(Big, box=BOXES),
    notes=st.lists(NOTES, max_size=2),
    when=st.none() | st.datetimes(timezones=st.just(dt.UTC)),
    key=st.none() | st.uuids(),
    amount=st.decimals(allow_nan=False, allow_infinity=False),
    raw=st.binary(max_size=5),
    free=st.recursive(st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(), st.lists, max_leaves=3),
)


@pytest.mark.slow
@given(
    st.one_of(
        st.tuples(st.just(Everything), EVERYTHING),
        st.tuples(st.just(Box), BOXES),
        st.tuples(st.just(Small), SMALL),
        st.tuples(st.just(Note), NOTES),
    )
)
def test_an_instance_comes_back_equal_from_json(case):
    kind, value = case
    kind = ArgsType(kind)
    encoded = kind.encode(value)
    assert kind.decode(msgspec.json.encode(encoded)) == value
    assert kind.encode(kind.decode(msgspec.json.encode(encoded))) == encoded


EVERY = ArgsType(Everything)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ('{"year":"x"}', 'args.year: must be an integer, not "x"'),
        ('{"year":1999.5}', "args.year: must be an integer, not 1999.5"),
        ("{}", "args.year: is required"),
        ('{"year":1,"yaer":2}', "args.yaer: is unknown; fields of Everything: year, kind, few, what, notes, when,"),
        ('{"year":1,"kind":"half"}', 'args.kind: must be one of full, part, not "half"'),
        ('{"year":1,"few":6}', "args.few: must be an integer from 1 to 5, not 6"),
        ('{"year":1,"notes":[{"text":"","part":{"number":1}},{}]}', "args.notes[1].text: is required"),
        ('{"year":1,"notes":[{"text":"","part":{"_number":1}}]}', "args.notes[0].part._number: is unknown"),
        ('{"year":1,"notes":[{"text":"","part":{"number":-1}}]}', "args.notes[0].part.number: must be >= 0: -1"),
        ('{"year":1,"what":{"type":"Big","box":{"parts":[],"by_name":{"k":{"number":null}}}}}', "args.what.box.by"),
        ('{"year":1,"when":"now"}', "args.when: must be a timestamp with a time zone"),
        ("[]", "args: must be an object, not an array"),
        ('{"year":1,"free":' + "[" * 5_000 + "]" * 5_000 + "}", "args: is nested too deeply"),
        ('{"year":"x","free":' + "[" * 5_000 + "]" * 5_000 + "}", "args.year: must be an integer, not a string"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_named_by_its_path_with_the_allowed_type(text, refusal):
    with pytest.raises(BadRequest) as raised:
        EVERY.decode(text)
    assert str(raised.value).startswith(refusal)


@pytest.mark.parametrize("kind", [None, EVERY])
def test_json_that_python_can_not_nest_so_deeply_is_refused(kind):
    deep = "[" * 5_000 + "]" * 5_000
    with pytest.raises(BadRequest, match="args: is nested too deeply"):
        args_of(f'{{"year":1,"free":{deep}}}', kind)
    assert args_of('{"year":1}', None) == {"year": 1}


def test_a_validator_s_refusal_names_the_field_and_a_secret_s_value_is_not_shown():
    kind = attrs.make_class(
        "Login",
        {"password": attrs.field(type=int), "n": attrs.field(default=1, validator=attrs.validators.instance_of(str))},
    )  # fmt: skip
    with pytest.raises(BadRequest, match=r"^args\.n: 'n' must be <class 'str'>"):
        ArgsType(kind).decode('{"password": 1}')
    with pytest.raises(BadRequest, match=r"^args\.password: must be an integer, not a string$"):
        ArgsType(kind).decode('{"password": "hunter2"}')
    only = attrs.make_class("Only", {"password": attrs.field(type=str, validator=attrs.validators.matches_re("x"))})
    with pytest.raises(BadRequest, match=r"^args\.password: is rejected by Only$"):
        ArgsType(only).decode('{"password": "hunter2"}')


def test_converters_and_defaults_are_those_of_the_class():
    part = ArgsType(Part).decode('{"number": 3, "code": "ab"}')
    assert part == Part(3, "AB")
    assert part.total == 6


def test_a_mapping_is_checked_and_left_as_it_is():
    assert EVERY.encode({"year": 1}) == {"year": 1}
    with pytest.raises(BadRequest, match=r"^args\.year: must be an integer"):
        EVERY.encode({"year": None})
    with pytest.raises(BadRequest, match=r"^args: must be an instance of Everything, not of int"):
        EVERY.encode(3)


def test_an_instance_that_json_would_change_is_not_enqueued():
    class Older(Everything):
        pass

    with pytest.raises(BadRequest, match=r"^args: must not change when encoded as JSON"):
        EVERY.encode(Everything(1, free=(1, 2)))
    with pytest.raises(BadRequest, match=r"^args: must be an instance of Everything, not of Older"):
        EVERY.encode(Older(1))
    with pytest.raises(BadRequest, match=r"^args\.weight: must be a number, not null"):
        ArgsType(Small).encode(Small("x", float("nan")))
    with pytest.raises(BadRequest, match=r"^args: .*'c' is unknown; fields of Plain: a, b"):
        ArgsType(Plain).encode({"a": 1, "c": 2})


def test_a_class_without_its_own_equality_is_compared_by_its_json():
    kind = attrs.make_class("Loose", {"n": attrs.field(type=int)}, eq=False)
    assert ArgsType(kind).encode(kind(3)) == {"n": 3}


@attrs.frozen
class Node:
    children: list[Node]


@dataclasses.dataclass
class WithInitVar:
    a: int
    b: dataclasses.InitVar[int]


@attrs.frozen
class Wrapper(Generic[T]):
    inner: T


def split(text: str) -> list[str]:
    return text.split(",")


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        (int, "args must be an attrs class, a dataclass, a msgspec.Struct or a TypedDict, not int"),
        (Node, "args: Node.children[] contains Node recursively; args must not be recursive"),
        (WithInitVar, "args: WithInitVar has an InitVar"),
        (Wrapper, "args: Wrapper is the generic class"),
        (msgspec.defstruct("Row", [("a", int)], array_like=True), "args: Row is array_like"),
        (attrs.make_class("C", {"f": attrs.field(type=pathlib.Path)}), "args: C.f has the type Path, which JSON"),
        (attrs.make_class("C", {"f": attrs.field(type=Part | Everything)}), "args: C cannot be read from JSON: If"),
        (attrs.make_class("C", {"f": attrs.field(type=list[str], converter=split)}), "args: C.f has a converter"),
        (attrs.make_class("C", {"f": attrs.field(type=list[Part] | dict[str, Part])}), "args: C.f is a union"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)  # fmt: skip
def test_a_class_that_json_can_t_carry_is_refused_at_the_declaration(kind, refusal):
    with pytest.raises(ValueError, match="args") as raised:
        ArgsType(kind)
    assert str(raised.value).startswith(refusal)
