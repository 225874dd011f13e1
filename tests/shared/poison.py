"""Hostile rows for every table, generated from the catalog: a copy of a row with one unexpected value.

Rows that a table's own constraints refuse are counted as refused; all others may be written by another program.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

import attrs
import psycopg
from psycopg import sql

TABLES: Final = """
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'public' AND c.relkind IN ('r', 'p') AND c.relname LIKE 'dl\\_%' ORDER BY 1
"""
_COLUMNS: Final = """
SELECT a.attname, t.typname, t.typcategory::text, format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull,
       a.atthasdef OR a.attidentity <> '' AS has_default, a.attgenerated <> '' OR a.attidentity = 'a' AS is_generated
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
_KEYS: Final = """
SELECT DISTINCT a.attname, i.indisprimary FROM pg_index i
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
WHERE i.indrelid = %s::regclass AND i.indisunique
"""
_REFERENCES: Final = """
SELECT a.attname, c.confrelid::regclass::text, f.attname FROM pg_constraint c
JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = c.conkey[1]
JOIN pg_attribute f ON f.attrelid = c.confrelid AND f.attnum = c.confkey[1]
WHERE c.conrelid = %s::regclass AND c.contype = 'f'
"""
_UNUSED: Final = """
SELECT o.{key}::text FROM {other} o WHERE NOT EXISTS (SELECT FROM {table} t WHERE t.{name} = o.{key}) LIMIT 1
"""
_LABELS: Final = "SELECT enumlabel FROM pg_enum e JOIN pg_type t ON t.oid = e.enumtypid WHERE t.typname = %s"

INSTANTS: Final = ["infinity", "-infinity", "4714-11-24 00:00+00 BC", "200000-01-01 00:00+00", "0001-01-01 00:00+00"]
TEXTS: Final = [
    "",
    " ",
    "nobody knows this",
    "x" * 2_000,
    "x" * 100_000,
    "a\n\u202e\x1b[31m'\"%s{0}\\u0000",
    "\U0001f600",
    "[",
]
VALUES: Final = {
    "timestamptz": INSTANTS,
    "text": TEXTS,
    "int2": ["-32768", "32767", "0", "-1"],
    "int4": ["-2147483648", "2147483647", "0", "-1"],
    "int8": ["-9223372036854775808", "9223372036854775807", "0", "-1"],
    "float8": ["NaN", "Infinity", "-Infinity", "1e308", "-1", "0"],
    "numeric": ["NaN", "1e1000", "-1", "0"],
    "bool": ["true", "false"],
    "uuid": ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"],
    "bytea": ["\\x", "\\x" + "ff" * 1_000],
    "date": ["infinity", "-infinity", "0044-03-15 BC", "5874897-12-31"],
    "interval": ["-178000000 years", "178000000 years", "0"],
}
DOCUMENTS: Final = [
    "null", "true", "0", "-1", "1e400", "123456789012345678901234567890", '""', '"text"', "[]", "[null]", "{}",
    '{"": {"": ""}}', '["x", 1, null, {}]', '{"a": null}', "[" * 1_500 + "]" * 1_500, json.dumps("x" * 100_000),
    '{"' + "k" * 5_000 + '": 1}', '"\\ud83d\\ude00"', '"\\\\u0000"',
]  # fmt: skip
PARTS: Final = [None, True, -1, 2**70, "", "x", "\U0001f600" * 300, [], [None], {}, {"x": [1]}, "infinity"]
"""Values that replace a field of an object."""


@attrs.frozen
class Column:
    """Column of the catalog."""

    name: str
    kind: str
    category: str
    type: str
    not_null: bool
    has_default: bool
    is_generated: bool


@attrs.define
class Poisoned:
    """Stored rows, and the number of refused ones."""

    stored: list[str] = attrs.field(factory=list)
    refused: int = 0


def tables(connection: psycopg.Connection[Any]) -> list[str]:
    """Return all tables of the schema."""
    return [name for (name,) in connection.execute(TABLES)]


def hostile(connection: psycopg.Connection[Any], column: Column, present: Any) -> Iterator[str | None]:
    """Yield values for a column as text; `present` is a row's current value."""
    if not column.not_null:
        yield None
    if column.category == "A":
        yield from ("{}", "{NULL}", "{{NULL,NULL},{NULL,NULL}}")
    elif column.category == "E":
        yield from (label for (label,) in connection.execute(_LABELS, [column.kind]))
    elif column.kind in {"json", "jsonb"}:
        yield from DOCUMENTS
        if isinstance(present, dict):
            for name in present:
                yield json.dumps({key: value for key, value in present.items() if key != name})
                for part in PARTS:
                    yield json.dumps({**present, name: part})
            yield json.dumps(present | {"nobody knows": 1})
            yield json.dumps([present])
    else:
        yield from VALUES.get(column.kind, TEXTS)


def poison(connection: psycopg.Connection[Any], table: str, *, most_victims: int = 6) -> Poisoned:
    """Store a copy of each kind of row of `table` for each hostile value of each column."""
    columns = [Column(*row) for row in connection.execute(_COLUMNS, [table]).fetchall()]
    keys = dict(connection.execute(_KEYS, [table]).fetchall())
    done, number = Poisoned(), 0
    for victim in _victims(connection, table, columns, most_victims):
        for column in columns:
            if column.is_generated:
                continue
            for value in hostile(connection, column, victim[column.name][1]):
                number += 1
                if _store(connection, table, columns, keys, victim, column.name, value, number):
                    done.stored.append(f"{table}.{column.name} = {value!r:.80}")
                else:
                    done.refused += 1
    return done


Row = dict[str, tuple[str | None, Any]]
"""Row by column: as text, and as Python's value of a document."""


def _victims(connection: psycopg.Connection[Any], table: str, columns: list[Column], most: int) -> list[Row]:
    """Return rows of a table, one for each status if it has statuses, or an invented one if it is empty."""
    names = [column.name for column in columns]
    texts = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in names)
    kinds = [name for name in ("status", "kind", "waits_for") if name in names]
    of_each = (
        sql.SQL("DISTINCT ON ({})").format(sql.SQL(", ").join(map(sql.Identifier, kinds))) if kinds else sql.SQL("")
    )
    query = sql.SQL("SELECT {} {} FROM {} LIMIT {}").format(of_each, texts, sql.Identifier(table), most if kinds else 2)
    rows = connection.execute(query).fetchall()
    if not rows:
        rows = [tuple(_made_up(connection, column) for column in columns)]
    documents = {column.name for column in columns if column.kind in {"json", "jsonb"}}
    return [
        {
            name: (text, json.loads(text) if name in documents and text is not None else None)
            for name, text in zip(names, row, strict=True)
        }
        for row in rows
    ]


def _made_up(connection: psycopg.Connection[Any], column: Column) -> str | None:
    if not column.not_null:
        return None
    if column.category == "A":
        return "{}"
    if column.category == "E":
        return connection.execute(_LABELS, [column.kind]).fetchone()[0]
    plain = {"timestamptz": "2026-01-01", "uuid": "00000000-0000-0000-0000-00000000000a", "bool": "false"}
    plain |= {"jsonb": "{}", "bytea": "\\x00", "text": "x"}
    return plain.get(column.kind, "1")


def _store(
    connection: psycopg.Connection[Any],
    table: str,
    columns: list[Column],
    keys: dict[str, bool],
    victim: Row,
    poisoned: str,
    value: str | None,
    number: int,
) -> bool:
    """Insert the copy; a key of another row is changed, all of it or one column of it."""
    fresh = {column.name: _fresh(column, victim[column.name][0], number) for column in columns if column.name in keys}
    fresh.pop(poisoned, None)
    written = [column for column in columns if not column.is_generated]
    statement = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
        sql.Identifier(table),
        sql.SQL(", ").join(sql.Identifier(column.name) for column in written),
        sql.SQL(", ").join(sql.SQL("%s::text::{}").format(sql.SQL(column.type)) for column in written),
    )
    others = fresh | _others(connection, table, fresh)
    for changed in [others, fresh, *({name: fresh[name]} for name in fresh), {}]:
        row = {name: text for name, (text, _) in victim.items()} | changed | {poisoned: value}
        try:
            with connection.transaction():
                connection.execute(statement, [row[column.name] for column in written])
        except (psycopg.errors.UniqueViolation, psycopg.errors.ForeignKeyViolation):
            continue
        except psycopg.Error:
            return False
        return True
    return False


def _others(connection: psycopg.Connection[Any], table: str, names: Iterable[str]) -> dict[str, str | None]:
    """Return, for each column that references another table, the key of a row that is not referenced yet."""
    found = {}
    for name, other, key in connection.execute(_REFERENCES, [table]).fetchall():
        if name in names:
            parts = {"key": key, "other": other, "table": table, "name": name}
            query = sql.SQL(_UNUSED).format(**{part: sql.Identifier(text) for part, text in parts.items()})
            row = connection.execute(query).fetchone()
            found |= {} if row is None else {name: row[0]}
    return found


def rewrites(connection: psycopg.Connection[Any], table: str) -> Iterator[str]:
    """Write each hostile value into the only possible row of a table; yield what was written.

    The connection must use autocommit.
    """
    columns = [Column(*row) for row in connection.execute(_COLUMNS, [table]).fetchall()]
    [victim] = _victims(connection, table, columns, 1)
    for column in columns:
        for value in hostile(connection, column, victim[column.name][1]):
            statement = sql.SQL("UPDATE {} SET {} = %s::text::{}").format(
                sql.Identifier(table), sql.Identifier(column.name), sql.SQL(column.type)
            )
            try:
                connection.execute(statement, [value])
            except psycopg.Error:
                continue
            yield f"{table}.{column.name} = {value!r:.80}"
        with suppress(psycopg.Error):
            connection.execute(statement, [victim[column.name][0]])


def _fresh(column: Column, present: str | None, number: int) -> str | None:
    """Return another value for a part of a key."""
    if present is None:
        return None
    match column.kind:
        case "uuid":
            return f"00000000-0000-4000-8000-{number:012x}"
        case "timestamptz":
            return f"2026-01-01 00:00:00.{number % 1_000_000:06d}+00"
        case "int2" | "int4" | "int8":
            return str(1_000_000 + number)
        case "text":
            return f"{present[:100]} {number}"
        case _:
            return present
