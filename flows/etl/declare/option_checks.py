"""attrs validators for the options of sources and formats, with uniform messages.

They raise `ValueError` when a source is declared, such as `size: must be an integer of at least 1, not 0`.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable
from typing import Any, Final

import attrs

from dataloader.jobs.secrets.masking import mask_text

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]

_LONGEST_S: Final = 86_400
# Python's text encodings that are not used for documents. Some take quadratic time.
_NO_CHARSETS: Final = frozenset({"idna", "punycode", "unicode_escape", "raw_unicode_escape", "undefined", "utf-7"})


def refuse(field: str, value: object, allowed: str) -> ValueError:
    """Return the error `field: must be allowed, not value`, with secrets in the value masked."""
    return ValueError(f"{field}: must be {allowed}, not {mask_text(repr(value))[:200]}")


def whole_from(least: int) -> Validator:
    """Return a validator for an integer of at least `least`."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise refuse(attribute.name, value, f"an integer of at least {least:,}")

    return check


def positive_seconds(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Check a duration in seconds, above 0 and at most one day."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 < value <= _LONGEST_S:
        raise refuse(attribute.name, value, f"a number of seconds above 0, at most {_LONGEST_S:,}")


def nonempty_text(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Check a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise refuse(attribute.name, value, "a non-empty string")


def text_or_none(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Check a text that is not empty, or None."""
    if value is not None:
        nonempty_text(instance, attribute, value)


def one_character(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Check a single character that is not a line break."""
    if not isinstance(value, str) or len(value) != 1 or value in "\r\n":
        raise refuse(attribute.name, value, "one character, except a line break")


def charset_or_none(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Check the name of a character encoding, or None."""
    if value is not None and (not isinstance(value, str) or not is_charset(value)):
        raise refuse(attribute.name, value, "the name of a character encoding, such as utf-8 or windows-1251")


def is_charset(name: str) -> bool:
    """Return whether this is the name of a character encoding for documents."""
    try:
        "".encode(name)  # refuses encodings that are not for text (zip, rot13)
        return codecs.lookup(name).name not in _NO_CHARSETS
    except (LookupError, ValueError):
        return False
