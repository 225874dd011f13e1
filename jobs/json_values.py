"""Number of values in JSON, which bounds the time and memory of decoding."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import MAX_ARGS_BYTES
from dataloader.jobs.text import JSON_TEXT, exact_json

MAX_VALUES: Final = 100_000
"""Maximum number of values in a request or a job's args; a list or an object counts twice."""
_MARKS: Final = (b",", b"[", b"{")
_STRING: Final = re.compile(JSON_TEXT, re.DOTALL)


def has_too_many_values(data: bytes | bytearray) -> bool:
    """Return True if JSON has more than `MAX_VALUES` values; a list or an object counts twice."""
    # Strings contain these characters, too: the exact count is needed only if the upper bound is too high.
    return (
        _marks(data) > MAX_VALUES
        and _marks(data) - sum(_marks(text[0]) for text in _STRING.finditer(data)) > MAX_VALUES
    )


def _marks(data: bytes | bytearray) -> int:
    return sum(map(data.count, _MARKS))


def args_json(field: str, args: Mapping[str, Any]) -> str:
    """Return a job's args as JSON text that `jsonb` stores unchanged. Raises `BadRequest`, which names `field`."""
    text = exact_json(field, args, MAX_ARGS_BYTES)
    if len(text) > MAX_VALUES and has_too_many_values(text.encode()):
        raise BadRequest(field, f"must have at most {MAX_VALUES:,} values (lists and objects count twice)")
    return text
