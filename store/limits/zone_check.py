"""Check of time zones that both this program and the database use: a name must mean the same to both.

The claim opens work periods and counts daily rate limits by the database's zones. The ends of periods, forms and pages
use the zones of this machine. Each has a separate time zone database: a server without the package `tzdata-legacy` does
not know `US/Eastern`, `CET` is a fixed offset in PostgreSQL, and one of the two may be outdated.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.logger import get_logger
from dataloader.jobs.zones import offset, zone_named
from dataloader.store.connection.error_meanings import INVALID_PARAMETER

log = get_logger(__name__)

# Over a year, so that both offsets of a zone with daylight-saving time are compared.
_OFFSETS: Final = """
SELECT extract(epoch FROM a.at AT TIME ZONE $1 - a.at AT TIME ZONE 'UTC')::float8 AS ahead_s, a.at
FROM generate_series(now(), now() + interval '364 days', interval '28 days') AS a (at) ORDER BY a.at
"""
_IS_ABBREVIATION: Final = "SELECT EXISTS (SELECT FROM pg_timezone_abbrevs WHERE abbrev = upper($1))"


async def aio_check_zone(connection: Any, field: str, name: str) -> None:
    """Check that the database has the same zone as this program (asyncio-flavored, within a transaction).

    Raises `BadRequest` for a zone that the database does not know, or that it reads as an abbreviation with a fixed
    offset. A zone with the same name and other rules is only a warning in the log: one of the two has older data.
    """
    if name == "UTC":
        return
    zone = zone_named(name)
    try:
        async with connection.transaction():
            rows = await connection.fetch(_OFFSETS, name)
    except INVALID_PARAMETER:
        raise BadRequest(
            field,
            f"must be a time zone that the database server knows, not {name!r:.100}. Use a name in its view "
            "pg_timezone_names, such as Europe/Berlin, or America/New_York instead of US/Eastern",
        ) from None
    other = [row for row in rows if timedelta(seconds=row["ahead_s"]) != offset(zone, row["at"])]
    if not other:
        return
    first = other[0]
    if await connection.fetchval(_IS_ABBREVIATION, name):
        raise BadRequest(
            field,
            f"must be a region such as Europe/Berlin; the database server treats "
            f"{name!r:.100} as an abbreviation with a fixed offset",
        )
    log.warning(
        "the database and this machine have different rules for a time zone; update the older one",
        zone=name,
        at=first["at"].isoformat(),
        database_offset_s=first["ahead_s"],
        own_offset_s=offset(zone, first["at"]).total_seconds(),
    )
