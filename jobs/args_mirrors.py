"""Mirrors: structs of ours into which JSON is read for a user's class of arguments.

msgspec does the typed work. Alone it would ignore unknown names, build attrs classes without their converters and
validators, and ask for `_p` where the alias in attrs is `p`. A mirror has the names as in JSON and refuses others. Then
the class is called in the usual way, so its converters, validators and `__post_init__` run.

A hint is read once, at the declaration, into a `Way`: the hint for msgspec, and the conversions of a value from mirror
to instance (up) and back (down). Without conversions the value stays as msgspec returned it.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import re
import types
from collections.abc import Callable, Iterator
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NewType,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import attrs
import msgspec
from msgspec import NODEFAULT, UNSET, Struct

from dataloader.jobs.secrets.secret_names import names_a_secret

Step = Callable[[Any], Any]

_MANY: Final = frozenset(
    {list, set, frozenset, collections.abc.Sequence, collections.abc.Collection, collections.abc.Set}
)
_MAPPINGS: Final = frozenset({dict, collections.abc.Mapping})
_VALIDATED: Final = re.compile(r"'(?P<name>\w+)' (?P<text>must be .*)", re.DOTALL)
"""Text of attrs' validators that compare: `'number' must be >= 0: -1`. The path names the field instead.

Error groups leave out quoted text, but keep the path.
"""
COLLECTIONS: Final = _MANY | _MAPPINGS | {tuple}
"""Hints of collections; the last or only parameter is the type of their items."""


class Misfit(Exception):  # noqa: N818 - caught by ArgsType, which raises BadRequest instead
    """The class refuses the mirror's value. `path` leads to the object or the field, such as `.year` or `[3].year`."""

    def __init__(self, message: str, path: str = "") -> None:
        """Create the error; `message` says what is allowed."""
        super().__init__(message)
        self.message = message
        self.path = path

    def below(self, step: str) -> Misfit:
        """Return the same error with its path from one level above."""
        self.path = step + self.path
        return self


@attrs.frozen(eq=False)
class Way:
    """Conversion of values of a hint: `hint` is for msgspec; `up` and `down` are None if the value does not change."""

    hint: Any
    up: Step | None = None
    down: Step | None = None


@attrs.frozen(eq=False)
class MirrorField:
    """Field: `slot` in the mirror, `key` in JSON, `name` of the class's parameter, `attribute` of instances."""

    slot: str
    key: str
    name: str
    attribute: str
    way: Way
    is_required: bool


@attrs.define(eq=False)
class Shape:
    """Class with its mirror."""

    kind: Any
    fields: list[MirrorField]
    mirror: Any

    def built(self, mirrored: Any) -> Any:
        """Return the instance of a decoded mirror. Raises `Misfit` if the class refuses a value."""
        given = {}
        for field in self.fields:
            value = getattr(mirrored, field.slot)
            if value is UNSET:
                continue
            if field.way.up is not None:
                try:
                    value = field.way.up(value)
                except Misfit as misfit:
                    raise misfit.below(f".{field.key}") from misfit.__cause__
            given[field.name] = value
        try:
            return self.kind(**given)
        except Exception as error:
            raise self._misfit(error) from error

    def mirrored(self, value: Any) -> Any:
        """Return the mirror of an instance, for msgspec to encode."""
        if is_typeddict(self.kind):
            others = [name for name in value if name not in {field.key for field in self.fields}]
            if others:
                raise Misfit(f"{others[0]!r} is unknown; fields of {self.kind.__name__}: {_keys_of(self.fields)}")
            found = [(field, value[field.key]) for field in self.fields if field.key in value]
        else:
            found = [(field, getattr(value, field.attribute)) for field in self.fields]
        slots = {field.slot: one if field.way.down is None else field.way.down(one) for field, one in found}
        return self.mirror(**slots)

    def _misfit(self, error: Exception) -> Misfit:
        """Return a class's refusal of its arguments; attrs' validators add the field to their errors."""
        said = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
        text = said if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {said}"
        names = [one.name for one in error.args if isinstance(one, attrs.Attribute)]
        if not names and (begin := _VALIDATED.match(text)):
            names, text = [begin["name"]], begin["text"]
        keys = [field.key for field in self.fields if field.attribute in names]
        if any(names_a_secret(key) for key in keys):
            text = f"is rejected by {self.kind.__name__}"  # the validator's text may have the value
        return Misfit(text, f".{keys[0]}" if keys else "")


def is_shape(kind: object) -> bool:
    """Return True for a class of the four kinds that `args=` accepts."""
    if not isinstance(kind, type):
        return False
    return attrs.has(kind) or dataclasses.is_dataclass(kind) or issubclass(kind, Struct) or is_typeddict(kind)


class Reading:
    """Reader of one class and the classes that it holds. Raises `ValueError` with the path of an unsupported hint."""

    def __init__(self) -> None:
        """Start without classes."""
        self._shapes: dict[type, Shape] = {}
        self._begun: set[type] = set()

    def shape(self, kind: Any, where: str) -> Shape:
        """Return the class with its mirror; `where` is its path for messages."""
        if kind in self._shapes:
            return self._shapes[kind]
        if kind in self._begun:
            raise _mismatch(where, f"contains {kind.__name__} recursively; args must not be recursive")
        self._begun.add(kind)
        if getattr(kind, "__parameters__", ()):
            raise _mismatch(where, f"is the generic class {kind.__name__}; args need a class without type parameters")
        fields = list(self._fields(kind, where))
        # The class applies its own defaults: fields that are left out are not passed to it.
        columns = [(f.slot, f.way.hint) if f.is_required else (f.slot, f.way.hint, UNSET) for f in fields]
        options: dict[str, Any] = {"forbid_unknown_fields": True, "kw_only": True, "frozen": True}
        if issubclass(kind, Struct):
            config = kind.__struct_config__
            if config.array_like:
                raise _mismatch(
                    where, f"is array_like: {kind.__name__} would be encoded as an array, but args are JSON objects"
                )
            options |= {"tag": config.tag, "tag_field": config.tag_field}
        mirror = msgspec.defstruct(kind.__name__, columns, rename={f.slot: f.key for f in fields}, **options)
        try:
            msgspec.json.Decoder(mirror)
        except TypeError as error:
            raise _mismatch(where, f"cannot be read from JSON: {error}") from error
        shape = self._shapes[kind] = Shape(kind, fields, mirror)
        return shape

    def _fields(self, kind: Any, where: str) -> Iterator[MirrorField]:
        for number, (key, name, attribute, hint, is_required) in enumerate(_fields_of(kind, where)):
            way = self._way(hint, f"{where}.{key}")
            yield MirrorField(f"f{number}", key, name, attribute, way, is_required)

    def _way(self, hint: Any, where: str) -> Way:  # noqa: C901, PLR0911 - one case for each kind of hint
        if isinstance(hint, NewType):
            return self._way(hint.__supertype__, where)
        origin, inner = get_origin(hint), get_args(hint)
        if origin is Annotated:
            way = self._way(inner[0], where)
            return Way(Annotated[(way.hint, *hint.__metadata__)], way.up, way.down)
        if origin in {Union, types.UnionType}:
            return self._union([self._way(one, where) for one in inner], inner, where)
        if origin in _MANY:
            return self._many(origin, self._way(inner[0], f"{where}[]"))
        if origin is tuple and inner[-1:] == (...,):
            return self._many(tuple, self._way(inner[0], f"{where}[]"), (...,))
        if origin is tuple:
            return self._tuple([self._way(one, f"{where}[{index}]") for index, one in enumerate(inner)])
        if origin in _MAPPINGS:
            return self._mapping(origin, inner[0], self._way(inner[1], f"{where}[]"))
        if origin is not None and origin is not Literal:
            raise _mismatch(where, f"has the type {hint}, which JSON does not support")
        if is_shape(hint):
            shape = self.shape(hint, where)
            return Way(shape.mirror, shape.built, shape.mirrored)
        if hint is not Any and not _is_known(hint):
            raise _mismatch(where, f"has the type {getattr(hint, '__name__', hint)}, which JSON does not support")
        return Way(hint)

    def _union(self, ways: list[Way], hints: tuple[Any, ...], where: str) -> Way:
        hint: Any = Union.__getitem__(tuple(way.hint for way in ways))
        if not any(way.up for way in ways):
            return Way(hint)
        others = [way for way in ways if way.hint is not type(None)]
        if len(others) == 1:
            [way] = others
            assert way.up is not None and way.down is not None  # noqa: S101, PT018 - both are set or neither
            return Way(hint, _unless_none(way.up), _unless_none(way.down))
        shapes = [self._shapes[one] for one in hints if is_shape(one)]
        if len(shapes) < sum(way.up is not None for way in ways):
            raise _mismatch(where, "is a union with a collection of classes, which args do not support")
        up: dict[Any, Step] = {shape.mirror: shape.built for shape in shapes}
        down: dict[Any, Step] = {dict if is_typeddict(shape.kind) else shape.kind: shape.mirrored for shape in shapes}
        return Way(hint, _by_type(up), _by_type(down))

    def _many(self, origin: Any, item: Way, more: tuple[Any, ...] = ()) -> Way:
        hint = origin[(item.hint, *more)]
        if item.up is None or item.down is None:
            return Way(hint)
        make = {collections.abc.Set: set}.get(origin, list if origin not in {tuple, set, frozenset} else origin)
        up, down = item.up, item.down

        def build(values: Any) -> Any:
            return make(_each(enumerate(values), up))

        return Way(hint, build, lambda values: [down(value) for value in values])

    def _tuple(self, items: list[Way]) -> Way:
        hint: Any = tuple.__class_getitem__(tuple(item.hint for item in items))
        if not any(item.up for item in items):
            return Way(hint)

        def go(values: Any, steps: list[Step | None]) -> Any:
            pairs = zip(values, steps, strict=True)
            return tuple(value if step is None else step(value) for value, step in pairs)

        ups, downs = [item.up for item in items], [item.down for item in items]
        return Way(hint, lambda values: go(values, ups), lambda values: go(values, downs))

    def _mapping(self, origin: Any, key: Any, value: Way) -> Way:
        hint = origin[key, value.hint]
        if value.up is None or value.down is None:
            return Way(hint)
        up, down = value.up, value.down

        def build(values: Any) -> Any:
            return dict(zip(values, _each(values.items(), up), strict=True))

        return Way(hint, build, lambda values: {name: down(one) for name, one in values.items()})


def _each(items: Any, step: Step) -> Iterator[Any]:
    for name, value in items:
        try:
            yield step(value)
        except Misfit as misfit:
            raise misfit.below(f"[{name}]") from misfit.__cause__


def _unless_none(step: Step) -> Step:
    return lambda value: None if value is None else step(value)


def _by_type(steps: dict[Any, Step]) -> Step:
    return lambda value: steps[type(value)](value) if type(value) in steps else value


_Named = tuple[str, str, str, Any, bool]
"""Key in JSON, name in a call, attribute, hint, and whether the field is required."""


def _fields_of(kind: Any, where: str) -> Iterator[_Named]:
    if issubclass(kind, Struct):
        return _fields_of_struct(kind)
    try:
        hints = get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise _mismatch(where, f"has a type hint that cannot be resolved: {error}") from error
    if is_typeddict(kind):
        return _fields_of_typed_dict(kind, hints)
    if attrs.has(kind):
        return _fields_of_attrs(kind, hints, where)
    if any(isinstance(hint, dataclasses.InitVar) for hint in hints.values()):
        raise _mismatch(where, "has an InitVar, which instances do not store")
    return _fields_of_dataclass(kind, hints)


def _fields_of_struct(kind: Any) -> Iterator[_Named]:
    for field in msgspec.structs.fields(kind):
        is_required = field.default is NODEFAULT and field.default_factory is NODEFAULT
        yield field.encode_name, field.name, field.name, field.type, is_required


def _fields_of_typed_dict(kind: Any, hints: dict[str, Any]) -> Iterator[_Named]:
    for name, hint in hints.items():
        marks, plain = _unmarked(hint)
        is_required = NotRequired not in marks and (Required in marks or name in kind.__required_keys__)
        yield name, name, name, plain, is_required


def _fields_of_attrs(kind: Any, hints: dict[str, Any], where: str) -> Iterator[_Named]:
    for field in attrs.fields(kind):
        if field.init:
            # A class from attrs.make_class has no hints.
            own = hints.get(field.name, Any if field.type is None else field.type)
            hint = _hint_of(field, own, f"{where}.{field.alias}")
            yield field.alias, field.alias, field.name, hint, field.default is attrs.NOTHING


def _fields_of_dataclass(kind: Any, hints: dict[str, Any]) -> Iterator[_Named]:
    for field in dataclasses.fields(kind):
        if field.init:
            is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            yield field.name, field.name, field.name, hints[field.name], is_required


def _unmarked(hint: Any) -> tuple[set[Any], Any]:
    """Return the marks of a hint, and the hint without them: `Required[int]` is an int that is required."""
    marks = set()
    while get_origin(hint) in {Required, NotRequired}:
        marks.add(get_origin(hint))
        [hint] = get_args(hint)
    return marks, hint


def _hint_of(field: Any, hint: Any, where: str) -> Any:
    """Return the hint of an attrs field in JSON: its converter's parameter, which must accept the field's own type."""
    converter = getattr(field.converter, "converter", field.converter)
    try:
        hints = list(get_type_hints(converter, include_extras=True).items()) if converter is not None else []
    except (NameError, TypeError):
        hints = []
    taken = [one for name, one in hints if name != "return"]
    if not taken or isinstance(converter, type):
        return hint
    if taken[0] is not Any and taken[0] != hint and hint not in get_args(taken[0]):
        raise _mismatch(where, f"has a converter that accepts only {taken[0]}, not its own result {hint}")
    return taken[0] if taken[0] is not Any else hint


def _is_known(hint: Any) -> bool:
    try:
        found = msgspec.inspect.type_info(hint)
    except TypeError:
        return False
    unknown = msgspec.inspect.CustomType, msgspec.inspect.NamedTupleType, msgspec.inspect.RawType
    return not isinstance(found, unknown)


def _keys_of(fields: list[MirrorField]) -> str:
    return ", ".join(field.key for field in fields)


def _mismatch(where: str, message: str) -> ValueError:
    return ValueError(f"args: {where} {message}")
