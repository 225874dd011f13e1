"""Public classes of loads and their arguments, for docs/etl-reference.md."""

from __future__ import annotations

import inspect
from typing import Any

import attrs

from dataloader.flows import etl

NOT_DECLARED = {"PipelineConfig", "PipelineSettings", "Reader", "Source", "SourceError"}
"""Settings, which have a separate table, and classes that users do not create: a reader, a protocol, an error."""

CLASSES = [
    name for name in etl.__all__ if isinstance(getattr(etl, name), type) and name not in NOT_DECLARED | {"Record"}
]

SPECIAL = {
    ("Http", "name"): "the host of `url`",
    ("Http", "format"): "`Json()`",
    ("Http", "auth"): "`Auth()`",
    ("Routing", "now"): "the system's",
    ("Load", "transform"): "`dict`",
    ("Load", "pipeline"): "`{}`",
    ("Windows", "look_back"): "`timedelta()`",
    ("Windows", "delay"): "`timedelta()`",
}
TYPES = {
    ("Files", "paths"): "str, Path or a list of them",
    ("Load", "pipeline"): "Mapping[str, Any]",
    ("Windows", "segment"): "str or timedelta",
}


@attrs.frozen
class Argument:
    """Argument of the class `owner`; `default` is `NOTHING` if it is required."""

    owner: str
    name: str
    type: str
    default: Any


def fields_of(name: str) -> list[Argument]:
    """Return the arguments of a class, in their order."""
    cls = getattr(etl, name)
    if attrs.has(cls):
        return [Argument(name, field.name, str(field.type), field.default) for field in attrs.fields(cls) if field.init]
    return [
        Argument(name, one.name, str(one.annotation), one.default) for one in inspect.signature(cls).parameters.values()
    ]


def type_of(argument: Argument) -> str:
    """Return its type in words, since a table's cell cannot contain a bar."""
    told = TYPES.get((argument.owner, argument.name), argument.type)
    return f"`{told.replace(' | ', ' or ')}`"


def default_of(argument: Argument) -> str:
    """Return its default as source text."""
    special = SPECIAL.get((argument.owner, argument.name))
    default = argument.default
    if special is not None:
        return special
    if default is attrs.NOTHING:
        return "required"
    if isinstance(default, attrs.Factory):
        default = default.factory()
    return f"{default:,}" if type(default) is int else f"`{default!r}`"
