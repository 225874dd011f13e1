"""Base class of all operations, and their declarations.

An operation is a value: a struct whose fields are the arguments. It is declared once, and the rest follows from the
declaration: the HTTP route and its OpenAPI (`web/operation_routes.py`), the request of an HTTP client
(`web/http_performer.py`), and the lookup of the implementation (`store/performer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import quote

import attrs
import msgspec
from msgspec import Struct

from dataloader.jobs.errors import BadRequest, DataloaderError, NotFound
from dataloader.jobs.roles import Role

R_co = TypeVar("R_co", covariant=True)
K = TypeVar("K", bound="type[Operation[Any]]")
Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]

_PART: Final = re.compile(r"\{(\w+)\}")
_WORD: Final = re.compile(r"(?<!^)(?=[A-Z])")


class Operation(Struct, Generic[R_co], forbid_unknown_fields=True):
    """Operation whose answer is an `R_co`. Its docstring and fields are its description in OpenAPI."""

    declaration: ClassVar[Declaration]


@attrs.frozen(kw_only=True)
class Declaration:
    """Facts about an operation besides its fields.

    method, path: its HTTP address, below `/api/v1`; `{name}` is replaced by the field `name`.
    role: the role that a caller needs over HTTP.
    errors: the errors that it raises besides `BadRequest`, `AccessDenied` and `StoreUnavailable`, which all operations
        may raise. With `Draining` among them, a process that shuts down refuses the operation.
    large: its answer may have megabytes.
    deadline_s: the seconds in which a service answers; None: those of most requests.
    in_query: the other fields are in the query; if not, in the body.
    operation_id: its name in OpenAPI; by default the name of its class in snake case.
    result: the type of its answer.
    path_fields: the fields in the path, with their types.
    request: the struct of the other fields, None if there are none.
    """

    method: Method
    path: str
    role: Role
    errors: tuple[type[DataloaderError], ...]
    large: bool
    deadline_s: float | None
    in_query: bool
    operation_id: str
    result: Any
    path_fields: dict[str, type]
    request: type[Struct] | None

    @property
    def not_found(self) -> type[NotFound] | None:
        """Error for an object that does not exist, if one is declared."""
        return next((error for error in self.errors if issubclass(error, NotFound)), None)

    def check(self, operation: Operation[Any]) -> None:
        """Raise `BadRequest` for an ID that is text, as in JSON: the database and HTTP would treat it differently."""
        for name, kind in self.path_fields.items():
            value = getattr(operation, name)
            if not isinstance(value, kind):
                raise BadRequest(name, f"must be a {kind.__name__}, not {value!r:.200}")

    def address(self, operation: Operation[Any]) -> str:
        """Return the path of an operation, with its fields filled in."""
        return _PART.sub(lambda part: quote(str(getattr(operation, part[1])), safe=""), self.path)

    def fields(self, operation: Operation[Any]) -> dict[str, Any]:
        """Return the other fields as JSON values."""
        values = msgspec.to_builtins(operation)
        return {name: value for name, value in values.items() if name not in self.path_fields}


class Operations(list[type[Operation[Any]]]):
    """Operations of one feature, in the order of their declaration."""

    def declare(
        self,
        method: Method,
        path: str,
        *,
        role: Role,
        errors: tuple[type[DataloaderError], ...] = (),
        large: bool = False,
        deadline_s: float | None = None,
        in_query: bool | None = None,
        operation_id: str | None = None,
    ) -> Callable[[K], K]:
        """Declare the decorated class as an operation; the arguments are those of `Declaration`.

        The fields that are not in the path are in the query of GET and DELETE and in the body of other methods, unless
        `in_query` is given.
        """

        def declare(kind: K) -> K:
            hints = get_type_hints(kind)
            path_fields = {name: hints[name] for name in _PART.findall(path)}
            kind.declaration = Declaration(
                method=method,
                path=path,
                role=role,
                errors=errors,
                large=large,
                deadline_s=deadline_s,
                in_query=method in {"GET", "DELETE"} if in_query is None else in_query,
                operation_id=operation_id or _WORD.sub("_", kind.__name__).lower(),
                result=_result_of(kind),
                path_fields=path_fields,
                request=_request_of(kind, path_fields),
            )
            self.append(kind)
            return kind

        return declare


def _result_of(kind: type[Operation[Any]]) -> Any:
    """Return the `R` of a class that is an `Operation[R]`."""
    [result] = next(get_args(base) for base in kind.__dict__["__orig_bases__"] if get_origin(base) is Operation)
    return result


def _request_of(kind: type[Operation[Any]], path_fields: dict[str, type]) -> type[Struct] | None:
    """Return the struct of the fields that are not in the path: a base of the class, the class itself, or a new one."""
    fields = [field for field in msgspec.structs.fields(kind) if field.name not in path_fields]
    names = tuple(field.name for field in fields)
    if not names:
        return None
    for base in kind.__bases__:
        if issubclass(base, Struct) and base.__struct_fields__ == names:
            return base
    if not path_fields:
        return kind
    return msgspec.defstruct(
        f"{kind.__name__}Request",
        [(field.name, field.type, field.default) for field in fields],
        module=kind.__module__,
        namespace={"__doc__": kind.__doc__},
        kw_only=True,
        forbid_unknown_fields=True,
    )
