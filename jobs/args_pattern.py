"""Pattern for a search in the args of jobs: a JSON object that they contain, or `name=value`.

Readers of jobs do not see their secrets, so a search must not reveal them either. Keys that name a secret are refused,
and so is a value that masking would hide. A value that only its place makes a secret (the value beside a name, the word
after an option) is searched for in masked args only: see `shows_in`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import check_text
from dataloader.jobs.secrets.masking import mask, names_a_secret

MAX_PATTERN: Final = 2_000
"""Maximum number of characters of a search."""
_MAX_DEPTH: Final = 10


@attrs.frozen
class ArgsPattern:
    """JSON objects. Args match if they contain at least one of them, as defined by PostgreSQL's `@>`."""

    values: tuple[Any, ...]

    @classmethod
    def parsed(cls, text: str) -> ArgsPattern:
        """Return the pattern for a text that a reader has typed. Raises `BadRequest` for field `args`."""
        check_text("args", text, MAX_PATTERN)
        stripped = text.strip()
        values = (_object_pattern(stripped),) if stripped.startswith("{") else _named_pattern(stripped)
        for value in values:
            _refuse_secrets(value)
        return cls(values)

    @property
    def texts(self) -> list[str]:
        """Objects as JSON, with exact numbers."""
        return [_json_with_decimals(value) for value in self.values]

    def shows_in(self, args: Any) -> bool:
        """Return True if args contain the pattern after their secrets are masked."""
        masked = mask(args)
        return any(_contains(masked, value) for value in self.values)


def _json_with_decimals(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(name)}:{_json_with_decimals(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_json_with_decimals, value)) + "]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value)


def _decoded(text: str) -> Any:
    return json.loads(text, parse_float=Decimal, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _object_pattern(text: str) -> Any:
    try:
        value = _decoded(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest("args", f"is neither a JSON object nor name=value: {error}") from error
    if _depth(value) > _MAX_DEPTH:
        raise BadRequest("args", f"must not be nested deeper than {_MAX_DEPTH} levels")
    return value


def _named_pattern(text: str) -> tuple[Any, ...]:
    """Parse `name=value`: the value as a text, and as the number or word that it may be in JSON."""
    name, equals, given = text.partition("=")
    name, given = name.strip(), given.strip()
    if not equals or not name:
        raise BadRequest("args", 'must be name=value, or a JSON object such as {"source": "ecb"}')
    values: list[Any] = [{name: given}]
    try:
        value = _decoded(given)
    except (ValueError, RecursionError):
        value = given
    if isinstance(value, str):
        values = [{name: value}]
    elif not isinstance(value, dict | list):
        values.append({name: value})
    return tuple(values)


def _depth(value: Any) -> int:
    if isinstance(value, dict | list):
        return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)
    return 0


def _refuse_secrets(value: Any) -> None:
    for name in _all_names(value):
        if names_a_secret(name):
            raise BadRequest("args", f"must not search for {name[:100]!r}, because values with this name are secret")
    if mask(_floats(value)) != _floats(value):
        raise BadRequest("args", "must not search for masked secrets")


def _all_names(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(name for item in value.values() for name in _all_names(item))]
    return [name for item in value for name in _all_names(item)] if isinstance(value, list) else []


def _floats(value: Any) -> Any:
    """Return a value as args are read: numbers with a fraction are floats."""
    if isinstance(value, dict):
        return {name: _floats(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_floats(item) for item in value]
    return float(value) if isinstance(value, Decimal) else value


def _contains(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return isinstance(value, Mapping) and all(
            name in value and _contains(value[name], item) for name, item in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(value, list) and all(any(_contains(one, item) for one in value) for item in wanted)
    if isinstance(wanted, bool) or isinstance(value, bool):
        return value is wanted
    if isinstance(wanted, int | Decimal):
        return isinstance(value, int | float) and value == (wanted if isinstance(value, int) else float(wanted))
    return bool(type(value) is type(wanted) and value == wanted)
