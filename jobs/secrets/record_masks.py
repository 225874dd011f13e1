"""Masks of records: which fields may hold secrets, and the function that masks them.

The annotation of a field has its mark, where the record is declared: `SENSITIVE` if the field may hold a secret, or
`Public` with the reason why it never does. A field of text or JSON needs one of the two. Numbers, timestamps, IDs,
enumerations and literals need none. A field with other records needs none either, since those have their own marks.

    queue: Annotated[str, about("Name of the queue."), SENSITIVE]
    args: Sensitive[Any]
    zone: Annotated[str, Public("a name of the time zone database")]

The type of a field says how its values are masked. For each class one function is made from the annotations, at its
first use; it copies only records in which something is masked. Callers mask a record where it leaves for a reader:
`masked(record)`. The marks are annotations, not metadata of attrs, so that structs and shared types can have them.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from functools import cache
from operator import is_
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import attrs
import msgspec

from dataloader.jobs.secrets.masking import mask, mask_names, mask_text

T = TypeVar("T")
R = TypeVar("R")

_Mask = Callable[[Any], Any]


@attrs.frozen
class SensitiveMark:
    """Mark of a field that may hold secrets: text and JSON of clients, handlers and other systems, names and keys."""


@attrs.frozen
class Public:
    """Mark of a field of text or JSON that never holds secrets, or whose secrets are masked before it is stored."""

    reason: str


SENSITIVE: Final = SensitiveMark()
FIXED_WORD: Final = Public("one of a fixed set of words")
Sensitive = Annotated[T, SENSITIVE]


class UnmarkedFieldError(TypeError):
    """A field of text or JSON has neither mark."""


def masked(record: R) -> R:
    """Return a record without the secrets in its fields: a copy, or the record itself if nothing is masked."""
    mask_record: Callable[[R], R] = mask_of(type(record))
    return mask_record(record)


def mask_of(kind: Any) -> _Mask:
    """Return the function that masks the records of an attrs class or a struct.

    Raises `UnmarkedFieldError` for a field without a mark, in this class or in those of its fields.
    """
    return _mask_of_record(kind) or _as_it_is


def _as_it_is(record: R) -> R:
    return record


@cache
def _mask_of_record(kind: Any) -> _Mask | None:
    is_struct = issubclass(kind, msgspec.Struct)
    names = kind.__struct_fields__ if is_struct else [field.name for field in attrs.fields(kind)]
    hints = get_type_hints(kind, include_extras=True)
    found = [(name, _mask_of_value(hints[name], None, f"{kind.__qualname__}.{name}")) for name in names]
    masks = [(name, mask_value) for name, mask_value in found if mask_value is not None]
    copy: Any = msgspec.structs.replace if is_struct else attrs.evolve

    def mask_record(record: Any) -> Any:
        changed = {}
        for name, mask_value in masks:
            value = getattr(record, name)
            # A row of another program may lack any value.
            shown = None if value is None else mask_value(value)
            if shown is not value:
                changed[name] = shown
        return copy(record, **changed) if changed else record

    return mask_record if masks else None


def _mask_of_value(hint: Any, mark: object, where: str) -> _Mask | None:
    """Return the function that masks the values of a type; None if they are shown unchanged."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        own = [part for part in parts[1:] if isinstance(part, (SensitiveMark, Public))]
        return _mask_of_value(parts[0], own[0] if own else mark, where)
    if origin in {Union, types.UnionType}:
        return _mask_of_one(hint, [part for part in parts if part is not types.NoneType], mark, where)
    if isinstance(mark, Public) or origin is Literal or hint in _PLAIN or _is_class(hint, enum.Enum):
        return None
    if attrs.has(hint) or _is_class(hint, msgspec.Struct):
        return _mask_of_record(hint)
    if origin in _LISTS:
        mask_item = _mask_of_one(hint, [part for part in parts if part is not ...], mark, where)
        return _mask_of_items(mask_item, tuple if origin is tuple else list)
    if mark is not SENSITIVE:
        raise UnmarkedFieldError(f"{where}: {hint} may hold secrets; mark it with SENSITIVE, or Public and the reason")
    return _mask_of_sensitive(hint, where)


def _is_class(hint: Any, kind: type) -> bool:
    return isinstance(hint, type) and issubclass(hint, kind)


def _mask_of_sensitive(hint: Any, where: str) -> _Mask:
    """Return the mask of a type of text or JSON."""
    if hint in _MASKS:
        return _MASKS[hint]
    if get_origin(hint) in _MAPPINGS:
        name, value = get_args(hint)
        if name is str:
            return mask if value in _MASKS else _mask_of_names(_mask_of_value(value, SENSITIVE, where))
    raise TypeError(f"{where}: the type {hint} has no mask")


def _mask_of_one(hint: Any, kinds: Sequence[Any], mark: object, where: str) -> _Mask | None:
    """Return the mask of a type that is made of others. It must not depend on which of them a value has."""
    masks = [_mask_of_value(kind, mark, where) for kind in kinds]
    if any(masks) and len(masks) > 1:
        raise TypeError(f"{where}: the types of {hint} have different masks")
    return masks[0]


def _keeping_none(mask_value: _Mask) -> _Mask:
    return lambda value: None if value is None else mask_value(value)


def _mask_of_items(mask_item: _Mask | None, kind: type[list[Any] | tuple[Any, ...]]) -> _Mask | None:
    if mask_item is None:
        return None
    mask_item = _keeping_none(mask_item)

    def mask_items(items: Sequence[Any]) -> Sequence[Any]:
        shown = kind(map(mask_item, items))
        return items if all(map(is_, shown, items)) else shown

    return mask_items


def _mask_of_names(mask_item: _Mask | None) -> _Mask:
    if mask_item is None:
        return mask_names
    mask_item = _keeping_none(mask_item)
    return lambda given: mask_names({name: mask_item(value) for name, value in given.items()})


_PLAIN: Final = frozenset({bool, int, float, date, datetime, UUID})
_LISTS: Final = frozenset({list, tuple, Sequence})
_MAPPINGS: Final = frozenset({dict, Mapping})


def _mask_of_text(value: Any) -> Any:
    """Return a text without its secrets. A row of another program may have any JSON value in its place."""
    return mask_text(value) if isinstance(value, str) else mask(value)


_MASKS: Final[Mapping[Any, _Mask]] = {str: _mask_of_text, Any: mask, object: mask}
