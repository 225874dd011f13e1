"""Functions and triggers of the schema: one set of files that is applied as a whole, with an increasing number.

For a change of a file here, or of a value that a file names, increase `NUMBER`, and add the new hash of the set to
tests/store/migrations/schema_hashes.json. A database gets the set of the newest program that has migrated it. No
program replaces a newer set than its own, so that an old replica can start again during an upgrade. For old replicas, a
function never changes its arguments or its result: the changed function gets a new name, and the old one stays until a
later set drops it and increases `OLDEST`.

The files name our own objects with `{schema}`, and defaults of new jobs with `{default_priority}` and similar names.
They and their functions run with a search_path of only `pg_catalog`, so that a role that may create objects in the
schema cannot replace a function or an operator that they use. A literal with a backslash is written as E'…', so that
the caller's `standard_conforming_strings` does not change it. Each file revokes EXECUTE on its functions from PUBLIC;
triggers fire without it.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final

from dataloader.jobs.model import DEFAULT_LEASE_S, DEFAULT_MAX_ATTEMPTS, DEFAULT_PRIORITY

NUMBER: Final = 58
OLDEST: Final = 53
"""Number of the set of the oldest program that can work with this set, since all its functions are in it."""
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
    "load_state",
    "grants",
)
"""Files in order: `rights` records the existing functions for `grants`, and triggers follow their functions."""

_VALUES: Final = {
    "default_priority": DEFAULT_PRIORITY,
    "default_max_attempts": DEFAULT_MAX_ATTEMPTS,
    "default_lease_s": DEFAULT_LEASE_S,
}
"""Values that the files name in braces."""


def source() -> str:
    """Return the SQL of the set, with the placeholder `{schema}`."""
    folder = files(__package__).joinpath("functions")
    text = "\n".join(folder.joinpath(f"{name}.sql").read_text() for name in FILES)
    for name, value in _VALUES.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def digest() -> str:
    """Return the hash of the set."""
    return hashlib.sha256(source().encode()).hexdigest()


def script() -> str:
    """Return the script that applies and records the set, for one transaction, with the placeholder `{schema}`."""
    return f"""SET LOCAL search_path = pg_catalog, pg_temp;
{source()}
INSERT INTO {{schema}}.dl_function_sets (number, hash, oldest) VALUES ({NUMBER}, '{digest()}', {OLDEST})
ON CONFLICT (number) DO UPDATE SET hash = excluded.hash, oldest = excluded.oldest, applied_at = now();
"""
