"""Masks secrets in texts for people and machines: log lines, error texts, settings, a job's fields.

The logs call `mask` on every line; web/, the command line and the event histories mask what they show. In the database
a job's keys and args stay as they were sent: locks, idempotency and filters compare real values.

There are two rules. The value under a name like `password` or `access_key` becomes `***` (secret_names.py). Within
texts these become `***`: values after such names, users and passwords in URLs, private keys, and tokens of a known
format (secrets_in_text.py, token_formats.py). In case of doubt a value is hidden.

Never raises, whatever the value is, and needs time linear in the text.
"""

import datetime as dt
import decimal
import pathlib
import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from dataloader.jobs.secrets.long_texts import LONG, LongTexts
from dataloader.jobs.secrets.secret_names import NOTHING, NameMeaning, meaning_of, names_a_secret
from dataloader.jobs.secrets.secrets_in_text import MASKED, secrets_in

__all__ = ["MASKED", "mask", "mask_address", "mask_names", "mask_text", "names_a_secret"]

T = TypeVar("T")

_MAX_DEPTH: Final = 16
_MAX_INT_BITS: Final = 1_024
_NAME: Final = re.compile(r"[\w.:-]{1,200}")
_OPTION: Final = re.compile(r"--?[A-Za-z_][\w.-]*+")
_LONG_TEXTS: Final = LongTexts(secrets_in)


def mask_text(text: str) -> str:
    """Return the text with its secrets replaced by `***`: URLs, headers, `name=value`, JSON, XML, tokens.

    Takes time linear in the length. A text that is masked again may lose more characters that are not secret, and gains
    nothing. A long text that was masked lately is not searched again (long_texts.py).
    """
    secrets = secrets_in(text) if len(text) <= LONG else _LONG_TEXTS.secrets_in(text)
    if not secrets:
        return text
    parts: list[str] = []
    done = 0
    for start, end in secrets:
        parts += (text[done:start], MASKED)
        done = end
    return "".join([*parts, text[done:]])


def mask_address(address: str) -> str:
    """Return a database's address without user and password, even if these have characters not allowed in a URL."""
    place, mark, query = address.partition("?")
    scheme, _, rest = place.partition("://")
    if "@" in rest:
        rest = f"{MASKED}@{rest.rpartition('@')[2]}"
    return mask_text(f"{scheme}://{rest}{mark}{query}")


def mask_names(values: Mapping[str, T]) -> dict[str, T]:
    """Return a copy with the secrets in its names masked and its values as they are: for counts by queue."""
    return _by_masked_name(values.items())


def mask(value: object) -> object:
    """Return a copy made of dict, list, str, numbers, bool and None only, with the secrets in it masked.

    Bytes become text, dates ISO text, every other object its masked `repr`. Values deeper than 16 levels become `…`.
    `None`, `True` and `False` are shown even under a secret name: they say whether there is a secret.
    """
    return _mask(value, 0)


def _mask(value: object, depth: int) -> object:
    if type(value) is str:
        return mask_text(value)
    if value is None or value is True or value is False:
        return value
    # Subclasses (enums, numpy's, a str with its own repr) become plain values, so that any encoder accepts them.
    if isinstance(value, (int, float)):
        return _plain_number(value)
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        try:
            return "…" if depth >= _MAX_DEPTH else _mask_container(value, depth + 1)
        except Exception as error:  # noqa: BLE001 - a foreign container whose iteration fails must not fail a log line
            return f"<unreadable {type(value).__name__}: {type(error).__name__}>"
    return mask_text(_text_of_any(value))


def _plain_number(value: float) -> float | str:
    if not isinstance(value, int):
        return float.__float__(value)
    # Longer ones have no float: many JSON readers fail on them, and Python refuses to print the longest.
    return int.__int__(value) if value.bit_length() <= _MAX_INT_BITS else _text_of_any(value)


def _mask_container(value: Mapping[object, object] | Iterable[object], depth: int) -> object:
    if isinstance(value, Mapping):
        return _mask_mapping([(_text_of_any(key), item) for key, item in list(value.items())], depth)
    items = [*value]
    if len(items) == 2 and _is_entry(items[0]):
        return [
            _mask(items[0], depth),
            _hide(items[1]) if _hides(meaning_of(_text_of_any(items[0])), items[1]) else _mask(items[1], depth),
        ]
    masked: list[object] = []
    option = NOTHING
    for item in items:
        text = item if isinstance(item, str) else ""
        is_hidden = option.hides(text) and bool(text) and not text.startswith("--")
        masked.append(MASKED if is_hidden else _mask(item, depth))
        option = meaning_of(text) if _OPTION.fullmatch(text) else NOTHING
    return masked


def _mask_mapping(items: list[tuple[str, object]], depth: int) -> dict[str, object]:
    meanings = [meaning_of(name) for name, _ in items]
    # As {"name": "DB_PASSWORD", "value": "s3cr3t"}: the name of the value is beside it.
    is_value_named = is_value_secret = False
    if any(meaning.value for meaning in meanings):
        labels = [item for (_, item), meaning in zip(items, meanings, strict=True) if meaning.label]
        is_value_named = any(isinstance(label, str) for label in labels)
        is_value_secret = any(isinstance(label, str) and names_a_secret(label) for label in labels)
    shown: list[tuple[str, object]] = []
    for (name, item), meaning in zip(items, meanings, strict=True):
        hidden = (_hides(meaning, item) and not (meaning.label and is_value_named)) or (
            meaning.value and is_value_secret
        )
        shown.append((name, _hide(item) if hidden else _mask(item, depth)))
    return _by_masked_name(shown)


def _by_masked_name(items: Iterable[tuple[str, T]]) -> dict[str, T]:
    masked: dict[str, T] = {}
    again = 1
    for name, item in items:
        shown = mask_text(name)
        if shown in masked:  # names that differ only in their secrets
            again += 1
            shown = f"{shown} ({again})"
        masked[shown] = item
    return masked


def _is_entry(name: object) -> bool:
    """Return whether a list of two with this first item is a name and its value: `["X-Api-Key", "s3cr3t"]`."""
    text = _text_of_any(name) if isinstance(name, (str, bytes)) else ""
    return names_a_secret(text) and _NAME.fullmatch(text) is not None


def _hides(meaning: NameMeaning, value: object) -> bool:
    """Return whether this value must not be shown under such a name."""
    if meaning.secret:
        return not isinstance(value, (int, float, str)) or meaning.hides(_text_of_any(value))
    return isinstance(value, (str, bytes)) and meaning.hides(_text_of_any(value))


def _hide(value: object) -> object:
    return value if value is None or isinstance(value, bool) else MASKED


def _text_of_any(value: object) -> str:
    """Return any object as text; never raises."""
    try:
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return bytes(value).decode("utf-8", "backslashreplace")
        if isinstance(value, (dt.date, dt.time)):
            return value.isoformat()
        if isinstance(value, (uuid.UUID, decimal.Decimal, pathlib.PurePath)):
            return str(value)
        return repr(value)
    except Exception as error:  # noqa: BLE001 - a broken __repr__ must not fail a log line
        return f"<unprintable {type(value).__name__}: {type(error).__name__}>"
