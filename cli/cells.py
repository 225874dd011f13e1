"""Columns and cells of tables: the declaration of a column, and a value as text."""

from __future__ import annotations

from datetime import UTC, datetime

import attrs
import msgspec

from dataloader.jobs.secrets.masking import mask
from dataloader.jobs.visible import visible


@attrs.frozen
class Column:
    """A column of a table, and what may be done to it on a terminal that is too narrow for the whole table.

    `least`: texts may be cut to so many characters; None: never cut, so that ids can be copied. `folds`: they are
    broken into lines instead. `rank`: columns with a higher one are left out earlier; those with 0 never are.
    """

    name: str
    least: int | None = None
    rank: int = 0
    folds: bool = False


def cell(value: object) -> str:
    """One value as it stands in a table: instants in UTC, objects as JSON, nothing as nothing."""
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
