"""Decodes typed requests from bytes and query strings, and reports all their errors together.

The fast path is msgspec's: one pass, typed. It stops at the first error, so a request that fails is checked again field
by field, and the 422 names each bad field by its path (`jobs[3].priority`). Therefore quart-schema is not used: it
reports only msgspec's first error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final, TypeVar, get_args, get_origin

import msgspec
import trio
from msgspec import NODEFAULT, Struct

from dataloader.jobs.fault_texts import in_our_words
from dataloader.jobs.former_names import former_value, renamed
from dataloader.jobs.json_values import MAX_VALUES, has_too_many_values
from dataloader.jobs.operations.fields import JobFields
from dataloader.web.problems import FieldError, ProblemError, unprocessable
from dataloader.web.server.bodies import NOT_COUNTED
from dataloader.web.server.refusals import Refusal, Refusals

S = TypeVar("S", bound=Struct)

_WHERE: Final = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)
_OURS: Final = re.compile(r"(\$|[a-z_]+): (.*)", re.DOTALL)
_MAX_ERRORS: Final = 100
_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


_decoder: Final = cache(msgspec.json.Decoder)


def prepare(kind: type[Struct]) -> None:
    """Create the decoder of a body's type, before requests are served.

    Otherwise two threads may begin to create the same one. Then one of them uses the incomplete description of the type
    (msgspec does not lock it), and the process crashes.
    """
    _decoder(kind)


async def decode_body(data: bytearray, kind: type[S], refusals: Refusals, threads: trio.CapacityLimiter) -> S:
    """Return the request in a body. A long one is decoded in one of `threads`; only single fields can block the loop.

    Raises `ProblemError`: 413 for too many values, 400 for invalid JSON, 422 with the path of each bad field.
    """
    try:
        if len(data) <= NOT_COUNTED:
            return _decode(data, kind)
        return await trio.to_thread.run_sync(_decode, data, kind, limiter=threads)
    except _TooManyValuesError as error:
        refusals.count(Refusal.VALUES)
        message = (
            f"The body has more than {MAX_VALUES:,} values (lists and objects count twice), the limit of this address."
        )
        raise ProblemError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message) from error


def _decode(data: bytearray, kind: type[S]) -> S:
    if has_too_many_values(data):
        raise _TooManyValuesError
    try:
        decoded: S = _decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise _refusal_of(data, kind, error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _no_json(error) from error
    return decoded


class _TooManyValuesError(Exception):
    """The body has more values than allowed."""


def _refusal_of(data: bytearray, kind: type[Struct], error: msgspec.ValidationError) -> ProblemError:
    try:
        value = msgspec.json.decode(data)
    except msgspec.ValidationError:  # a number that no float can represent
        return unprocessable([_field_error(error, "", kind)])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        return _no_json(fault)
    return unprocessable(_faults(value, kind, error, strict=True))


def convert(value: Mapping[str, object], kind: type[S]) -> S:
    """Convert some fields of a decoded body. Raises `ProblemError` 422 with each bad field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise unprocessable(_faults(value, kind, error, strict=True)) from error


def decode_query(arguments: Mapping[str, list[str]], kind: type[S]) -> S:
    """Return the request in a query string; lists may be repeated or comma-separated. Raises `ProblemError` 422."""
    lists = _lists(kind)
    value = {
        name: [part for text in texts for part in text.split(",")] if name in lists else texts[-1]
        for name, texts in arguments.items()
    }
    try:
        query = msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise unprocessable(_faults(value, kind, error, strict=False)) from error
    # msgspec decodes the word "null" as None, so an invalid filter would become no filter.
    given = (field for field in msgspec.structs.fields(kind) if field.encode_name in value)
    if nulls := [field.encode_name for field in given if getattr(query, field.name) is None]:
        raise unprocessable([FieldError(name, "must not be null; omit it instead") for name in nulls])
    return query


@cache
def _lists(kind: type[Struct]) -> frozenset[str]:
    """Return the fields that are lists. Asking msgspec each time takes longer than decoding a query."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind) if _is_list(field.type))


def _no_json(error: Exception) -> ProblemError:
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return ProblemError(HTTPStatus.BAD_REQUEST, f"The body is not JSON: {reason}.", kind="no-json")


def _faults(value: object, kind: type[Struct], first: msgspec.ValidationError, *, strict: bool) -> list[FieldError]:
    """Return all errors of a value, at least msgspec's `first` one."""
    found = []
    for fault in _struct_faults(value, kind, "", strict=strict):
        found.append(fault)
        if len(found) == _MAX_ERRORS:
            break
    return found or [_field_error(first, "", kind)]


def _struct_faults(value: object, kind: type[Struct], path: str, *, strict: bool) -> Iterator[FieldError]:
    if not isinstance(value, dict):
        yield FieldError(path or "$", "must be an object")
        return
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    former_fields: Mapping[str, str] = getattr(kind, "FORMER_FIELDS", _NONE)
    former: Mapping[str, Mapping[str, str]] = getattr(kind, "FORMER_VALUES", _NONE)
    for name in value:
        if name in former_fields:
            yield FieldError(_join_path(path, name), renamed(former_fields[name]))
        elif name not in fields:
            yield FieldError(_join_path(path, name[:100]), f"is unknown; the allowed fields are {', '.join(fields)}")
    for name, field in fields.items():
        where = _join_path(path, name)
        if isinstance(given := value.get(name), str) and given in former.get(name, _NONE):
            yield FieldError(where, former_value(given, former[name][given]))
        elif name in value:
            yield from _field_faults(value[name], field.type, where, strict=strict)
            if issubclass(kind, JobFields) and (message := kind.refusal(name, value[name], field.type)):
                yield FieldError(where, message)
        elif field.default is NODEFAULT and field.default_factory is NODEFAULT:
            yield FieldError(where, "is required")


def _field_faults(value: object, kind: Any, path: str, *, strict: bool) -> Iterator[FieldError]:
    """Yield the type errors of one field; the items of a list of structs yield their own."""
    item_kind = _struct_in_list(kind)
    if isinstance(value, list) and (most := _most_items(kind)) is not None and len(value) > most:
        yield FieldError(path, f"must have at most {most:,} items")
        return  # there may be very many, and each takes time
    try:
        msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        # msgspec names the first bad item; others may be bad, too.
        if item_kind is None or not isinstance(value, list) or " - at `" not in str(error):
            yield _field_error(error, path, kind)
            return
    if item_kind is not None and isinstance(value, list):
        for index, item in enumerate(value):
            try:
                msgspec.convert(item, item_kind, strict=strict)
            except msgspec.ValidationError:
                yield from _struct_faults(item, item_kind, f"{path}[{index}]", strict=strict)


def _field_error(error: msgspec.ValidationError, path: str, kind: Any) -> FieldError:
    """Return msgspec's error about a value of `kind` in our words, with its path appended to `path`."""
    match = _WHERE.fullmatch(str(error))
    message, where = (match[1], match[2] or "") if match else (str(error), "")
    if ours := _OURS.fullmatch(message):
        where, message = _join_path(where, ours[1]) if ours[1] != "$" else where, ours[2]
    return FieldError(_join_path(path, where) or "$", in_our_words(message, kind))


def _join_path(path: str, name: str) -> str:
    if not path or not name:
        return path or name
    return f"{path}{name}" if name.startswith("[") else f"{path}.{name}"


def _is_list(kind: object) -> bool:
    return any(get_origin(part) in {list, frozenset} for part in _parts_outside_lists(kind))


def _struct_in_list(kind: object) -> type[Struct] | None:
    for part in _parts_outside_lists(kind):
        if get_origin(part) is list and isinstance(item := get_args(part)[0], type) and issubclass(item, Struct):
            return item
    return None


def _most_items(kind: object) -> int | None:
    """Return the maximum length of a list, if it has one."""
    return next(
        (p.max_length for p in _parts_outside_lists(kind) if isinstance(p, msgspec.Meta) and p.max_length is not None),
        None,
    )


def _parts_outside_lists(kind: object) -> Iterator[Any]:
    """Yield the kind itself and all parts of its annotations and unions."""
    yield kind
    if get_origin(kind) not in {list, frozenset, dict}:
        for part in get_args(kind):
            yield from _parts_outside_lists(part)
