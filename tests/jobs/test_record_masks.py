"""Marks of fields that may hold secrets, and the masks that follow from them (Q16)."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, get_args, get_type_hints
from uuid import UUID

import attrs
import msgspec
import pytest

from dataloader import jobs as domain
from dataloader import store
from dataloader.jobs.operations.bulk import bulk
from dataloader.jobs.operations.failures import failures
from dataloader.jobs.operations.jobs import jobs
from dataloader.jobs.operations.limits import limits
from dataloader.jobs.operations.loads import loads
from dataloader.jobs.operations.processes import processes
from dataloader.jobs.operations.queues import queues
from dataloader.jobs.operations.schedules import schedules
from dataloader.jobs.secrets.record_masks import (
    SENSITIVE,
    Public,
    Sensitive,
    SensitiveMark,
    UnmarkedFieldError,
    mask_of,
    masked,
)
from dataloader.jobs.states import Status

pytestmark = pytest.mark.requirement("Q16")

SECRET = "password=hunter2"
SHOWN = "password=***"
TEXT_OR_JSON = (str, Any, object, bytes)


@attrs.frozen
class Inner:
    text: Sensitive[str]
    number: int = 0


class InnerStruct(msgspec.Struct, frozen=True):
    text: Annotated[str | None, SENSITIVE]


@attrs.frozen(kw_only=True)
class Outer:
    plain: int = 1
    status: Status = Status.QUEUED
    word: Literal["a", "b"] = "a"
    at: datetime | None = None
    ids: tuple[UUID, ...] = ()
    public: Annotated[str, Public("of the test")] = SECRET
    text: Sensitive[str] = ""
    maybe: Annotated[str, SENSITIVE] | None = None
    json: Sensitive[Any] = None
    fields: Sensitive[Mapping[str, Any] | None] = None
    labels: Sensitive[Mapping[str, str] | None] = None
    counts: Sensitive[Mapping[str, int] | None] = None
    named: Sensitive[Mapping[str, Sequence[str]] | None] = None
    texts: Sensitive[list[str] | None] = None
    pair: Sensitive[tuple[str, ...] | None] = None
    inner: Inner | None = None
    inners: Sequence[Inner | None] = ()
    by_name: Sensitive[Mapping[str, Inner] | None] = None
    struct: InnerStruct | None = None


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("public", SECRET, SECRET),
        ("text", SECRET, SHOWN),
        ("text", None, None),
        ("text", [SECRET], [SHOWN]),
        ("texts", [None, SECRET], [None, SHOWN]),
        ("labels", {"a": None, "b": SECRET}, {"a": None, "b": SHOWN}),
        ("maybe", SECRET, SHOWN),
        ("json", {"token": "hunter2", "n": 1}, {"token": "***", "n": 1}),
        ("json", [SECRET, 5], [SHOWN, 5]),
        ("fields", {"token": "hunter2", "n": 1}, {"token": "***", "n": 1}),
        ("labels", {"token": "hunter2"}, {"token": "***"}),
        ("counts", {SECRET: 1, "secret": 2}, {SHOWN: 1, "secret": 2}),
        ("named", {SECRET: [SECRET]}, {SHOWN: [SHOWN]}),
        ("texts", [SECRET, "a"], [SHOWN, "a"]),
        ("pair", (SECRET,), (SHOWN,)),
        ("inner", Inner(SECRET, 2), Inner(SHOWN, 2)),
        ("inners", [Inner(SECRET), None, Inner("a")], [Inner(SHOWN), None, Inner("a")]),
        ("by_name", {SECRET: Inner(SECRET)}, {SHOWN: Inner(SHOWN)}),
        ("struct", InnerStruct(SECRET), InnerStruct(SHOWN)),
    ],
)
def test_a_marked_field_is_masked_by_its_type(name, value, shown):
    record = Outer(**{name: value})
    assert masked(record) == Outer(**{name: shown})
    assert getattr(record, name) == value


def test_a_record_without_a_secret_is_not_copied():
    record = Outer(text="a", at=datetime(2026, 11, 20, tzinfo=UTC), inner=Inner("b"), struct=InnerStruct(None))
    assert masked(record) is record


@pytest.mark.parametrize(
    "kind",
    [
        str,
        str | None,
        Any,
        object,
        dict[str, Any],
        Mapping[str, int],
        list[str],
        tuple[str, ...],
        Annotated[str, "a note"],
    ],
    ids=str,
)
def test_a_field_of_text_or_json_without_a_mark_is_refused(kind):
    record = attrs.make_class("Record", {"place": attrs.field(type=kind)})
    holder = attrs.make_class("Holder", {"records": attrs.field(type=list[record])})
    for one in (record, holder):
        with pytest.raises(UnmarkedFieldError, match=r"^Record\.place: "):
            mask_of(one)


def test_a_type_whose_mask_would_depend_on_the_value_is_refused():
    for kind in (
        Sensitive[str | list[str]],
        Sensitive[tuple[str, int]],
        Sensitive[set[str]],
        Sensitive[dict[int, str]],
    ):
        with pytest.raises(TypeError):
            mask_of(attrs.make_class("Record", {"place": attrs.field(type=kind)}))


EVERY = [*jobs, *failures, *queues, *schedules, *limits, *processes, *bulk, *loads]
ANSWERS = {kind.declaration.result for kind in EVERY}


def fields_of(kind: Any) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    names = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else [one.name for one in attrs.fields(kind)]
    return ((name, hints[name]) for name in names)


def parts_of(hint: Any) -> Iterator[Any]:
    """Yield a type and all types and marks that it is made of."""
    yield hint
    for part in get_args(hint):
        yield from parts_of(part)


def records_in(kind: Any) -> Iterator[Any]:
    """Yield a record type and those of the records in it."""
    yield kind
    for _, hint in fields_of(kind):
        for part in parts_of(hint):
            if isinstance(part, type) and (attrs.has(part) or issubclass(part, msgspec.Struct)):
                yield from records_in(part)


def test_every_text_of_an_answer_says_whether_it_may_hold_secrets():
    unmarked = []
    records = {record for kind in ANSWERS for record in records_in(kind)}
    for record in records:
        for name, hint in fields_of(record):
            parts = list(parts_of(hint))
            is_text = any(part is text for part in parts for text in TEXT_OR_JSON)
            marks = [part for part in parts if isinstance(part, (SensitiveMark, Public))]
            if is_text and len(marks) != 1:
                unmarked.append(f"{record.__name__}.{name}")
            assert all(mark.reason for mark in marks if isinstance(mark, Public))
    assert unmarked == []
    assert len(records) > 60


def test_every_record_with_a_marked_field_has_all_fields_marked():
    marked = set()
    for package in (domain, store):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for kind in vars(importlib.import_module(module.name)).values():
                if isinstance(kind, type) and _has_mark(kind):
                    marked.add(kind)
    for kind in marked:
        mask_of(kind)
    assert len(marked) > 50
    assert marked > {kind for kind in ANSWERS if _has_mark(kind)}


def _has_mark(kind: Any) -> bool:
    texts = map(str, getattr(kind, "__annotations__", {}).values())
    return any("Sensitive[" in text or "SENSITIVE" in text for text in texts)
