"""Roles that do not own the tables, each with its own address."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
from databases import Database

SECURITY = Path(__file__).parents[2] / "docs" / "security.md"
_numbers = itertools.count(1)


@attrs.frozen
class Role:
    """Role with its name and its address."""

    name: str
    dsn: str


@contextmanager
def a_role(database: Database, grants: str = "") -> Iterator[Role]:
    """Create a role that may connect, create temporary tables and use the schema, and has the rights in `grants`."""
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
    """Create a role with exactly the rights that docs/security.md grants to a service."""
    return a_role(database, _grants())


def _grants() -> str:
    [script] = re.findall(r"```sql\n(-- As the owner.*?)```", SECURITY.read_text(), re.DOTALL)
    return script
