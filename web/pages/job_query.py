"""Query language of the jobs' filter line and of the search: `status:failed task:mail.receipt since:2h args.id:7`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final
from uuid import UUID

import attrs

from dataloader.jobs.errors import BadRequest

NAMES: Final[Mapping[str, str]] = {
    "status": "status", "queue": "queue", "task": "task", "key": "key", "worker": "worker", "schedule": "schedule",
    "group": "root", "since": "from", "until": "to", "ended-since": "finished_from", "ended-until": "finished_to",
}  # fmt: skip
"""Names of the language, and those of the values in a page's address. `args.NAME` is one more."""
_TERM: Final = re.compile(r'(?:([a-z][\w.-]*):)?("(?:[^"\\]|\\.)*"|\S+)')
_AGE: Final = re.compile(r"(\d{1,6})(s|min|m|h|d|w)")
_UNITS_S: Final = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_TIMES: Final = frozenset({"since", "until", "ended-since", "ended-until"})
_ALLOWED: Final = ", ".join([*NAMES, "args.NAME"])


@attrs.frozen
class JobTerms:
    """Parsed query: the values for a page's address, and its words without a name."""

    values: Mapping[str, str]
    words: tuple[str, ...]


def parse_terms(text: str, tz: tzinfo) -> JobTerms:
    """Parse a query; ages such as `2h` become times by the clock of `tz`. Raises `BadRequest` for an unknown name."""
    values: dict[str, str] = {}
    words: list[str] = []
    for name, given in _TERM.findall(text):
        value = re.sub(r"\\(.)", r"\1", given[1:-1]) if len(given) > 1 and given[0] == given[-1] == '"' else given
        if not name or value.startswith("//"):
            words.append(f"{name}:{value}" if name else value)
        elif name.startswith("args.") and len(name) > len("args."):
            values["args"] = f"{name.removeprefix('args.')}={value}"
        elif name not in NAMES:
            raise BadRequest("q", f"{name}: is not allowed. Allowed names: {_ALLOWED}")
        else:
            values[NAMES[name]] = _time_of_age(value, tz) if name in _TIMES else value
    return JobTerms(values, tuple(words))


def _time_of_age(value: str, tz: tzinfo) -> str:
    """Return the time that is an age ago: `2h`. Any other value is returned unchanged."""
    age = _AGE.fullmatch(value)
    if age is None:
        return value
    at = datetime.now(UTC) - timedelta(seconds=int(age[1]) * _UNITS_S[age[2]])
    return at.astimezone(tz).strftime("%Y-%m-%dT%H:%M:%S")


def id_of(text: str) -> UUID | None:
    """Return the ID that a text is, or None."""
    try:
        return UUID(text.strip())
    except ValueError:
        return None
