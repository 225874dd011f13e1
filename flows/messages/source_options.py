"""attrs validators for the options of message sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import MAX_NAME, check_name

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def url_of(plain: str, secure: str) -> Validator:
    """Return a validator for a URL with one of two schemes. Errors do not show the URL, which may have a password."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        scheme = urlsplit(value).scheme if isinstance(value, str) else type(value).__name__
        if not isinstance(value, str) or scheme not in {plain, secure}:
            raise BadRequest(attribute.name, f"must begin with {plain}:// or {secure}://, not {scheme!r}")

    return check


def name(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Check a name of 1 to 200 characters on one line."""
    check_name(attribute.name, value, MAX_NAME)


def name_or_none(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Check a name of 1 to 200 characters on one line, or None."""
    if value is not None:
        name(instance, attribute, value)


def between(low: float, high: float) -> Validator:
    """Return a validator for a number from `low` to `high`."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise BadRequest(attribute.name, f"must be a number from {low:,} to {high:,}, not {value!r:.60}")

    return check


def whole_between(low: int, high: int) -> Validator:
    """Return a validator for an integer from `low` to `high`."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise BadRequest(attribute.name, f"must be an integer from {low:,} to {high:,}, not {value!r:.60}")

    return check
