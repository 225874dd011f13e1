"""A load's target table, read from the catalog: its columns, their types, its unique keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import attrs

from dataloader.jobs.errors import TargetError
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.connection.error_meanings import MISSING, NO_NAME

METADATA: Final = frozenset({"source_file", "source_endpoint", "fetched_at"})
"""Columns with the origin of a row: a row that differs only in these is unchanged."""


_TABLE: Final = """
SELECT c.oid, n.nspname AS schema, c.relname AS name, c.relkind::text AS kind
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass($1)
"""
# Types without an equality of whole values, such as json, jsonpath, and point, are compared by their text; and so are
# composite types, arrays and domains that contain one.
_COLUMNS: Final = """
WITH RECURSIVE parts (attnum, oid) AS (
  SELECT attnum, atttypid FROM pg_attribute WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped
  UNION
  SELECT p.attnum, n.oid FROM parts p JOIN pg_type t ON t.oid = p.oid CROSS JOIN LATERAL (
    SELECT t.typbasetype WHERE t.typtype = 'd'
    UNION ALL SELECT t.typelem WHERE t.typtype = 'b' AND t.typcategory = 'A'
    UNION ALL SELECT a.atttypid FROM pg_attribute a
    WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped) AS n (oid)
), incomparable AS (
  SELECT DISTINCT p.attnum FROM parts p JOIN pg_type t ON t.oid = p.oid
  WHERE t.typtype = 'b' AND t.typcategory <> 'A' AND NOT EXISTS (
    SELECT FROM pg_opclass c JOIN pg_am m ON m.oid = c.opcmethod
    WHERE c.opcdefault AND m.amname IN ('btree', 'hash') AND (c.opcintype = t.oid OR EXISTS (
      SELECT FROM pg_cast k WHERE k.castsource = t.oid AND k.casttarget = c.opcintype
      AND k.castmethod = 'b' AND k.castcontext = 'i')))
)
SELECT a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull AS not_null,
  a.atthasdef AND a.attgenerated = '' AS has_default,
  a.attgenerated <> '' OR a.attidentity = 'a' AS generated,
  a.attidentity = 'd' OR coalesce(pg_get_expr(d.adbin, d.adrelid) ~ '\\mnextval\\(', false) AS numbered,
  t.typcategory = 'A' AS is_array,
  b.name ~ '^jsonb?(\\[])?$' AS is_document,
  NOT EXISTS (SELECT FROM incomparable i WHERE i.attnum = a.attnum) AS has_equality
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


def as_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of columns as a tuple. Raises `ValueError` for a text, which would be taken for its letters."""
    if isinstance(names, str):
        raise ValueError(f"must be column names, such as ({names!r},), not {names!r}")  # noqa: TRY004
    return tuple(names)


def as_columns(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return names of columns as a tuple. A text is the name of a single column."""
    return (names,) if isinstance(names, str) else tuple(names)


def quote(name: str) -> str:
    """Return a name as a quoted SQL identifier, whatever characters it has."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text as an SQL literal, for `standard_conforming_strings`."""
    return "'" + text.replace("'", "''") + "'"


def listed(names: Iterable[str], prefix: str = "") -> str:
    """Return quoted columns with commas between them; `prefix` is a table's alias with a dot."""
    return ", ".join(prefix + quote(name) for name in names)


@attrs.frozen
class TargetColumn:
    """Column of a target. `generated`: only the database writes it; `numbered`: it has a sequence as its default.

    `is_document`: its type is JSON, or an array of it. `has_equality`: its type has an equality of whole values.
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
    """Table as in the catalog; `keys` are the columns of its unique keys, the primary one first.

    It has only keys that ON CONFLICT can use by their columns alone: not partial, not deferrable, of plain columns.
    """

    schema: str
    name: str
    columns: tuple[TargetColumn, ...]
    keys: tuple[tuple[str, ...], ...]

    @property
    def sql(self) -> str:
        """The table's full name, quoted."""
        return f"{quote(self.schema)}.{quote(self.name)}"

    def __contains__(self, name: object) -> bool:
        return any(column.name == name for column in self.columns)

    def column(self, name: str) -> TargetColumn:
        """Return the column of this name. Raises `TargetError` if there is none."""
        for column in self.columns:
            if column.name == name:
                return column
        raise TargetError(
            f"table {self.sql} has no column {name}; its columns: {', '.join(c.name for c in self.columns)}"
        )

    def check_loadable(self, names: Sequence[str]) -> None:
        """Raise `TargetError` unless all are columns that a load may write, each named once, and at least one."""
        if len(set(names)) != len(names) or not names:
            raise TargetError(
                f"table {self.sql}: the load's columns must be unique and not empty: {', '.join(names) or 'none'}"
            )
        for name in names:
            if self.column(name).generated:
                raise TargetError(f"table {self.sql}: column {name} is generated by the database and cannot be loaded")

    def check_key(self, key: Sequence[str]) -> None:
        """Raise `TargetError` unless the table has a unique key of exactly these columns."""
        if not any(set(key) == set(unique) for unique in self.keys):
            known = "; ".join(", ".join(unique) for unique in self.keys) or "none"
            raise TargetError(f"table {self.sql} has no unique key ({', '.join(key)}); its unique keys are: {known}")


async def aio_describe(connection: Any, table: str) -> TableInfo:
    """Return the table of this name (asyncio-flavored), written as in SQL: `orders`, `ods.orders`, `"Orders"`.

    Raises:
        TargetError: there is no such table, or rows cannot be loaded into it.
    """
    try:
        found = await connection.fetchrow(_TABLE, table)
    except NO_NAME as error:
        raise TargetError(f"{table!r} is not a table name ({error.args[0]})") from error
    if found is None:
        raise TargetError(f"there is no table {table}; create it first, or add its schema to the name")
    if found["kind"] not in {"r", "p"}:
        raise TargetError(f"{table} is not a table, but a view or similar; rows can only be loaded into tables")
    columns = [TargetColumn(**record) for record in await connection.fetch(_COLUMNS, found["oid"])]
    keys = [tuple(record["key"]) for record in await connection.fetch(_KEYS, found["oid"])]
    return TableInfo(found["schema"], found["name"], tuple(columns), tuple(keys))


@contextmanager
def told_of_targets() -> Iterator[None]:
    """Raise `TargetError` for a missing table or column in the block: it is a target's or a staging table's."""
    try:
        yield
    except MISSING as error:
        raise TargetError(mask_text(str(error.args[0] if error.args else error))) from error
