"""The functions and triggers of the schema: one set of files that is applied whole, under a number that grows.

Whoever changes a file here, or a value that a file names, raises `NUMBER`, and adds the set's new hash to
tests/store/migrations/schema_hashes.json. A database gets the set of the newest program that has migrated it. No
program replaces a newer set than its own, so that an old replica can start again in the middle of an upgrade. For the
sake of old replicas a function never changes its arguments or its result: the changed one gets a new name, and the old
one stays until a later set drops it and raises `OLDEST`.

The files name our own objects with `{schema}`, and defaults of new jobs with `{default_priority}` and the like. They
and their functions run with a search_path of `pg_catalog` alone, so that a role which may create objects in the schema
can't replace a function or an operator that they use. A literal with a backslash is written as E'…', so that the
caller's `standard_conforming_strings` does not change it. Each file revokes EXECUTE on its functions from PUBLIC;
triggers fire without it.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final

from dataloader.jobs.model import DEFAULT_LEASE_S, DEFAULT_MAX_ATTEMPTS, DEFAULT_PRIORITY

NUMBER: Final = 55
OLDEST: Final = 53
"""The number of the set of the oldest program that can work with this set, since all its functions are in it."""
FILES: Final = (
    "rights",
    "shape",
    "notifications",
    "after",
    "failures",
    "notices",
    "triggers",
    "limits",
    "claim",
    "keys",
    "sources",
    "unique",
    "enqueue",
    "process_outbox",
    "processes",
    "process_clients",
    "statistics",
    "grants",
)
"""In this order: `rights` notes the functions that are there, for `grants`; a trigger is made after its function."""

_VALUES: Final = {
    "default_priority": DEFAULT_PRIORITY,
    "default_max_attempts": DEFAULT_MAX_ATTEMPTS,
    "default_lease_s": DEFAULT_LEASE_S,
}
"""Values that the files name in braces."""


def source() -> str:
    """The SQL of the set, with `{schema}` to be filled in."""
    folder = files(__package__).joinpath("functions")
    text = "\n".join(folder.joinpath(f"{name}.sql").read_text() for name in FILES)
    for name, value in _VALUES.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def digest() -> str:
    """The set's hash."""
    return hashlib.sha256(source().encode()).hexdigest()


def script() -> str:
    """The script that applies and records the set, to be run in one transaction, with `{schema}` to be filled in."""
    return f"""SET LOCAL search_path = pg_catalog, pg_temp;
{source()}
INSERT INTO {{schema}}.dl_function_sets (number, hash, oldest) VALUES ({NUMBER}, '{digest()}', {OLDEST})
ON CONFLICT (number) DO UPDATE SET hash = excluded.hash, oldest = excluded.oldest, applied_at = now();
"""
