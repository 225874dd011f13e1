"""Times in form fields, by the clock of the displayed zone."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo

from dataloader.jobs.errors import BadRequest
from dataloader.web.pages.formats import in_zone


def instant_of_field(name: str, text: str | None, tz: tzinfo) -> datetime | None:
    """Return the time in a field, by the clock of `tz` unless it has an offset; None if the field is empty.

    In a repeated hour it is the first one; the second can be written with its offset.

    Raises `BadRequest` for an invalid time.
    """
    if text is None:
        return None
    try:
        said = datetime.fromisoformat(text)
        return (said if said.tzinfo is not None else said.replace(tzinfo=tz)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise BadRequest(name, f"must be a date and a time, such as 2026-11-23T12:00, not {text!r:.60}") from None


def field_of_instant(value: datetime | None, tz: tzinfo) -> str:
    """Return the text of a field for a timestamp, to the minute."""
    return "" if value is None else in_zone(value, tz).strftime("%Y-%m-%dT%H:%M")
