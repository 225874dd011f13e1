"""Suppliers over HTTP: their rate limits and current use, and operators' actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from dataloader.jobs.limit_contract import SupplierPage, SupplierRecord
from dataloader.jobs.limits import FORMER_LIMITS, MAX_RATE_LIMITS
from dataloader.jobs.model import about
from dataloader.jobs.operations.fields import Limit
from dataloader.jobs.roles import Role
from dataloader.web import shown
from dataloader.web.api.task_limits import PeriodTexts, ZoneName
from dataloader.web.paging import PageQuery, page_answer
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()

_ADDRESS: Final = "/api/v1/suppliers/<path:supplier>"


_Span = Annotated[list[float], Meta(min_length=2, max_length=2, description="At most so many, in so many seconds.")]


class DayRateLimit(Struct, forbid_unknown_fields=True, kw_only=True):
    """Rate limit by the calendar: from midnight to midnight."""

    EXAMPLE: ClassVar[Any] = {"requests": 10_000, "per": "day", "zone": "Europe/Berlin"}

    requests: Annotated[int, about("At most so many units")]
    per: Annotated[Literal["day"], about("in each day.")]
    zone: Annotated[str, about("The time zone whose midnight that is.")] = "UTC"


_RateLimit = _Span | DayRateLimit
_RateLimits = Annotated[list[_RateLimit], Meta(max_length=MAX_RATE_LIMITS)]


class SuppliersQuery(PageQuery, kw_only=True):
    """Page of suppliers, by name."""

    limit: Limit = 200


class SupplierChanges(Struct, forbid_unknown_fields=True, kw_only=True):
    """Overrides of a supplier's limits; null restores the programs' value."""

    EXAMPLE: ClassVar[Any] = {"rate_limits": [[100, 60], DayRateLimit.EXAMPLE], "work_periods": ["MON-FRI 00:00-06:00"]}

    FORMER_FIELDS: ClassVar[Mapping[str, str]] = FORMER_LIMITS

    rate_limits: Annotated[
        _RateLimits | UnsetType | None, about("All of them hold, in any span of their seconds or in each day.")
    ] = UNSET
    work_periods: PeriodTexts = UNSET
    zone: ZoneName = UNSET
    margin_s: Annotated[
        Annotated[float, Meta(ge=0.01, le=60)] | UnsetType | None,
        about("Seconds in which a body begins after its claim."),
    ] = UNSET

    def given(self) -> dict[str, Any]:
        """Return the changes by name."""
        values = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}
        if isinstance(self.rate_limits, list):
            values["rate_limits"] = [
                msgspec.structs.asdict(rate_limit)
                if isinstance(rate_limit, DayRateLimit)
                else [_whole(rate_limit[0]), rate_limit[1]]
                for rate_limit in self.rate_limits
            ]
        return values


def _whole(number: float) -> float:
    """Return an integer if the number is one: JSON does not distinguish 5 from 5.0."""
    return int(number) if number.is_integer() else number


@routes.add("GET", "/api/v1/suppliers", role=Role.READ, query=SuppliersQuery, answers={200: SupplierPage}, pages=True)
async def list_suppliers(call: Call, query: SuppliersQuery) -> Answer:
    """List the suppliers of tasks and loads, by name."""
    page = await call.limits.suppliers(limit=query.limit, after=query.after)
    return page_answer(call, SupplierPage(list(map(shown.supplier, page.suppliers)), page.next))


@routes.add("GET", _ADDRESS, role=Role.READ, answers={200: SupplierRecord})
async def get_supplier(call: Call, supplier: str) -> Answer:
    """Show a supplier: its limits, the current use of each rate limit, and the load's request in progress."""
    return Answer(value=shown.supplier(await call.limits.supplier(supplier)))


@routes.add("PATCH", _ADDRESS, role=Role.ADMIN, body=SupplierChanges, answers={200: SupplierRecord})
async def set_supplier(call: Call, supplier: str, body: SupplierChanges) -> Answer:
    """Override limits of a supplier, or create an unknown one. Applies from the next claim on, in all processes."""
    return Answer(value=shown.supplier(await call.limits.set_supplier(supplier, body.given())))


@routes.add("DELETE", _ADDRESS, role=Role.ADMIN, answers={200: SupplierRecord}, conflicts=True)
async def remove_supplier(call: Call, supplier: str) -> Answer:
    """Forget a supplier until a process declares it again, and show it as it was.

    409 while a task names it, or while a load's request is in progress.
    """
    return Answer(value=shown.supplier(await call.limits.remove_supplier(supplier)))


@routes.add("POST", f"{_ADDRESS}/pause", role=Role.OPERATE, answers={200: SupplierRecord})
async def pause_supplier(call: Call, supplier: str) -> Answer:
    """Pause a supplier: no job of the tasks that name it starts. Running jobs continue."""
    return Answer(value=shown.supplier(await call.limits.pause_supplier(supplier)))


@routes.add("POST", f"{_ADDRESS}/resume", role=Role.OPERATE, answers={200: SupplierRecord})
async def resume_supplier(call: Call, supplier: str) -> Answer:
    """End a supplier's pause."""
    return Answer(value=shown.supplier(await call.limits.resume_supplier(supplier)))
