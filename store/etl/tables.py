"""A load's target as the catalogue has it, and the stage in front of it, where the rows of a segment wait.

Rows come in batches as lines of COPY's text format (flows/etl/parse/copy_lines.py), and the database's own input
functions read them, so that a value that does not fit shows in its batch: the stage has the target's types, NOT NULLs,
checks and defaults. A segment ends with a merge (merge.py, history_merge.py) of what is staged under its token
and number.

A stage is a table of its own and unlogged: a temporary one would belong to one connection, and batches come over
several. A crash of the server empties it, which the merge notices by the number of rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

import asyncpg
import attrs

from dataloader.jobs.errors import TargetError, Unstorable
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.text import storable_text
from dataloader.store.connection.command_tag import row_count

METADATA: Final = frozenset({"source_file", "source_endpoint", "fetched_at"})
"""Columns that say where a row came from: what differs in these alone is unchanged (E6)."""

# Names that no target has, we hope; one that has is refused by the database, which knows no column twice.
TOKEN: Final = '"dl:token"'  # noqa: S105 - a job's, and no secret
SEGMENT: Final = '"dl:segment"'
REQUEST: Final = '"dl:request"'
SEQUENCE: Final = '"dl:sequence"'
SHAPE: Final = '"dl:shape"'
MARKS: Final = [name.strip('"') for name in (TOKEN, SEGMENT, REQUEST, SHAPE, SEQUENCE)]
"""The columns of a stage that its target has not; the last one is a row's place among those of its request."""

_TABLE: Final = """
SELECT c.oid, n.nspname AS schema, c.relname AS name, c.relkind::text AS kind
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass($1)
"""
# Types without an equality, or with one of areas and numbers of points, are compared by their text.
_COLUMNS: Final = """
SELECT a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull AS not_null,
  a.atthasdef AND a.attgenerated = '' AS has_default,
  a.attgenerated <> '' OR a.attidentity = 'a' AS generated,
  a.attidentity = 'd' OR coalesce(pg_get_expr(d.adbin, d.adrelid) ~ '\\mnextval\\(', false) AS numbered,
  t.typcategory = 'A' AS is_array,
  b.name ~ '^jsonb?(\\[])?$' AS is_document,
  b.name !~ '^(json|xml|point|line|lseg|box|path|polygon|circle)(\\[])?$' AS has_equality
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
CROSS JOIN LATERAL (SELECT format_type(CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.oid END, NULL) AS name) AS b
WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""
_KEYS: Final = """
SELECT array_agg(a.attname::text ORDER BY k.place) AS key
FROM pg_index i CROSS JOIN unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, place)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
WHERE i.indrelid = $1 AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL
  AND i.indexprs IS NULL AND k.place <= i.indnkeyatts
GROUP BY i.indexrelid, i.indisprimary
ORDER BY i.indisprimary DESC, i.indexrelid
"""
# The last one is what a function raises that a check of the target calls.
_OF_A_ROW: Final = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
    asyncpg.PLPGSQLError,
)
_IN_LINE: Final = re.compile(r"^COPY .*?, line (?P<line>\d+)(?:, column (?P<column>.*?)(?::|$))?", re.MULTILINE)


def as_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names of columns as a tuple. Raises `ValueError` for a text, which would be taken for its letters."""
    if isinstance(names, str):
        raise ValueError(f"must be the names of columns, such as ({names!r},), not {names!r}")  # noqa: TRY004
    return tuple(names)


def quote(name: str) -> str:
    """An identifier as SQL has it, whatever is in its name."""
    return '"' + name.replace('"', '""') + '"'


def listed(names: Iterable[str], prefix: str = "") -> str:
    """Columns as SQL lists them, of the table with the alias `prefix` ends with a dot."""
    return ", ".join(prefix + quote(name) for name in names)


@attrs.frozen
class Column:
    """A column of a target. `generated`: the database alone writes it; `numbered`: it does where nobody else does.

    `is_document`: its type is JSON, or an array of it. `has_equality`: its type has one of values.
    """

    name: str
    type: str
    not_null: bool
    has_default: bool
    generated: bool
    numbered: bool
    is_array: bool
    is_document: bool
    has_equality: bool


@attrs.frozen
class TableInfo:
    """A table as the catalogue has it; `keys` are the columns of its unique keys, the primary one first.

    Of the keys only those that ON CONFLICT can use without more words: whole, not deferrable, of plain columns.
    """

    schema: str
    name: str
    columns: tuple[Column, ...]
    keys: tuple[tuple[str, ...], ...]

    @property
    def sql(self) -> str:
        """The table's full name, quoted."""
        return f"{quote(self.schema)}.{quote(self.name)}"

    def __contains__(self, name: object) -> bool:
        return any(column.name == name for column in self.columns)

    def column(self, name: str) -> Column:
        """The column of this name. Raises `TargetError` if there is none."""
        for column in self.columns:
            if column.name == name:
                return column
        raise TargetError(f"table {self.sql} has no column {name}; it has {', '.join(c.name for c in self.columns)}")

    def check_loadable(self, names: Sequence[str]) -> None:
        """Raise `TargetError` unless all are columns that a load may write, each named once, and at least one."""
        if len(set(names)) != len(names) or not names:
            raise TargetError(f"table {self.sql}: the load's columns are {', '.join(names) or 'none'}; each only once")
        for name in names:
            if self.column(name).generated:
                raise TargetError(f"table {self.sql}: column {name} is written by the database alone")

    def check_key(self, key: Sequence[str]) -> None:
        """Raise `TargetError` unless the table has a unique key of just these columns."""
        if not any(set(key) == set(unique) for unique in self.keys):
            known = "; ".join(", ".join(unique) for unique in self.keys) or "none"
            raise TargetError(f"table {self.sql} has no unique key ({', '.join(key)}); its unique keys are: {known}")


@attrs.frozen
class Lines:
    """`number` rows of one request that bring the same `columns`: a line has its place in the request, then the cells.

    Lines end with a newline, the only one in them. All in one piece: a line by itself takes as much again.
    """

    columns: tuple[str, ...]
    number: int
    text: bytes = attrs.field(repr=False)

    def cut(self, first: int, size: int) -> Iterator[Lines]:
        """The same in pieces: so many lines in the first one, then `size` in each."""
        if self.number <= first:
            yield self
            return
        single = self.text.splitlines(keepends=True)
        for start, end in pairwise([0, *range(first, len(single), size), len(single)]):
            yield Lines(self.columns, end - start, b"".join(single[start:end]))


def shape_of(columns: Sequence[str]) -> int:
    """The number by which a stage knows the rows that bring just these columns."""
    digest = hashlib.blake2b("\0".join(columns).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


@attrs.frozen
class Segment:
    """What a segment's rows are known by: the stage's name, the token of the job that runs, and a number."""

    stage: str
    token: int
    number: int


async def aio_describe(connection: Any, table: str) -> TableInfo:
    """The table of this name (asyncio-flavoured), written as in SQL: `orders`, `ods.orders`, `"Orders"`.

    Raises:
        TargetError: there is no such table, or it is none that rows are loaded into.
    """
    try:
        found = await connection.fetchrow(_TABLE, table)
    except (asyncpg.SyntaxOrAccessError, asyncpg.FeatureNotSupportedError) as error:
        raise TargetError(f"{table!r} is not a table's name ({error.args[0]})") from error
    if found is None:
        raise TargetError(f"there is no table {table}; create it first, or name its schema")
    if found["kind"] not in {"r", "p"}:
        raise TargetError(f"{table} is a view or the like; rows are loaded into tables")
    columns = [Column(**record) for record in await connection.fetch(_COLUMNS, found["oid"])]
    keys = [tuple(record["key"]) for record in await connection.fetch(_KEYS, found["oid"])]
    return TableInfo(found["schema"], found["name"], tuple(columns), tuple(keys))


async def aio_prepare(
    connection: Any, table: TableInfo, stage: str, columns: Sequence[str], key: Sequence[str] = ()
) -> None:
    """Make the stage `stage` for `columns` of `table`, instead of an earlier one of that name (asyncio-flavoured).

    Raises:
        TargetError: the table has not these columns, or the database alone writes one of them.
    """
    table.check_loadable(columns)
    others = [column.name for column in table.columns if column.name not in columns]
    # What a check of the target says of a column that is not loaded goes with that column; NULL is no key.
    changes = [f"DROP COLUMN {quote(name)}" for name in others]
    # A number that the target gives a row is not in the stage, where it would be used up by rows that change nothing.
    changes += [
        f"ALTER COLUMN {quote(c.name)} DROP NOT NULL, ALTER COLUMN {quote(c.name)} DROP DEFAULT"
        for c in table.columns
        if c.numbered and c.name in columns
    ]
    changes += [f"ALTER COLUMN {quote(name)} SET NOT NULL" for name in key]
    with told_of_targets():
        await aio_drop(connection, stage)
        await connection.execute(
            f"CREATE UNLOGGED TABLE {quote(stage)} (LIKE {table.sql} INCLUDING DEFAULTS INCLUDING CONSTRAINTS,"
            f" {TOKEN} bigint NOT NULL, {SEGMENT} int NOT NULL,"
            f" {REQUEST} int NOT NULL, {SHAPE} bigint NOT NULL DEFAULT 0, {SEQUENCE} bigint NOT NULL)"
        )
        if changes:
            await connection.execute(f"ALTER TABLE {quote(stage)} {', '.join(changes)}")


async def aio_drop(connection: Any, stage: str) -> None:
    """Drop the stage, if there is one (asyncio-flavoured)."""
    await connection.execute(f"DROP TABLE IF EXISTS {quote(stage)}")


async def aio_stage(connection: Any, segment: Segment, pieces: Iterable[tuple[int, Lines]]) -> int:
    """Put lines into the segment's stage (asyncio-flavoured), in the caller's transaction; their number comes back.

    `pieces` are lines of one request each, with its number in the segment: in whatever order they come, the rows of a
    later request are later ones. Rows that bring the same columns are one COPY, and known by that in the stage; the
    others' columns have their defaults there.

    Raises:
        Unstorable: the database does not take one of them; the text says which line and column, where it knows.
        TargetError: there is no such stage: another run of the load has made its own, or this one's is dropped.
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
                    segment.stage,
                    # Bare bytes would be a file's name.
                    source=memoryview(b"".join(marked)),
                    columns=[*MARKS, *columns],
                    format="text",
                    encoding="UTF8",
                )
                number += row_count(tag)
    except _OF_A_ROW as error:
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


@contextmanager
def told_of_targets() -> Iterator[None]:
    """Inside, a table or column that is missing is a target's or a stage's, not the queue's."""
    try:
        yield
    except (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError, asyncpg.UndefinedFunctionError) as error:
        raise TargetError(mask_text(str(error.args[0] if error.args else error))) from error
