"""Suppliers as they are stored, with the current use of their rate limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from uuid import UUID

import attrs

from dataloader.jobs.errors import NotFound
from dataloader.jobs.model import Instant, about
from dataloader.jobs.page_cursor import Next
from dataloader.jobs.secrets.record_masks import SENSITIVE, Public

SupplierClosed = Literal["paused", "period", "error"]
"""Reason why a supplier is closed: paused; no work period is open; its limits cannot be evaluated."""


class SupplierNotFound(NotFound):
    """No supplier has this name."""


@attrs.frozen(kw_only=True)
class RateLimitState:
    """Rate limit of a supplier, and its current use."""

    requests: Annotated[int, about("Maximum number of units in the period.")]
    per_s: Annotated[float | None, about("Length of the period in seconds; null: per day.")]
    per: Annotated[Literal["day"] | None, about("`day`: from midnight to midnight.")] = None
    zone: Annotated[str | None, about("Time zone of midnight."), Public("a name of the time zone database")] = None
    used: Annotated[int, about("Units in use now. Each start counts for the period plus the margin.")]
    left: Annotated[int, about("Units left now.")]
    free_at: Annotated[Instant | None, about("Time at which the next unit is free; null: now.")]


@attrs.frozen
class RequestSlot:
    """Request of a load in progress."""

    job_id: Annotated[UUID | None, about("ID of the load's job; null if it no longer runs.")]
    until: Annotated[Instant, about("Expiry of the slot.")]


@attrs.frozen(kw_only=True)
class SupplierRecord:
    """Supplier: an external system with rate limits and work periods, which tasks and loads name."""

    supplier: Annotated[str, about("Name of the supplier."), SENSITIVE]
    declared: Annotated[Mapping[str, Any], about("Limits that programs declare."), SENSITIVE]
    override: Annotated[Mapping[str, Any], about("Limits that operators have set instead."), SENSITIVE]
    limits: Annotated[Mapping[str, Any], about("Limits in effect."), SENSITIVE]
    margin_s: Annotated[
        float,
        about("Maximum seconds between the claim and the start of a job; the periods of rate limits are longer by it."),
    ]
    paused: Annotated[bool, about("True if it is paused and no jobs of its tasks start.")]
    tasks: Annotated[list[str], about("Tasks that use it."), SENSITIVE]
    rate_limits: Annotated[list[RateLimitState], about("Rate limits, with the units in use.")]
    closed: Annotated[SupplierClosed | None, about("Reason why it accepts no requests now; null if it does.")]
    opens_at: Annotated[Instant | None, about("Begin of its next work period; null if it is open or paused.")]
    slot: Annotated[RequestSlot | None, about("Request of a load in progress.")]
    error: Annotated[
        str | None, about("Error in its limits, if they cannot be evaluated; otherwise null."), SENSITIVE
    ] = None


@attrs.frozen
class SupplierPage:
    """Page of suppliers, by name."""

    suppliers: Annotated[list[SupplierRecord], about("Suppliers.")]
    next: Next
