"""Seconds for which an HTTP service asks for no request, by the headers of its responses.

Reads `Retry-After` (RFC 9110, 10.2.3) of a refusal, and the headers for an exhausted quota: `RateLimit` and
`RateLimit-Remaining` with `-Reset` of the IETF's drafts, and `X-RateLimit-…` of most services, whose reset is seconds
from now in some services and a timestamp in others. Pure functions. The result is at most one day: a longer value is an
error of the service, and a run that waits for it would seem to hang.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

MAX_HINT_S: Final = 86_400.0

_NUMBER: Final = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*")
# Both forms of RateLimit: `"default";r=0;t=30` of the later drafts, `limit=100, remaining=0, reset=30` of the earlier.
_PAIR: Final = re.compile(r"(?:^|[;,\s])([a-z]+)=([0-9]{1,15})(?=$|[;,\s])")
_YEAR_2001: Final = 1_000_000_000
"""Limit above which a reset is a timestamp in seconds since 1970. A thousand times larger, it is in milliseconds."""


def retry_after_s(headers: Mapping[str, str], *, now: datetime) -> float | None:
    """Return the seconds by `Retry-After`, in either form; None if it is missing or unreadable.

    Args:
        headers: headers of the response, with names in lower case.
        now: timestamp with a time zone. The response's own `Date` is preferred, because the clocks may differ.
    """
    value = headers.get("retry-after", "")
    if number := _NUMBER.fullmatch(value):
        return min(float(number[1]), MAX_HINT_S)
    at = _instant_of_http_date(value)
    return None if at is None else _until(at, headers, now)


def rest_s(headers: Mapping[str, str], *, now: datetime) -> float:
    """Return the seconds until an exhausted quota is available again; 0 if it is not exhausted or unknown.

    Arguments are as for `retry_after_s`. `Retry-After` counts as well: some services send it with successful responses.
    """
    hints = [retry_after_s(headers, now=now) or 0.0, _combined_s(headers.get("ratelimit", ""))]
    for prefix in ("x-ratelimit", "ratelimit", "x-rate-limit"):
        remaining = _NUMBER.fullmatch(headers.get(f"{prefix}-remaining", ""))
        if remaining and float(remaining[1]) == 0:
            hints.append(_reset_s(headers.get(f"{prefix}-reset", ""), headers, now))
    return max(hints)


def _combined_s(value: str) -> float:
    """Return the longest reset among the exhausted policies of a `RateLimit` header."""
    longest = 0.0
    # In the early form, commas separate the parameters of one policy; in the late form, they separate policies.
    for policy in value.split(",") if ";" in value else [value]:
        pairs = {name: float(number) for name, number in _PAIR.findall(policy)}
        if pairs.get("r", pairs.get("remaining")) == 0:
            longest = max(longest, pairs.get("t", pairs.get("reset", 0.0)))
    return min(longest, MAX_HINT_S)


def _reset_s(value: str, headers: Mapping[str, str], now: datetime) -> float:
    number = _NUMBER.fullmatch(value)
    if number is None:
        at = _instant_of_http_date(value)
        return 0.0 if at is None else _until(at, headers, now)
    reset = float(number[1])
    if reset < _YEAR_2001:
        return min(reset, MAX_HINT_S)
    instant_s = reset / 1_000 if reset > _YEAR_2001 * 1_000 else reset
    sent_at = _instant_of_http_date(headers.get("date", "")) or now
    return min(max(instant_s - sent_at.timestamp(), 0.0), MAX_HINT_S)


def _until(at: datetime, headers: Mapping[str, str], now: datetime) -> float:
    sent_at = _instant_of_http_date(headers.get("date", "")) or now
    return min(max((at - sent_at).total_seconds(), 0.0), MAX_HINT_S)


def _instant_of_http_date(value: str) -> datetime | None:
    """Return the timestamp of an HTTP date; None if it is not one."""
    try:
        at = parsedate_to_datetime(value)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    return at if at.tzinfo else at.replace(tzinfo=UTC)
