"""What the driver has to know of the server's own types is asked once a process, not on each connection.

On each connection asyncpg looks up the arrays and ranges that it meets there first, in queries that take the server
longer than most of ours do: half of what the start of a service costs it. What PostgreSQL itself defines is the same
in each database and version, so a lookup by another connection is as good. Types of a database's own are left to
asyncpg. This relies on `_introspect_types` of asyncpg's connections; nothing else knows of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import asyncpg

if TYPE_CHECKING:
    Base = asyncpg.Connection[Any]
else:
    Base = asyncpg.Connection

_FIRST_OF_OTHERS: Final = 10_000
"""PostgreSQL gives its own types numbers below this by hand, and never another one."""
_NO_STATEMENT: Final = SimpleNamespace(name="none")
"""Stands for the lookup's statement: no statement that is being prepared has to be prepared again."""

_known: Final[dict[int, list[Any]]] = {}
"""The rows that a lookup has for each type: those of its parts, then its own."""


class DriverConnection(Base):
    """asyncpg's connection, with the memory of the process for the server's own types."""

    async def _introspect_types(self, typeoids: Iterable[int], timeout: float | None) -> tuple[list[Any], Any]:  # noqa: ASYNC109 - asyncpg's
        oids = list(typeoids)
        rows = [row for oid in oids for row in _known.get(oid, ())]
        unknown = [oid for oid in oids if oid not in _known]
        if not unknown:
            return rows, _NO_STATEMENT
        found, statement = await super()._introspect_types(unknown, timeout)  # type: ignore[misc]
        by_oid = {row["oid"]: row for row in found}
        for oid in unknown:
            own = _known_rows(by_oid, oid) if oid < _FIRST_OF_OTHERS else None
            if own is not None:
                _known[oid] = own
        return [*rows, *found], statement


def _known_rows(by_oid: Mapping[int, Any], oid: int) -> list[Any] | None:
    """The rows of an array or a range and of what it consists of, if that is a plain type."""
    row = by_oid.get(oid)
    if row is None or row["kind"] == b"c":  # the row of a system table is another in each version
        return None
    parts = [by_oid.get(part) for part in (row["elemtype"], row["range_subtype"]) if part]
    if any(part is None or part["elemtype"] or part["range_subtype"] or part["kind"] != b"b" for part in parts):
        return None
    return [*parts, row]
