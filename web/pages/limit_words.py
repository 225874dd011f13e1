"""Limits of tasks and suppliers on pages: rows of a table, reasons in words, fields of a form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.limits import RateLimit
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.work_periods import WorkPeriods
from dataloader.jobs.zones import zone_named
from dataloader.web.pages.asking import FormField, Kind
from dataloader.web.pages.formats import NOTHING, duration
from dataloader.web.pages.formats import number as in_thousands
from dataloader.web.pages.preferences import zones

CLOSED: Final = {
    "paused": "paused",
    "period": "outside its work periods",
    "running": "concurrency limit reached",
    "batch": "the batch is full, or the next has not started",
    "supplier_paused": "its supplier is paused",
    "supplier_period": "outside its supplier's work periods",
    "budget": "a rate limit of its supplier is used up",
    "error": "its limits cannot be evaluated",
}
"""Reasons why no job of a task may start now."""
ALWAYS: Final = "always"
NO_RATE_LIMIT: Final = "none"


def why_closed(closed: str | None, error: str | None) -> str | None:
    """Return the reason why no job of a task may start now, in words."""
    if closed is None:
        return None
    return CLOSED[closed] if error is None else f"{CLOSED[closed]} ({error})"


def _parse_whole(name: str, text: str) -> int:
    try:
        return int(text.replace(",", ""))
    except ValueError:
        raise BadRequest(name, f"must be a whole number, not {text!r:.60}") from None


def _parse_seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadRequest(name, f"must be a number of seconds, not {text!r:.60}") from None


def _parse_text(_name: str, text: str) -> str:
    return text


def _periods(_name: str, text: str) -> list[str]:
    """Parse periods: one per line, or several separated by `;`."""
    parts = [part.strip() for part in text.replace(";", "\n").splitlines()]
    return [] if text.strip().lower() == ALWAYS else [part for part in parts if part]


def _parse_rate_limits(name: str, text: str) -> list[object]:
    """Parse rate limits, one per line: `100 / 60`, units and seconds, or `10000 / day / Europe/Berlin`."""
    if text.strip().lower() == NO_RATE_LIMIT:
        return []
    rate_limits: list[object] = []
    for line in filter(str.strip, text.replace(";", "\n").splitlines()):
        units, slash, seconds = line.partition("/")
        if not slash:
            raise BadRequest(name, f"must have lines such as 100 / 60 (units / seconds), not {line!r:.60}")
        number, (span, _, zone) = _parse_whole(name, units.strip()), seconds.partition("/")
        if span.strip() == "day":
            rate_limits.append({"requests": number, "per": "day", "zone": zone.strip() or "UTC"})
        else:
            rate_limits.append([number, _parse_seconds(name, seconds.strip())])
    return rate_limits


def _said_periods(value: Any) -> str:
    return "; ".join(value) or ALWAYS


def _rate_limit(spec: Any) -> str:
    rate_limit = RateLimit.of_spec(spec)
    span = f"day / {rate_limit.zone}" if rate_limit.per_s is None else f"{rate_limit.per_s:g}"
    return f"{rate_limit.requests} / {span}"


def _said_rate_limits(value: Any) -> str:
    return "; ".join(map(_rate_limit, value)) or NO_RATE_LIMIT


@attrs.frozen(kw_only=True)
class Limit:
    """Limit: its name, label, display and parser. `typed` makes the text of its field, `options` its choices."""

    name: str
    label: str
    hint: str = ""
    kind: Kind = "text"
    said: Callable[[Any], str] = str
    typed: Callable[[Any], str] = str
    options: Callable[[], Sequence[tuple[str, str]]] = tuple
    taken: Callable[[str, str], object] = _parse_text


_PERIODS: Final = Limit(
    name="work_periods",
    label="Work periods",
    hint="One per line, such as MON-FRI 00:00-06:00; always: at any time.",
    kind="area",
    said=_said_periods,
    typed=lambda value: "\n".join(value) or ALWAYS,
    taken=_periods,
)
_ZONE: Final = Limit(
    name="zone",
    label="Time zone of the work periods",
    said=str,
    options=lambda: [(zone, zone) for zone in zones()],
)
TASK_LIMITS: Final = (
    _PERIODS,
    _ZONE,
    Limit(
        name="at_period_end",
        label="At period end",
        hint="What happens to running jobs.",
        kind="select",
        options=lambda: [("", "as declared by the program"), ("finish", "finish"), ("stop", "stop")],
    ),
    Limit(name="max_running", label="Max running", hint="Over all processes.", said=in_thousands, taken=_parse_whole),
    Limit(
        name="max_running_per_partition",
        label="Max running per partition",
        hint="Per partition_key.",
        said=in_thousands,
        taken=_parse_whole,
    ),
    Limit(
        name="batch_size",
        label="Batch",
        hint="Number of jobs that start together.",
        said=in_thousands,
        taken=_parse_whole,
    ),
    Limit(name="batch_delay_s", label="Pause after a batch", hint="Seconds.", said=duration, taken=_parse_seconds),
    Limit(name="supplier", label="Supplier"),
    Limit(name="cost", label="Cost per start", hint="Units of the supplier's rate limits.", taken=_parse_whole),
    Limit(name="retry_priority", label="Priority of a retry", taken=_parse_whole),
    Limit(name="retry_delay_s", label="Pause before a retry", hint="Seconds.", said=duration, taken=_parse_seconds),
    Limit(name="max_attempts", label="Attempts", hint="For jobs enqueued from now on.", taken=_parse_whole),
)
SUPPLIER_LIMITS: Final = (
    Limit(
        name="rate_limits",
        label="Rate limits",
        hint="One per line, such as 100 / 60 (units / seconds, in any such period) or 9000 / day / Europe/Berlin. "
        "none: no rate limit.",
        kind="area",
        said=_said_rate_limits,
        typed=lambda value: "\n".join(map(_rate_limit, value)) or NO_RATE_LIMIT,
        taken=_parse_rate_limits,
    ),
    _PERIODS,
    _ZONE,
    Limit(
        name="margin_s",
        label="Margin",
        hint="Maximum seconds between the claim and the start of a job.",
        said=duration,
        taken=_parse_seconds,
    ),
)


@attrs.frozen
class LimitRow:
    """Limit in three views: the program's, the operators', and the effective one."""

    label: str
    declared: str
    override: str
    holds: str
    is_overridden: bool


def limit_rows(
    limits: Iterable[Limit], declared: Mapping[str, Any], override: Mapping[str, Any], holds: Mapping[str, Any]
) -> list[LimitRow]:
    """Return the rows of limits that are set anywhere."""
    rows = []
    for limit in limits:
        views = [given.get(limit.name) for given in (declared, override, holds)]
        if any(value is not None for value in views):
            first, second, third = (NOTHING if value is None else _said_or_json(limit, value) for value in views)
            rows.append(LimitRow(limit.label, first, second, third, views[1] is not None))
    return rows


def _said_or_json(limit: Limit, value: Any) -> str:
    try:
        return limit.said(value)
    except (ArithmeticError, AttributeError, TypeError, ValueError):  # a value that manual SQL has stored
        return json.dumps(value)


def limit_fields(limits: Iterable[Limit], override: Mapping[str, Any], holds: Mapping[str, Any]) -> list[FormField]:
    """Return a form's fields with the operators' overrides.

    An empty field means the programs' declaration, and shows the value in effect.
    """
    return [
        FormField(
            name=limit.name,
            label=limit.label,
            kind=limit.kind,
            value=typed(limit, override),
            hint=" ".join(filter(None, (limit.hint, _now(limit, holds)))) or None,
            placeholder=mask_text(typed(limit, holds)) or "not set",
            options=limit.options(),
        )
        for limit in limits
    ]


def typed(limit: Limit, override: Mapping[str, Any]) -> str:
    """Return the text of a limit's field."""
    value = override.get(limit.name)
    try:
        return "" if value is None else limit.typed(value)
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return json.dumps(value)


def _now(limit: Limit, holds: Mapping[str, Any]) -> str:
    value = holds.get(limit.name)
    return "" if value is None else f"Now: {_said_or_json(limit, value)}."


def shown_texts(limits: Iterable[Limit], override: Mapping[str, Any]) -> str:
    """Return the initial texts of the form's fields, for `changes`."""
    return json.dumps({limit.name: typed(limit, override) for limit in limits})


def changes(limits: Iterable[Limit], was: str, given: Mapping[str, str | None]) -> dict[str, Any]:
    """Return only the values that were changed in the form: other operators may have changed the rest meanwhile."""
    try:
        before = json.loads(was)
        texts = {limit.name: str(before[limit.name]) for limit in limits}
    except (ValueError, KeyError, TypeError):
        raise BadRequest("was", "must be the value from the form") from None
    found: dict[str, Any] = {}
    for limit in limits:
        text = (given.get(limit.name) or "").replace("\r\n", "\n").strip()
        if text != texts[limit.name].strip():
            found[limit.name] = limit.taken(limit.name, text) if text else None
    return found


def week_of(limits: Mapping[str, Any]) -> tuple[tuple[int, int], ...] | None:
    """Return the minutes of a week in which limits allow a start; None: always, or not readable by this program."""
    periods = limits.get("work_periods")
    try:
        return WorkPeriods.parsed(periods, zone_named("UTC")).ranges if periods else None
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return None
