"""Description of a field of a request for a job: how it is stored, hashed, shown and sent over HTTP.

`JOB_FIELDS` in `model.py` has the description of each field of `NewJob`. Statements of the store, the request's hash,
bodies over HTTP and the options of schedules are made from it. Tests compare with it what is written by hand: the
options in Python, the SQL functions and the claims.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, get_args, get_type_hints

import attrs
from msgspec import Meta

_NO_BOUNDS: Final[Mapping[str, object]] = MappingProxyType({})


@attrs.frozen
class JobField:
    """Description of a field.

    sql: type of its parameter in statements that add jobs.
    about, example, bounds: description for OpenAPI; the class enforces the bounds.
    column: name of its parameter, if it is not the field's; None if it is stored in another table.
    as_given: the column has the value of the request. The other fields have a default or a rule in the statements.
    hashed: whether requests with one idempotency key are the same only if they agree in the field. One that is added
        later is hashed if it is given: requests without it keep their hashes, which are stored.
    is_seen: handlers see it.
    is_single: it makes no sense for all jobs of a schedule.
    null: meaning of null in a body over HTTP, which must then have the field. Otherwise null is: not given.
    wire: type in a body over HTTP, if it is not the field's without None.
    """

    sql: str
    about: str
    example: object = None
    bounds: Mapping[str, object] = _NO_BOUNDS
    column: str | None = ""
    as_given: bool = False
    hashed: Literal["always", "if given", "never"] = "if given"
    is_seen: bool = False
    is_single: bool = False
    null: str = ""
    wire: Any = None
    name: str = ""
    kind: Any = None
    is_required: bool = False

    @property
    def may_hold_secrets(self) -> bool:
        """Whether it has text of the requester, which is masked where it is shown."""
        return self.kind in {str, dict[str, Any]}

    @property
    def meta(self) -> Meta:
        """Description for OpenAPI."""
        examples = None if self.example is None else [self.example]
        return Meta(description=self.about, examples=examples, extra_json_schema=dict(self.bounds) or None)

    @property
    def in_body(self) -> tuple[str, Any] | tuple[str, Any, None]:
        """Name, type and default in a body over HTTP."""
        kind: Any = Annotated[(self.wire or self.kind, self.meta)]
        if self.null:
            return self.name, Annotated[kind | None, Meta(description=self.null)]
        return (self.name, kind) if self.is_required else (self.name, kind | None, None)


def job_fields(kind: type, fields: Mapping[str, JobField]) -> Mapping[str, JobField]:
    """Return the descriptions of the fields of a class by their names, in the order of `fields`."""
    hints, declared = get_type_hints(kind), attrs.fields_dict(kind)
    return MappingProxyType(
        {
            name: attrs.evolve(
                field,
                name=name,
                kind=_kind_of(hints[name]),
                column=name if field.column == "" else field.column,
                is_required=declared[name].default is attrs.NOTHING,
            )
            for name, field in fields.items()
        }
    )


def _kind_of(hint: Any) -> Any:
    parts = get_args(hint)
    return reduce(or_, (part for part in parts if part is not type(None))) if type(None) in parts else hint
