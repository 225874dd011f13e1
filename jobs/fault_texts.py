"""Error texts for fields in terms of JSON, with the allowed values: the decoder's own refer to Python's types."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from typing import Any, Final, Literal, get_args, get_origin

import msgspec

_NOUNS: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "datetime": "a timestamp",
    "uuid": "a UUID",
}
INSTANT: Final = "a timestamp with a time zone (RFC 3339), such as 2026-11-20T12:00:00Z"
_WRONG_TYPE: Final = re.compile(r"Expected `([\w |]+)`, got `(\w+)`")
_OUT_OF_BOUNDS: Final = re.compile(r"Expected `(int|float)` (?:[<>]=?) \S+")
_WRONG_LENGTH: Final = re.compile(r"Expected `(str|array)` of length [<>]= \d+")


def in_our_words(message: str, kind: Any) -> str:
    """Return the sentence of msgspec's error about a value of `kind`, in a client's terms."""
    if match := _WRONG_TYPE.fullmatch(message):
        expected = " or ".join(_noun(name.strip()) for name in match[1].split("|"))
        return f"must be {expected}, not {_noun(match[2])}"
    if match := _OUT_OF_BOUNDS.fullmatch(message):
        return f"must be {_NOUNS[match[1]]} {_span(_bound(kind, 'ge'), _bound(kind, 'le'))}"
    if match := _WRONG_LENGTH.fullmatch(message):
        items = "characters" if match[1] == "str" else "items"
        return f"must have {_span(_bound(kind, 'min_length'), _bound(kind, 'max_length'), prefix='')} {items}"
    if message.startswith("Invalid enum value") and (choices := list(_choices(kind))):
        return f"must be one of {', '.join(choices)}"
    if message in {"Invalid RFC3339 encoded datetime", "Expected `datetime` with a timezone component"}:
        return f"must be {INSTANT}"
    return message.replace("`", "")


def _noun(name: str) -> str:
    return _NOUNS.get(name, name)


def _span(low: float | None, high: float | None, *, prefix: str = "from ") -> str:
    least, most = (f"{bound:,.15g}" if isinstance(bound, float) else f"{bound or 0:,}" for bound in (low, high))
    if low is None:
        return f"{'of ' if prefix else ''}at most {most}"
    if high is None:
        return f"{'of ' if prefix else ''}at least {least}"
    return f"{prefix}{least} to {most}"


def _bound(kind: Any, name: str) -> float | None:
    found = (getattr(part, name) for part in parts_of_kind(kind) if isinstance(part, msgspec.Meta))
    return next((value for value in found if value is not None), None)


def _choices(kind: Any) -> Iterator[str]:
    for part in parts_of_kind(kind):
        if isinstance(part, type) and issubclass(part, enum.Enum):
            yield from (str(member.value) for member in part)
        elif get_origin(part) is Literal:
            yield from map(str, get_args(part))


def parts_of_kind(kind: Any) -> Iterator[Any]:
    """Yield the kind itself and all its parts."""
    yield kind
    if get_origin(kind) is not Literal:
        for part in get_args(kind):
            yield from parts_of_kind(part)
