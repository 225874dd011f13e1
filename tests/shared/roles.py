"""Roles that are not the owner of the tables, each with an address of its own."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
from databases import Database

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
_numbers = itertools.count(1)


@attrs.frozen
class Role:
    """Who it is, and the address with which it comes."""

    name: str
    dsn: str


@contextmanager
def a_role(database: Database, grants: str = "") -> Iterator[Role]:
    """A role that may connect, make temporary tables and use the schema, as any other; and what `grants` adds."""
    name = f"role_{next(_numbers)}_of_{database.name}"
    address = database.dsn.replace(f"postgres:{database.server.password}@", f"{name}:sesame@")
    assert address != database.dsn
    database.psql(f"CREATE ROLE {name} LOGIN PASSWORD 'sesame'")
    try:
        database.psql(grants.replace("jobs_service", name))
        yield Role(name, address)
    finally:
        database.psql(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")


def service_role(database: Database) -> contextmanager[Role]:
    """A role with what docs/operations.md grants to a service, and no more."""
    return a_role(database, _grants())


def _grants() -> str:
    [script] = re.findall(r"```sql\n(-- As the owner.*?)```", OPERATIONS.read_text(), re.DOTALL)
    return script
