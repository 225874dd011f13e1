"""Columns and cells of tables: the declaration of a column, and a value as text."""

from __future__ import annotations

from datetime import UTC, datetime

import attrs
import msgspec

from dataloader.jobs.secrets.masking import mask
from dataloader.jobs.visible import visible


@attrs.frozen
class Column:
    """Column of a table, with its treatment on a terminal that is too narrow for the whole table.

    `least`: number of characters to which texts may be cut; None: never cut, so that IDs can be copied. `folds`: texts
    are wrapped instead. `rank`: columns with a higher rank are left out earlier; those with rank 0 never are.
    """

    name: str
    least: int | None = None
    rank: int = 0
    folds: bool = False


def cell(value: object) -> str:
    """Return a value as text for a table: timestamps in UTC, objects as JSON, None as the empty string."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case datetime():
            return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"
        case dict() | list():
            return visible(msgspec.json.encode(mask(value)).decode()) if value else ""
        case _:
            return visible(str(mask(str(value))))
