"""Typed arguments of tasks (`args=`): JSON becomes an instance of the user's class before the handler runs, and back.

A class that JSON cannot carry is refused when the task is declared (args_mirrors.py). An instance is checked when it is
enqueued: it is decoded again, and must be equal. If JSON does not fit, `BadRequest` names the path and the value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Generic, TypeVar, get_args, get_origin, is_typeddict

import msgspec

from dataloader.jobs.args_mirrors import COLLECTIONS, Misfit, Reading, is_shape
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.fault_texts import in_our_words, parts_of_kind
from dataloader.jobs.secrets.secret_names import names_a_secret
from dataloader.jobs.text import read_json

A = TypeVar("A")

_TOO_DEEP: Final = "is nested too deeply"

_AT: Final = re.compile(r"(.*?)(?: - at `\$(.*)`)?", re.DOTALL)
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_NAMED: Final = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
_OF_A_KIND: Final = re.compile(r"(must be .*), not .*", re.DOTALL)
_SHOWN: Final = 60
"""Maximum number of characters shown of a wrong value."""


class ArgsType(Generic[A]):
    """Class of arguments: an attrs class, a dataclass, a msgspec struct or a TypedDict."""

    def __init__(self, kind: type[A]) -> None:
        """Raise `ValueError`, which names the field, for a class whose instances JSON cannot carry."""
        self.name: Final[str] = getattr(kind, "__name__", repr(kind))
        if not is_shape(kind):
            allowed = "an attrs class, a dataclass, a msgspec.Struct or a TypedDict"
            raise ValueError(f"args must be {allowed}, not {self.name}")
        self._shape = Reading().shape(kind, self.name)
        self._instances: type = dict if is_typeddict(kind) else kind
        self._has_equality = self._instances.__eq__ is not object.__eq__
        self._decoder = msgspec.json.Decoder(self._shape.mirror)
        self.fields: Final = tuple(field.key for field in self._shape.fields)
        """Names of its fields in JSON."""

    def schema(self, ref_template: str = "#/$defs/{name}") -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the JSON Schema of the arguments, and by name the parts that it refers to by `ref_template`."""
        (whole,), parts = msgspec.json.schema_components([self._shape.mirror], ref_template=ref_template)
        for name in list(parts):
            if whole.get("$ref") == ref_template.format(name=name):
                whole = parts.pop(name)
        return {**whole, "title": self.name}, parts

    def decode(self, text: str | bytes) -> A:
        """Return the instance of JSON text. Raises `BadRequest` with the path of a value that does not fit."""
        try:
            instance: A = self._shape.built(self._decoder.decode(text))
        except msgspec.ValidationError as error:
            raise self._refusal(str(error), text) from None
        except RecursionError:
            raise BadRequest("args", _TOO_DEEP) from None
        except Misfit as misfit:
            raise BadRequest(f"args{misfit.path}", misfit.message) from misfit.__cause__
        return instance

    def encode(self, value: object) -> dict[str, Any]:
        """Return the JSON object of an instance, or of a mapping that is one already.

        Raises `BadRequest` for a mapping that does not fit, and for an instance that is not equal to itself after JSON.
        """
        if type(value) is not self._instances:
            if not isinstance(value, Mapping):
                raise BadRequest("args", f"must be an instance of {self.name}, not of {type(value).__name__}")
            given = dict(value)
            self.decode(_encoded_args(given))
            return given
        try:
            encoded = self._encoded(value)
        except (TypeError, ValueError, AttributeError, RecursionError, Misfit) as error:
            raise BadRequest(
                "args", f"must be an instance of {self.name} that can be written as JSON: {error}"
            ) from error
        again = self.decode(_encoded_args(encoded))
        if not (again == value if self._has_equality else self._encoded(again) == encoded):
            raise BadRequest(
                "args", f"must not change when encoded as JSON: {value!r:.200} is decoded as {again!r:.200}"
            )
        return encoded

    def _encoded(self, value: object) -> dict[str, Any]:
        encoded: dict[str, Any] = msgspec.to_builtins(self._shape.mirrored(value), str_keys=True, order="deterministic")
        return encoded

    def _refusal(self, error: str, text: str | bytes) -> BadRequest:
        """Return msgspec's error in our words: the path, the allowed value, and the actual one."""
        match = _AT.fullmatch(error)
        message, path = (match[1], match[2] or "") if match else (error, "")
        if named := _NAMED.fullmatch(message):
            path = f"{path}.{named[2]}"
            if named[1] == "missing required":
                return BadRequest(f"args{path}", "is required")
            known = "" if path.count(".") > 1 else f"; fields of {self.name}: {', '.join(self.fields)}"
            return BadRequest(f"args{path}", f"is unknown{known}")
        words = in_our_words(message, _hint_at(path, self._shape.mirror))
        if (shown := _shown_value(path, text)) is not None:
            kind = _OF_A_KIND.fullmatch(words)
            words = f"{kind[1] if kind else words}, not {shown}"
        return BadRequest(f"args{path}", words)


def args_of(text: str | bytes, kind: ArgsType[Any] | None) -> Any:
    """Return the args of a job from the JSON of its row, as an instance if its task has a class of arguments.

    Raises `BadRequest` for JSON that does not fit, and for JSON that is nested too deeply for Python.
    """
    if kind is not None:
        return kind.decode(text)
    try:
        return read_json(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise BadRequest("args", _TOO_DEEP) from None


def _encoded_args(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest("args", f"is not JSON: {error}") from error


def _shown_value(path: str, text: str | bytes) -> str | None:
    """Return the value at a path, if it is short, not a secret, and can be found."""
    try:
        value = read_json(text if isinstance(text, str) else text.decode())
    except RecursionError:
        return None
    steps = list(_STEP.finditer(path))
    if "".join(step[0] for step in steps) != path or any(step[1] and names_a_secret(step[1]) for step in steps):
        return None
    try:
        for step in steps:
            value = value[step[1]] if step[1] is not None else value[int(step[2])]
    except (LookupError, TypeError, ValueError):
        return None  # for example msgspec's [...], which means any key
    if isinstance(value, dict | list):
        return None
    encoded = msgspec.json.encode(value).decode()
    return encoded if len(encoded) <= _SHOWN else f"{encoded[:_SHOWN]}…"


def _hint_at(path: str, hint: Any) -> Any:
    """Return the type at a path below a mirror, or None if it cannot be determined."""
    for step in _STEP.finditer(path):
        parts = list(parts_of_kind(hint))
        if step[1] is None:
            inner = [get_args(part) for part in parts if get_origin(part) in COLLECTIONS]
        else:
            mirrors = [part for part in parts if isinstance(part, type) and issubclass(part, msgspec.Struct)]
            fields = [field for mirror in mirrors[:1] for field in msgspec.structs.fields(mirror)]
            inner = [(field.type,) for field in fields if field.encode_name == step[1]]
        if not inner:
            return None
        hint = inner[0][1 if len(inner[0]) == 2 and inner[0][1] is not ... else 0]
    return hint
