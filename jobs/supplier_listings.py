"""Suppliers as they are stored, with the current use of their rate limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from uuid import UUID

import attrs

from dataloader.jobs.errors import NotFound
from dataloader.jobs.model import Instant, about
from dataloader.jobs.page_cursor import Next

SupplierClosed = Literal["paused", "period", "error"]
"""Reason why a supplier is closed: paused; no work period is open; its limits cannot be evaluated."""


class SupplierNotFound(NotFound):
    """No supplier has this name."""


@attrs.frozen(kw_only=True)
class RateLimitState:
    """Rate limit of a supplier, and its current use."""

    requests: Annotated[int, about("At most so many units")]
    per_s: Annotated[float | None, about("in any span of so many seconds; null: in each day.")]
    per: Annotated[Literal["day"] | None, about("`day`: from midnight to midnight.")] = None
    zone: Annotated[str | None, about("The time zone whose midnight that is.")] = None
    used: Annotated[int, about("Units that count now; a start counts for the margin longer.")]
    left: Annotated[int, about("Units that may be taken now.")]
    free_at: Annotated[Instant | None, about("When the next unit is free; null: now.")]


@attrs.frozen
class RequestSlot:
    """Request of a load in progress."""

    job_id: Annotated[UUID | None, about("The load's job; null: it does not run any more.")]
    until: Annotated[Instant, about("When the slot ends by itself.")]


@attrs.frozen(kw_only=True)
class SupplierRecord:
    """Supplier: an external system with rate limits and work periods, which tasks and loads name."""

    supplier: Annotated[str, about("The supplier's name.")]
    declared: Annotated[Mapping[str, Any], about("The limits that programs declare.")]
    override: Annotated[Mapping[str, Any], about("The limits that operators have set in their place.")]
    limits: Annotated[Mapping[str, Any], about("The limits that hold: both together.")]
    margin_s: Annotated[float, about("Seconds in which a body begins after its claim; spans are longer by them.")]
    paused: Annotated[bool, about("Whether it is paused: no job of its tasks starts.")]
    tasks: Annotated[list[str], about("The tasks that name it.")]
    rate_limits: Annotated[list[RateLimitState], about("Its rate limits, with what is used.")]
    closed: Annotated[SupplierClosed | None, about("Why it may not be asked now; null: it may.")]
    opens_at: Annotated[Instant | None, about("When its next work period begins; null: it is open, or paused.")]
    slot: Annotated[RequestSlot | None, about("The load's request that is under way.")]
    error: Annotated[str | None, about("Why its limits cannot be evaluated; null if they can.")] = None


@attrs.frozen
class SupplierPage:
    """Page of suppliers, by name."""

    suppliers: Annotated[list[SupplierRecord], about("The suppliers.")]
    next: Next
