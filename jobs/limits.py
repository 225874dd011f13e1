"""Limits: when jobs of a task may start and how many, and how many requests a supplier takes.

A supplier is an external system, such as an API. Tasks name it, and loads whose source has its name send requests to
it. Its rate limits and work periods apply to all of them together, across all processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, TypedDict, get_args

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.former_names import former_arguments, renamed
from dataloader.jobs.model import MAX_ATTEMPTS, MAX_INT, MAX_NAME, check_between, check_name
from dataloader.jobs.retry import MAX_RETRY_DELAY_S
from dataloader.jobs.text import stored_json
from dataloader.jobs.work_periods import WorkPeriods
from dataloader.jobs.zones import zone_named

WEEK_S: Final = 604_800
LONGEST_DAY_S: Final = 93_600
"""26 hours: in Antarctica/Troll the clock is put back by two."""
MAX_DELAY_S: Final = 86_400
MAX_RATE_LIMITS: Final = 10
MAX_COST: Final = 1_000_000
MARGIN_S: Final = 1.0
"""Seconds after its claim within which a handler may begin; a tenth of the shortest span if that is under 10 s."""
FORMER_LIMITS: Final = MappingProxyType({"budgets": "rate_limits"})
"""New name of each renamed limit of a supplier."""
AtPeriodEnd = Literal["finish", "stop"]
"""At the end of a work period, running jobs continue, or are stopped and return to their limit queue."""
LEAST_MARGIN_S: Final = 0.1
"""With a shorter margin, a loaded process would release most of its jobs."""


@attrs.frozen
class RateLimit:
    """At most `requests` requests, or starts, in any span of `per_s` seconds, or in each day, across all processes.

    Args:
        requests: the number of requests, from 1 to 1,000,000.
        per_s: length of the span in seconds, from 0.001 to a week.
        per: "day" instead of `per_s`: from midnight to midnight, for suppliers that count by the calendar.
        zone: the time zone of midnight; UTC by default.

    Raises `ValueError` for a value out of range, and unless exactly one of `per_s` and `per` is given.
    """

    requests: int
    per_s: float | None = None
    per: Literal["day"] | None = attrs.field(default=None, kw_only=True)
    zone: str | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if isinstance(self.requests, bool) or not isinstance(self.requests, int) or not 1 <= self.requests <= 1_000_000:
            raise ValueError(f"requests: must be an integer from 1 to 1,000,000, not {self.requests!r}")
        if self.per is None:
            if self.per_s is None or not 0.001 <= self.per_s <= WEEK_S:
                raise ValueError(f"per_s: must be a number of seconds from 0.001 to {WEEK_S:,}, not {self.per_s!r}")
            if self.zone is not None:
                raise ValueError(f"zone: {self.zone!r:.60} needs per='day'; per_s has no time zone")
            return
        if self.per != "day":
            raise ValueError(f"per: must be 'day', not {self.per!r:.60}")
        if self.per_s is not None:
            raise ValueError(f"per_s: {self.per_s!r} cannot be combined with per='day'")
        object.__setattr__(self, "zone", zone_named(self.zone or "UTC").key)

    @classmethod
    def of_spec(cls, spec: Sequence[Any] | Mapping[str, Any]) -> RateLimit:
        """Return the rate limit of `spec`: `[requests, per_s]`, or an object. Raises `TypeError` and `ValueError`."""
        return cls(**spec) if isinstance(spec, Mapping) else cls(*spec)

    def spec(self) -> list[float] | dict[str, Any]:
        """Return the JSON form that `of_spec` reads."""
        if self.per_s is None:
            return {"requests": self.requests, "per": self.per, "zone": self.zone}
        return [self.requests, self.per_s]

    @property
    def kept_s(self) -> float:
        """Longest time for which a request counts, in seconds."""
        return LONGEST_DAY_S if self.per_s is None else self.per_s


def _tuple_of_texts(value: Sequence[str] | str) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _tuple_of_rate_limits(value: Iterable[RateLimit]) -> tuple[RateLimit, ...]:
    return tuple(value)  # not `tuple` itself: a type checker could not infer its items


@former_arguments(**FORMER_LIMITS)
@attrs.frozen
class Supplier:
    """An external system, such as an API, with its rate limits and work periods.

    Args:
        name: the name that tasks and loads use.
        rate_limits: rate limits, all of which apply.
        work_periods: when requests are allowed, such as `MON-FRI 00:00-06:00`; always if there are none.
        zone: the time zone of `work_periods`.
        margin_s: seconds after its claim within which a handler may begin. Spans are longer by it, and periods end
            earlier.

    Raises `BadRequest` for a value out of range.
    """

    name: str
    rate_limits: tuple[RateLimit, ...] = attrs.field(default=(), converter=_tuple_of_rate_limits)
    work_periods: tuple[str, ...] = attrs.field(default=(), converter=_tuple_of_texts, kw_only=True)
    zone: str = attrs.field(default="UTC", kw_only=True)
    margin_s: float | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_name("supplier", self.name, MAX_NAME)
        if len(self.rate_limits) > MAX_RATE_LIMITS or not all(
            isinstance(rate_limit, RateLimit) for rate_limit in self.rate_limits
        ):
            raise BadRequest(
                "rate_limits", f"must be at most {MAX_RATE_LIMITS} RateLimits, not {self.rate_limits!r:.100}"
            )
        WorkPeriods.parsed(self.work_periods, zone_named(self.zone))
        if self.margin_s is not None and not 0.01 <= self.margin_s <= 60:
            raise BadRequest("margin_s", f"must be a number of seconds from 0.01 to 60, not {self.margin_s!r}")

    @classmethod
    def of_spec(cls, name: str, spec: Mapping[str, Any]) -> Supplier:
        """Return the supplier that `spec` describes. Raises `BadRequest`."""
        values = {key: value for key, value in spec.items() if value is not None}
        for key in FORMER_LIMITS.keys() & values.keys():
            raise BadRequest(key, renamed(FORMER_LIMITS[key]))
        for key in ("work_periods", "zone"):
            _check_kind(key, values.get(key))
        try:
            values["rate_limits"] = tuple(map(RateLimit.of_spec, values.get("rate_limits", ())))
        except (TypeError, ValueError) as error:
            raise BadRequest(
                "rate_limits", f"must be a list of [number, seconds] or {{requests, per, zone}}: {error}"
            ) from error
        try:
            return cls(name, **values)
        except BadRequest:
            raise
        except (TypeError, ValueError) as error:
            raise BadRequest("supplier", f"must have rate_limits, work_periods, zone and margin_s: {error}") from error

    def spec(self) -> dict[str, Any]:
        """Return the JSON form that `of_spec` reads."""
        return {
            "rate_limits": [rate_limit.spec() for rate_limit in self.rate_limits],
            "work_periods": list(self.work_periods),
            "zone": self.zone,
            "margin_s": self.margin_s,
        }

    @property
    def margin(self) -> float:
        """`margin_s`, or the value derived from the rate limits."""
        if self.margin_s is not None:
            return self.margin_s
        return max(min([MARGIN_S, *(rate_limit.kept_s / 10 for rate_limit in self.rate_limits)]), LEAST_MARGIN_S)

    @property
    def periods(self) -> WorkPeriods | None:
        """Work periods; None means always open."""
        return WorkPeriods.parsed(self.work_periods, zone_named(self.zone)) if self.work_periods else None


@attrs.frozen(kw_only=True)
class TaskLimits:
    """Limits of a task: when its jobs may start, and how many run concurrently.

    Args:
        work_periods: when they may start, such as `MON-FRI 00:00-06:00`; always if there are none.
        zone: the time zone of `work_periods`.
        at_period_end: whether jobs that run at the end of a period, the task's or its supplier's, `finish` or `stop`.
        max_running: maximum number of running jobs, across all processes.
        max_running_per_partition: the same for each `partition_key`; waiting keys are served round-robin.
        batch_size: jobs start in batches of this size. A batch begins when no job of the previous batch is in progress.
        batch_delay_s: additional seconds before the next batch.
        supplier: the supplier's name; its rate limits and periods also apply.
        cost: units of the supplier's rate limits that a start takes. With 0, only `job.take` and requests of loads do.
        retry_priority: the priority of a job after a failed run or a lost worker.
        retry_delay_s: seconds between a failed run and the next one, which replace the task's retry policy.
        max_attempts: runs before a job is failed, for jobs that are added from now on.

    Raises `BadRequest` for a value out of range.
    """

    work_periods: tuple[str, ...] = attrs.field(default=(), converter=_tuple_of_texts)
    zone: str = "UTC"
    at_period_end: AtPeriodEnd = "finish"
    max_running: int | None = None
    max_running_per_partition: int | None = None
    batch_size: int | None = None
    batch_delay_s: float | None = None
    supplier: str | None = None
    cost: int = 1
    retry_priority: int | None = None
    retry_delay_s: float | None = None
    max_attempts: int | None = None

    def __attrs_post_init__(self) -> None:
        WorkPeriods.parsed(self.work_periods, zone_named(self.zone))
        if self.at_period_end not in get_args(AtPeriodEnd):
            raise BadRequest("at_period_end", f"must be finish or stop, not {self.at_period_end!r:.60}")
        for name, value, low, high in (
            ("max_running", self.max_running, 1, MAX_INT),
            ("max_running_per_partition", self.max_running_per_partition, 1, MAX_INT),
            ("batch_size", self.batch_size, 1, MAX_INT),
            ("retry_priority", self.retry_priority, 0, MAX_INT),
            ("max_attempts", self.max_attempts, 1, MAX_ATTEMPTS),
        ):
            if value is not None:
                check_between(name, value, low, high)
        check_between("cost", self.cost, 0, MAX_COST)
        if self.batch_delay_s is not None:
            if self.batch_size is None:
                raise BadRequest("batch_delay_s", "needs batch_size")
            if not 0 <= self.batch_delay_s <= MAX_DELAY_S:
                raise BadRequest(
                    "batch_delay_s",
                    f"must be a number of seconds from 0 to {MAX_DELAY_S:,}, not {self.batch_delay_s!r}",
                )
        if self.retry_delay_s is not None and not 0 <= self.retry_delay_s <= MAX_RETRY_DELAY_S:
            raise BadRequest(
                "retry_delay_s",
                f"must be a number of seconds from 0 to {MAX_RETRY_DELAY_S:,}, not {self.retry_delay_s!r}",
            )
        if self.supplier is not None:
            check_name("supplier", self.supplier, MAX_NAME)

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> TaskLimits:
        """Return the limits that `spec` describes; null values are ignored. Raises `BadRequest`."""
        for name, value in spec.items():
            if name not in _KINDS:
                raise BadRequest(name, f"is not a limit of a task; the limits are {', '.join(sorted(_KINDS))}")
            _check_kind(name, value)
        return cls(**{name: value for name, value in spec.items() if value is not None})

    def spec(self) -> dict[str, Any]:
        """Return the JSON form that `of_spec` reads, without default values."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in attrs.fields(TaskLimits)
            if (value := getattr(self, field.name)) != field.default
        }

    @property
    def needs_lane(self) -> bool:
        """True if its jobs wait in a limit queue, since its limits say when they may start, or how many."""
        others = attrs.evolve(
            self, retry_priority=None, retry_delay_s=None, max_attempts=None, cost=1, at_period_end="finish"
        )
        return others != TaskLimits()

    @property
    def periods(self) -> WorkPeriods | None:
        """Work periods of its jobs; None means always open."""
        return WorkPeriods.parsed(self.work_periods, zone_named(self.zone)) if self.work_periods else None


_WHOLE: Final = ((int,), "a whole number")
_SECONDS: Final = ((int, float), "a number of seconds")
_TEXT: Final = ((str,), "a string")
_KINDS: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "work_periods": ((str, list, tuple), "a list of strings"),
    "zone": _TEXT,
    "at_period_end": _TEXT,
    "max_running": _WHOLE,
    "max_running_per_partition": _WHOLE,
    "batch_size": _WHOLE,
    "batch_delay_s": _SECONDS,
    "supplier": _TEXT,
    "cost": _WHOLE,
    "retry_priority": _WHOLE,
    "retry_delay_s": _SECONDS,
    "max_attempts": _WHOLE,
}


def _is_of_its_kind(name: str, value: object) -> bool:
    if isinstance(value, list | tuple) and not all(isinstance(one, str) for one in value):
        return False
    return value is None or (isinstance(value, _KINDS[name][0]) and not isinstance(value, bool))


def _check_kind(name: str, value: object) -> None:
    """Raise `BadRequest` for a value of the wrong type, which manual SQL may have stored."""
    if not _is_of_its_kind(name, value):
        raise BadRequest(name, f"must be {_KINDS[name][1]}, not {value!r:.60}")


def readable_limits(declared: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return the declared and overridden limits together, except values of the wrong type."""
    return {
        name: value
        for name, value in {**declared, **override}.items()
        if value is not None and (name not in _KINDS or _is_of_its_kind(name, value))
    }


def stored_limits(text: str) -> dict[str, Any]:
    """Return the limits in a row's JSON, or none if it is not an object, which only manual SQL can store."""
    found = stored_json(text)
    return found if isinstance(found, dict) else {}


class LimitOptions(TypedDict, total=False):
    """Limits of a task as options of its decorator; `TaskLimits` describes them."""

    work_periods: Sequence[str] | str
    zone: str
    at_period_end: AtPeriodEnd
    max_running: int | None
    max_running_per_partition: int | None
    batch_size: int | None
    batch_delay_s: float | None
    supplier: Supplier | str | None
    cost: int
    retry_priority: int | None
