"""Staged rows with different columns, and the columns that each of them lacks.

A load writes only the columns that a row has, whatever the other rows of its batch have. So the staging table stores
the shape of each row: the set of its columns. Before a merge, columns that a row lacks are taken from the target; in a
new row they have their defaults.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, Protocol

from dataloader.jobs.errors import StoreError
from dataloader.store.etl.staging import SEGMENT, SHAPE, TOKEN, StagedSegment, shape_of
from dataloader.store.etl.target_table import TableInfo, quote

MINE: Final = f"s.{TOKEN} = $1 AND s.{SEGMENT} = $2"
"""Condition for a segment's rows in a staging table; its token and number are the first two arguments."""


class Shaped(Protocol):
    """Merge of rows that may have different columns: `columns` has all of them, `shapes` the sets of each kind."""

    @property
    def table(self) -> TableInfo:
        """The target."""

    @property
    def segment(self) -> StagedSegment:
        """The staged segment."""

    @property
    def key(self) -> Sequence[str]:
        """Columns that identify a row."""

    @property
    def columns(self) -> Sequence[str]:
        """All columns that rows have."""

    @property
    def shapes(self) -> Collection[tuple[str, ...]]:
        """Columns of each kind of row."""


async def aio_complete(connection: Any, merge: Shaped, condition: str = "true") -> None:
    """Fill the columns that staged rows lack from the target's rows that meet `condition` (asyncio-flavored).

    Raises `StoreError` if two shapes have the same number, which has a chance of one in 10^19.
    """
    numbers = {shape: shape_of(shape) for shape in merge.shapes}
    if len(set(numbers.values())) < len(numbers):
        raise StoreError(f"table {merge.table.sql}: two kinds of rows have the same number; load them with two loads")
    lacking = [number for shape, number in numbers.items() if not set(merge.columns) <= set(shape)]
    if not lacking:
        return
    arguments: list[object] = [merge.segment.token, merge.segment.number, lacking]
    sets = []
    for name in merge.columns:
        having = [number for shape, number in numbers.items() if name in shape]
        if len(having) < len(numbers):
            arguments.append(having)
            is_there = f"s.{SHAPE} = ANY (${len(arguments)}::bigint[])"
            sets.append(f"{quote(name)} = CASE WHEN {is_there} THEN s.{quote(name)} ELSE t.{quote(name)} END")
    await connection.execute(
        f"""
        UPDATE {quote(merge.segment.staging)} s SET {", ".join(sets)} FROM {merge.table.sql} t
        WHERE {MINE} AND s.{SHAPE} = ANY ($3::bigint[]) AND {same_key(merge.key)} AND {condition}""",
        *arguments,
    )


def same_key(key: Iterable[str]) -> str:
    """Return SQL for: the staged row `s` and the row `t` of the target have one key."""
    return " AND ".join(f"t.{quote(name)} = s.{quote(name)}" for name in key)
