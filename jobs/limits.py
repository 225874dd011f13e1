"""Limits (S1, S4): when jobs of a task may start and how many, and what a supplier takes from all that ask it.

A supplier is who is asked: tasks name it, and loads whose source has its name send their requests to it. Its budgets
and periods hold for all of them together, over all processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import MAX_INT, MAX_NAME, check_between, check_name
from dataloader.jobs.work_periods import WorkPeriods
from dataloader.jobs.zones import zone_named

WEEK_S: Final = 604_800
MAX_DELAY_S: Final = 86_400
MAX_BUDGETS: Final = 10
MAX_COST: Final = 1_000_000
MARGIN_S: Final = 1.0
"""How long after its claim a body may begin, unless the shortest span is below ten seconds: then a tenth of that."""
LEAST_MARGIN_S: Final = 0.1
"""Of shorter margins a loaded process would give back most of its jobs."""


@attrs.frozen
class Budget:
    """At most `requests` requests, or starts, in any span of `per_s` seconds, over all processes.

    Raises `ValueError` for a number that is not at least 1, and a span that is not between 0.001 s and a week.
    """

    requests: int
    per_s: float

    def __attrs_post_init__(self) -> None:
        if isinstance(self.requests, bool) or not isinstance(self.requests, int) or not 1 <= self.requests <= 1_000_000:
            raise ValueError(f"requests: must be an integer from 1 to 1,000,000, not {self.requests!r}")
        if not 0.001 <= self.per_s <= WEEK_S:
            raise ValueError(f"per_s: must be a number of seconds from 0.001 to {WEEK_S:,}, not {self.per_s!r}")


def _texts(value: Sequence[str] | str) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@attrs.frozen
class Supplier:
    """Who is asked, with what it allows.

    Args:
        name: as tasks and loads name it.
        budgets: all of them hold, in any span of their seconds.
        work_periods: when it may be asked, such as `MON-FRI 00:00-06:00`; none: always.
        zone: the time zone of `work_periods`.
        margin_s: how many seconds after its claim a body may begin. Spans are longer by it, and periods end earlier.

    Raises `BadRequest` for what is out of range.
    """

    name: str
    budgets: tuple[Budget, ...] = attrs.field(default=(), converter=tuple)
    work_periods: tuple[str, ...] = attrs.field(default=(), converter=_texts, kw_only=True)
    zone: str = attrs.field(default="UTC", kw_only=True)
    margin_s: float | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_name("supplier", self.name, MAX_NAME)
        if len(self.budgets) > MAX_BUDGETS or not all(isinstance(budget, Budget) for budget in self.budgets):
            raise BadRequest("budgets", f"must be at most {MAX_BUDGETS} Budgets, not {self.budgets!r:.100}")
        WorkPeriods.parsed(self.work_periods, zone_named(self.zone))
        if self.margin_s is not None and not 0.01 <= self.margin_s <= 60:
            raise BadRequest("margin_s", f"must be a number of seconds from 0.01 to 60, not {self.margin_s!r}")

    @classmethod
    def of_spec(cls, name: str, spec: Mapping[str, Any]) -> Supplier:
        """The supplier that `spec` describes. Raises `BadRequest`."""
        values = {key: value for key, value in spec.items() if value is not None}
        try:
            values["budgets"] = tuple(Budget(*budget) for budget in values.get("budgets", ()))
        except (TypeError, ValueError) as error:
            raise BadRequest("budgets", f"must be a list of [number, seconds]: {error}") from error
        try:
            return cls(name, **values)
        except BadRequest:
            raise
        except (TypeError, ValueError) as error:
            raise BadRequest("supplier", f"must have budgets, work_periods, zone and margin_s: {error}") from error

    def spec(self) -> dict[str, Any]:
        """What makes it again, for JSON."""
        return {
            "budgets": [[budget.requests, budget.per_s] for budget in self.budgets],
            "work_periods": list(self.work_periods),
            "zone": self.zone,
            "margin_s": self.margin_s,
        }

    @property
    def margin(self) -> float:
        """`margin_s`, or what follows from the budgets."""
        if self.margin_s is not None:
            return self.margin_s
        return max(min([MARGIN_S, *(budget.per_s / 10 for budget in self.budgets)]), LEAST_MARGIN_S)

    @property
    def periods(self) -> WorkPeriods | None:
        """When it may be asked; None: always."""
        return WorkPeriods.parsed(self.work_periods, zone_named(self.zone)) if self.work_periods else None


@attrs.frozen(kw_only=True)
class TaskLimits:
    """When jobs of a task may start, and how many at once.

    Args:
        work_periods: when they may start, such as `MON-FRI 00:00-06:00`; none: always.
        zone: the time zone of `work_periods`.
        max_running: how many may run at once, over all processes.
        batch_size: they start in batches of so many: the next begins when none of the last is in work any more.
        batch_delay_s: and so many seconds later.
        supplier: the name of who is asked; its budgets and periods hold, too.
        cost: units of the supplier's budgets that a start takes. 0: only `job.take` and requests of loads do.
        retry_priority: the priority that a job gets when a run has failed, or has lost its worker.

    Raises `BadRequest` for what is out of range.
    """

    work_periods: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    zone: str = "UTC"
    max_running: int | None = None
    batch_size: int | None = None
    batch_delay_s: float | None = None
    supplier: str | None = None
    cost: int = 1
    retry_priority: int | None = None

    def __attrs_post_init__(self) -> None:
        WorkPeriods.parsed(self.work_periods, zone_named(self.zone))
        for name, value, low in (
            ("max_running", self.max_running, 1),
            ("batch_size", self.batch_size, 1),
            ("retry_priority", self.retry_priority, 0),
        ):
            if value is not None:
                check_between(name, value, low, MAX_INT)
        check_between("cost", self.cost, 0, MAX_COST)
        if self.batch_delay_s is not None:
            if self.batch_size is None:
                raise BadRequest("batch_delay_s", "must not be given without batch_size")
            if not 0 <= self.batch_delay_s <= MAX_DELAY_S:
                raise BadRequest(
                    "batch_delay_s",
                    f"must be a number of seconds from 0 to {MAX_DELAY_S:,}, not {self.batch_delay_s!r}",
                )
        if self.supplier is not None:
            check_name("supplier", self.supplier, MAX_NAME)

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> TaskLimits:
        """The limits that `spec` describes; what is null is as if it were not there. Raises `BadRequest`."""
        known = {field.name for field in attrs.fields(cls)}
        for name in spec:
            if name not in known:
                raise BadRequest(name, f"is no limit of a task; there are {', '.join(sorted(known))}")
        return cls(**{name: value for name, value in spec.items() if value is not None})

    def spec(self) -> dict[str, Any]:
        """What makes them again, for JSON: what is not the default."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in attrs.fields(TaskLimits)
            if (value := getattr(self, field.name)) != field.default
        }

    @property
    def needs_lane(self) -> bool:
        """Whether its jobs wait in a lane: for anything but `retry_priority`."""
        return attrs.evolve(self, retry_priority=None, cost=1) != TaskLimits()

    @property
    def periods(self) -> WorkPeriods | None:
        """When its jobs may start; None: always."""
        return WorkPeriods.parsed(self.work_periods, zone_named(self.zone)) if self.work_periods else None


class LimitOptions(TypedDict, total=False):
    """The limits of a task, as its decorator takes them; what they mean is said at `TaskLimits`."""

    work_periods: Sequence[str] | str
    zone: str
    max_running: int | None
    batch_size: int | None
    batch_delay_s: float | None
    supplier: Supplier | str | None
    cost: int
    retry_priority: int | None
