"""The staging table in front of a load's target, where the rows of a segment wait.

Rows come in batches as lines of COPY's text format (flows/etl/parse/copy_lines.py), and the database's own input
functions read them, so that a value that does not fit shows in its batch: the staging table has the target's types,
NOT NULLs, checks and defaults. A segment ends with a merge (merge.py, history_merge.py) of what is staged under its
fencing token and number.

It is a table of its own and unlogged: a temporary one would belong to one connection, and batches come over several.
A crash of the server empties it, which the merge notices by the number of rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import asyncpg
import attrs

from dataloader.jobs.errors import Unstorable
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.text import storable_text
from dataloader.store.connection.command_tag import row_count
from dataloader.store.connection.error_meanings import Meaning, meaning_of
from dataloader.store.etl.history import History
from dataloader.store.etl.target_table import TableInfo, quote, told_of_targets

# Names that hardly any target has; for one that does, the database refuses to make a column twice.
TOKEN: Final = '"dl:token"'  # noqa: S105 - a job's, and no secret
SEGMENT: Final = '"dl:segment"'
REQUEST: Final = '"dl:request"'
SEQUENCE: Final = '"dl:sequence"'
SHAPE: Final = '"dl:shape"'
MARKS: Final = [name.strip('"') for name in (TOKEN, SEGMENT, REQUEST, SHAPE, SEQUENCE)]
"""The additional columns of a staging table; the last one is a row's place among those of its request."""

_IN_LINE: Final = re.compile(r"^COPY .*?, line (?P<line>\d+)(?:, column (?P<column>.*?)(?::|$))?", re.MULTILINE)


@attrs.frozen
class Lines:
    """`number` rows of one request that bring the same `columns`: a line has its place in the request, then the cells.

    Lines end with a newline, the only one in them. All in one piece: a line by itself takes as much again.
    """

    columns: tuple[str, ...]
    number: int
    text: bytes = attrs.field(repr=False)

    def cut(self, first: int, size: int) -> Iterator[Lines]:
        """The same rows in pieces: `first` of them in the first piece, then `size` in each."""
        if self.number <= first:
            yield self
            return
        single = self.text.splitlines(keepends=True)
        for start, end in pairwise([0, *range(first, len(single), size), len(single)]):
            yield Lines(self.columns, end - start, b"".join(single[start:end]))


def shape_of(columns: Sequence[str]) -> int:
    """The number by which a staging table knows the rows that bring just these columns."""
    digest = hashlib.blake2b("\0".join(columns).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


@attrs.frozen
class StagedSegment:
    """What a segment's rows are known by: the staging table's name, the token of the job that runs, and a number."""

    staging: str
    token: int
    number: int


async def aio_create_staging(  # noqa: PLR0917 - a table's parts
    connection: Any,
    table: TableInfo,
    staging: str,
    columns: Sequence[str],
    key: Sequence[str] = (),
    history: History | None = None,
) -> None:
    """Make a staging table for `columns` of `table` (asyncio-flavoured); an earlier one of its name is dropped.

    Raises:
        TargetError: the table has not these columns, or the database alone writes one of them.
    """
    table.check_loadable(columns)
    others = [column.name for column in table.columns if column.name not in columns]
    # What a check of the target says of a column that is not loaded goes with that column; NULL is no key.
    changes = [f"DROP COLUMN {quote(name)}" for name in others]
    # A number that the target gives a row is not in the staging table, where it would be used up by rows that change
    # nothing.
    changes += [
        f"ALTER COLUMN {quote(c.name)} DROP NOT NULL, ALTER COLUMN {quote(c.name)} DROP DEFAULT"
        for c in table.columns
        if c.numbered and c.name in columns
    ]
    changes += [f"ALTER COLUMN {quote(name)} SET NOT NULL" for name in key]
    if history is not None and history.changed_at is not None:
        changes += _changes_for_times(
            table, columns, {*key, history.changed_at}, history.changed_at, history.is_current
        )
    with told_of_targets():
        await aio_drop_staging(connection, staging)
        await connection.execute(
            f"CREATE UNLOGGED TABLE {quote(staging)} (LIKE {table.sql} INCLUDING DEFAULTS INCLUDING CONSTRAINTS,"
            f" {TOKEN} bigint NOT NULL, {SEGMENT} int NOT NULL,"
            f" {REQUEST} int NOT NULL, {SHAPE} bigint NOT NULL DEFAULT 0, {SEQUENCE} bigint NOT NULL)"
        )
        if changes:
            await connection.execute(f"ALTER TABLE {quote(staging)} {', '.join(changes)}")


def _changes_for_times(
    table: TableInfo, columns: Sequence[str], needed: Collection[str], changed_at: str, is_current: str
) -> list[str]:
    """Return changes of a staging table whose rows have times: a row that closes a version needs no other values."""
    changes = [f"ALTER COLUMN {quote(changed_at)} SET NOT NULL", f"ADD CHECK (isfinite({quote(changed_at)}))"]
    if is_current not in columns:
        return changes
    changes.append(f"ALTER COLUMN {quote(is_current)} DROP NOT NULL, ALTER COLUMN {quote(is_current)} SET DEFAULT true")
    for column in table.columns:
        if column.not_null and column.name in columns and column.name not in {*needed, is_current}:
            name = quote(column.name)
            changes.append(f"ALTER COLUMN {name} DROP NOT NULL")
            changes.append(
                f"ADD CONSTRAINT {quote(f'{column.name} is missing')}"
                f" CHECK ({quote(is_current)} IS FALSE OR {name} IS NOT NULL)"
            )
    return changes


async def aio_drop_staging(connection: Any, staging: str) -> None:
    """Drop the staging table, if there is one (asyncio-flavoured)."""
    await connection.execute(f"DROP TABLE IF EXISTS {quote(staging)}")


async def aio_stage(connection: Any, segment: StagedSegment, pieces: Iterable[tuple[int, Lines]]) -> int:
    """Put lines into the segment's staging table (asyncio-flavoured), in the caller's transaction; returns how many.

    `pieces` are lines of one request each, with its number in the segment: in whatever order they come, the rows of a
    later request are later ones. Rows that bring the same columns are one COPY, and known by that in the staging table;
    the others' columns have their defaults there.

    Raises:
        Unstorable: the database does not take one of them; the text says which line and column, where it knows.
        TargetError: there is no such staging table: another run of the load has made its own, or this one's is dropped.
    """
    groups: dict[tuple[str, ...], list[bytes]] = {}
    for request, lines in pieces:
        mark = b"%d\t%d\t%d\t%d\t" % (segment.token, segment.number, request, shape_of(lines.columns))
        groups.setdefault(lines.columns, []).append(_marked(mark, lines.text))
    number = 0
    try:
        with told_of_targets():
            for columns, marked in groups.items():
                tag: str = await connection.copy_to_table(
                    segment.staging,
                    # Bare bytes would be a file's name.
                    source=memoryview(b"".join(marked)),
                    columns=[*MARKS, *columns],
                    format="text",
                    encoding="UTF8",
                )
                number += row_count(tag)
    except asyncpg.PostgresError as error:
        if meaning_of(error) is not Meaning.BAD_VALUE:
            raise
        raise Unstorable(_of_line(error)) from error
    return number


def _marked(mark: bytes, lines: bytes) -> bytes:
    """The lines with the mark before each."""
    # A line's end is the only newline in it.
    return mark + lines.removesuffix(b"\n").replace(b"\n", b"\n" + mark) + b"\n" if lines else b""


def _of_line(error: asyncpg.PostgresError) -> str:
    """What the server says of a line, with its place; not the context's own words, which may quote the whole line."""
    text = storable_text(mask_text(str(error.args[0] if error.args else type(error).__name__)), 500)
    place = _IN_LINE.search(getattr(error, "context", None) or "")
    if place is None:
        return text
    column = place["column"] or getattr(error, "column_name", None)
    return f"line {place['line']}{f', column {column}' if column else ''}: {text}"
