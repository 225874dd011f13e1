"""Converts any text or value to a form that PostgreSQL can store, so that a job always ends, whatever it returned.

NUL and lone surrogates become visible escapes. Long text is cut in the middle, since the head and the tail of a
traceback are the useful parts. Values that are not JSON become their `repr`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec

from dataloader.jobs.errors import BadRequest

T = TypeVar("T")

MAX_ERROR: Final = 16_384
"""Maximum number of characters kept of an error's text."""
MAX_JSON: Final = 1_048_576
"""Maximum size of a result, a progress object or a log line's fields, in bytes."""
MAX_DEPTH: Final = 200
"""Levels of nested JSON that readers are shown; code that recurses over a value needs enough stack anywhere."""
MAX_BEGINNING: Final = 10_000
"""Characters shown of JSON that is too long, or nested too deeply."""

JSON_TEXT: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+'
"""Pattern, for `re.DOTALL`, of a text in JSON, as bytes: it never reads a byte twice, and keeps nothing.

It also matches a text that does not end; otherwise each quote in it would begin a search that reads to the end.
"""
MAX_MASKED: Final = 65_536
"""Characters of a text that are masked if less of it is kept: more would block the event loop."""

# Numbers that PostgreSQL writes out: 1e308 has 309 digits. The second pattern excludes texts that look like one.
_MAY_GROW = re.compile(rb"e[+-]?[0-9]{2}")
_EXPONENT = re.compile(JSON_TEXT + rb"|[0-9]e([+-]?[0-9]++)", re.DOTALL)
_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_MANY_DIGITS: Final = b"0" * 309
_LONG_NUMBER = re.compile(JSON_TEXT + rb"|([0-9]{309})", re.DOTALL)
_MAY_BE_INFINITE: Final = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""Float in MessagePack that is infinite or not a number; UTF-8 text never has these bytes."""
UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
"""Characters that PostgreSQL stores in no text."""
CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Characters that no name may have: control characters, line separators, and those that PostgreSQL cannot store."""
# jsonb also refuses \u0000 and lone surrogates as escapes. A pair of surrogates is valid, and msgspec never writes it
# as escapes.
_ESCAPED_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def storable_text(text: str, limit: int = MAX_ERROR) -> str:
    """Return `text` without characters that PostgreSQL cannot store, cut in the middle to `limit` characters."""
    if len(text) > limit:
        note = f"\n… {len(text) - limit:,} characters cut …\n"
        keep = max(limit - len(note), 2)
        text = text[: keep - keep // 3] + note + text[len(text) - keep // 3 :]
    return UNSTORABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def cut_texts(fields: Mapping[str, object], limit: int = MAX_MASKED) -> dict[str, object]:
    """Return the fields of a line, with texts cut to the length that is masked."""
    return {
        name: storable_text(value, limit) if isinstance(value, str) and len(value) > limit else value
        for name, value in fields.items()
    }


def growth(encoded: bytes) -> int:
    """Return how many bytes longer our JSON becomes when PostgreSQL writes its numbers out; spaces are not counted."""
    if not _MAY_GROW.search(encoded):
        return 0
    return sum(abs(int(found[1])) for found in _EXPONENT.finditer(encoded) if found[1])


def has_long_number(encoded: bytes) -> bool:
    """Return True if our JSON has an integer that no float can represent, which fails in many readers."""
    if len(encoded) < len(_MANY_DIGITS) or _MANY_DIGITS not in encoded.translate(_AS_ZEROS):
        return False  # nearly always; the pattern takes twenty times as long
    return any(found[1] for found in _LONG_NUMBER.finditer(encoded))


def storable_json(value: object, limit: int = MAX_JSON) -> str:
    """Return `value` as JSON text that `jsonb` accepts. If it is not JSON, or too long, an object says so instead."""
    try:
        encoded = _encode(value)
    except Exception as error:  # noqa: BLE001 - a handler's objects may raise anything; the job must still end
        encoded = msgspec.json.encode(
            {"unstorable": storable_text(_repr(value), 1_000), "error": storable_text(said_by(error), 500)}
        )
    if len(encoded) + growth(encoded) > limit:
        cut = encoded[: limit // 16].decode("utf-8", "ignore")
        encoded = msgspec.json.encode(
            {"truncated": storable_text(cut, 10_000), "bytes": len(encoded) + growth(encoded)}
        )
    text = encoded.decode()
    if "\\u0000" in text:
        text = _ESCAPED_NUL.sub(r"\1\\\\u0000", text)
    return text


def exact_json(field: str, value: object, limit: int) -> str:
    """Return `value` as JSON text that `jsonb` stores unchanged, at most `limit` bytes.

    Raises `BadRequest` for `field`.
    """
    try:
        encoded = msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(field, f"is not JSON: {error}") from error
    if b"null" in encoded and (found := _not_finite(value)):
        raise BadRequest(f"{field}{found[0]}", f"must be a finite number, not {found[1]}")
    if has_long_number(encoded):
        raise BadRequest(field, "must not have integers of more than 308 digits; send them as strings")
    length = len(encoded) + growth(encoded)
    if length > limit:
        raise BadRequest(field, f"must have at most {limit:,} bytes in PostgreSQL's format, not {length:,}")
    text = encoded.decode()
    if "\\u0000" in text and storable_json(value, limit) != text:
        raise BadRequest(field, "has a NUL in a string, which PostgreSQL cannot store")
    return text


def said_by(error: BaseException) -> str:
    """Return the name of an error's class, and its text."""
    return f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")


def text_of(value: object) -> str:
    """Return `str(value)`, or a note if that fails, as it may for users' classes."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - an error without a text is still an error
        return "(its text is not available)"


def _encode(value: object) -> bytes:
    try:
        encoded = msgspec.json.encode(value, enc_hook=_text_of_unknown)
    except UnicodeEncodeError:
        encoded = msgspec.json.encode(_clean(value), enc_hook=_text_of_unknown)
    if b"null" in encoded and _not_finite(value):
        return msgspec.json.encode(_clean(msgspec.to_builtins(value, enc_hook=_text_of_unknown)))
    return encoded


def _not_finite(value: object) -> tuple[str, float] | None:
    """Return the path and the value of a float that JSON cannot represent. msgspec writes null for it."""
    try:
        # MessagePack keeps such floats, and a search for them takes less time than a walk.
        if not _MAY_BE_INFINITE.search(msgspec.msgpack.encode(value, enc_hook=_text_of_unknown)):
            return None
    except (OverflowError, UnicodeEncodeError):
        pass  # an integer of more than 64 bits, or a lone surrogate
    left: list[tuple[str, Any]] = [("", msgspec.to_builtins(value, enc_hook=_text_of_unknown))]
    while left:
        path, one = left.pop()
        if isinstance(one, float) and not math.isfinite(one):
            return path, one
        if isinstance(one, Mapping):
            left += ((f"{path}.{key}", item) for key, item in one.items())
        elif isinstance(one, list | tuple | set | frozenset):
            left += ((f"{path}[{number}]", item) for number, item in enumerate(one))
    return None


def read_json(text: str) -> Any:
    """Return the value of JSON text from the database."""
    try:
        return msgspec.json.decode(text)
    except msgspec.ValidationError:
        # jsonb keeps numbers that no float can represent; one such value must not make a foreign row unreadable.
        return json.loads(text, parse_int=float)


def json_or_none(text: str | None) -> Any:
    """Return the value of JSON text that this program has written; None for None."""
    return None if text is None else msgspec.json.decode(text)


def stored_json(text: str) -> Any:
    """Return the value of any stored JSON; if it is nested too deeply for Python, an object with its beginning.

    Any program may have written the row, and an undecodable one would stop the statement that reads it.
    """
    try:
        return read_json(text)
    except RecursionError:
        return _truncated(text)


def as_object(value: object) -> dict[str, Any]:
    """Return `value` if it is a JSON object, else an object that contains it: any program may have written it."""
    return value if isinstance(value, dict) else {"value": value}


def stored_object(text: str) -> dict[str, Any]:
    """Return the JSON object of a row, or an object that contains the value if it is not one."""
    return as_object(stored_json(text))


def listed_json(text: str, kind: type[T]) -> list[T]:
    """Return the items of a JSON list as `kind`. Invalid ones are left out: any program may have written the list."""
    try:
        return msgspec.json.decode(text, type=list[kind])  # type: ignore[valid-type]
    except (msgspec.ValidationError, RecursionError):
        items: list[T] = []
        parts: list[msgspec.Raw] = []
        with suppress(msgspec.ValidationError):
            parts = msgspec.json.decode(text, type=list[msgspec.Raw])
        for item in parts:
            with suppress(msgspec.ValidationError, RecursionError):
                items.append(msgspec.json.decode(item, type=kind))
        return items


def shown_json(text: str) -> Any:
    """Return JSON for display: a value deeper than `MAX_DEPTH` becomes an object with its beginning."""
    try:
        value = read_json(text)
        is_deep = text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value)
    except RecursionError:
        is_deep = True
    return _truncated(text) if is_deep else value


def _truncated(text: str) -> dict[str, object]:
    return {"truncated": text[:MAX_BEGINNING], "bytes": len(text.encode())}


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        parts = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [part for values in parts for part in values]
        if not level:
            return False
    return True


def _text_of_unknown(value: object) -> Any:
    return storable_text(_repr(value), 1_000)


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - a handler's __repr__ may raise anything; the job must still end
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"


def _clean(value: object) -> object:
    """Return `value` with every string made storable: the slow path, for values with lone surrogates."""
    match value:
        case str():
            return storable_text(value, MAX_JSON)
        case dict():
            return {storable_text(str(key), 1_000): _clean(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_clean(item) for item in value]
        case float() if not math.isfinite(value):
            return repr(value)
        case _:
            return value
