"""Translation of the driver's errors into ours by their meaning, with a text that says what to do."""

from __future__ import annotations

import re
from typing import Any, Final

import asyncpg

from dataloader.jobs.errors import BadRequest, SchemaError, StoreError, StoreUnavailable, Unstorable
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.connection.error_meanings import (
    INVALID_PARAMETER,
    LOST_STATEMENTS,
    MISSING,
    NO_RIGHT,
    PROBE,
    ErrorMeaning,
    is_unclear,
    meaning_of_error,
)

_RIGHTS: Final = {
    "schema": "USAGE, CREATE",
    "table": "SELECT, INSERT, UPDATE, DELETE",
    "sequence": "USAGE",
    "function": "EXECUTE",
    "database": "CONNECT",
}
"""Rights that a service or its loads may need, by kind of object."""
_DENIED: Final = re.compile(rf"permission denied for (?P<kind>{'|'.join(_RIGHTS)}) (?P<name>[^\s)]+)")


def said(error: BaseException) -> str:
    """Return an error of asyncpg or the network as one line without secrets."""
    # Its detail is left out: it quotes rows, and so the arguments of jobs.
    from_driver = isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError)
    text = error.args[0] if from_driver and error.args else error
    return mask_text(f"{type(error).__name__}: {text}".rstrip(": "))


def translate(error: BaseException) -> StoreError | BadRequest | None:
    """Return our error for an error of asyncpg or the network. None for any other error: a bug in the program."""
    meaning = meaning_of_error(error)
    if meaning is None:
        return None
    if isinstance(error, INVALID_PARAMETER) and error.column_name:
        # dl_refuse raises it in SQL: the message begins with the field's name.
        return BadRequest(error.column_name, str(error.args[0]).removeprefix(f"{error.column_name}: "))
    text = said(error)
    match meaning:
        case ErrorMeaning.OUTAGE | ErrorMeaning.CONFLICT:
            return StoreUnavailable(f"the database is not available now ({text})")
        case ErrorMeaning.BAD_VALUE:
            return Unstorable(text)
        case ErrorMeaning.BUG:
            return _bug(error, text)


def _bug(error: BaseException, text: str) -> StoreError:
    if isinstance(error, MISSING):
        return SchemaError(
            f"the queue's tables are not as expected ({text}); run `dataloader migrate`; if the schema is up to date, "
            "run the output of `dataloader migrate --sql` with psql"
        )
    if isinstance(error, LOST_STATEMENTS):
        return StoreError(
            f"DL_DB_DSN: the pooler does not keep prepared statements ({text}); use PgBouncer 1.21 or later with"
            " max_prepared_statements of 100 or more"
        )
    return StoreError(missing_right(text) if isinstance(error, NO_RIGHT) else text)


def is_temporary(error: Exception) -> bool:
    """Return whether the statement may succeed later for any row: an outage or a conflict.

    Loops over rows need this: the error of one row must not stop the others.
    """
    return meaning_of_error(error) in {ErrorMeaning.OUTAGE, ErrorMeaning.CONFLICT}


def is_bug(error: Exception) -> bool:
    """Return True if the statement, a right, the tables or the server's files are wrong, even if for one row only."""
    return meaning_of_error(error) is ErrorMeaning.BUG


async def aio_is_unserved(error: Exception, connection: Any) -> bool:
    """Return whether an unclear error is an outage: the server refuses the probe on this connection, too."""
    if not is_unclear(error):
        return False
    try:
        async with connection.transaction():
            await connection.execute(PROBE)
    except asyncpg.PostgresError:
        return True
    return False


def missing_right(said: str, role: str = "the role of DL_DB_DSN") -> str:
    """Return the text for a right that `role` lacks: the server's message, and who should run which statement."""
    refused = _DENIED.search(said)
    if refused is None:
        todo = "let its owner do this or grant the right"
    elif refused["name"].startswith("dl_"):
        todo = "the owner of the tables should run the script for this role under Roles in docs/security.md"
    else:
        kind, name = refused["kind"], refused["name"]
        todo = f"the {kind}'s owner should run: GRANT {_RIGHTS[kind]} ON {kind.upper()} {name} TO {role}"
    return f"{role} lacks a right ({said}); {todo}"
