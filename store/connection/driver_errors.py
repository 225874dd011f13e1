"""Translates the driver's errors into ours: temporary, of a value, of the schema; with a text that says what to do."""

from __future__ import annotations

import asyncio
import re
from typing import Final

import asyncpg

from dataloader.jobs.errors import BadRequest, SchemaError, StoreError, StoreUnavailable, Unstorable
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.connection.connect import LOST_STATEMENTS

_PASSING = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.LockNotAvailableError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
    asyncio.IncompleteReadError,
)
_UNSTORABLE = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
    UnicodeEncodeError,
)
MISSING: Final = (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError, asyncpg.UndefinedFunctionError)

_RIGHTS: Final = {
    "schema": "USAGE, CREATE",
    "table": "SELECT, INSERT, UPDATE, DELETE",
    "sequence": "USAGE",
    "function": "EXECUTE",
    "database": "CONNECT",
}
"""The rights that a service or its loads may need, by kind of object."""
_DENIED: Final = re.compile(rf"permission denied for (?P<kind>{'|'.join(_RIGHTS)}) (?P<name>[^\s)]+)")


def said(error: BaseException) -> str:
    """An error of asyncpg or the network as one line without secrets."""
    # Without its detail, which quotes rows, and so the arguments of jobs.
    from_driver = isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError)
    text = error.args[0] if from_driver and error.args else error
    return mask_text(f"{type(error).__name__}: {text}".rstrip(": "))


def translate(  # noqa: PLR0911 - one for each kind of error
    error: BaseException,
) -> StoreError | BadRequest | None:
    """Our error for one of asyncpg or the network; None for any other, which is a fault of the program."""
    if isinstance(error, asyncpg.InvalidParameterValueError) and error.column_name:
        # Raised by dl_refuse in SQL: the message begins with the field's name.
        return BadRequest(error.column_name, str(error.args[0]).removeprefix(f"{error.column_name}: "))
    text = said(error)
    if isinstance(error, MISSING):
        return SchemaError(
            f"the queue's tables are not as expected ({text}); run `dataloader migrate`; if that finds nothing to do, "
            "run the output of `dataloader migrate --sql` with psql"
        )
    if isinstance(error, LOST_STATEMENTS):
        return StoreError(
            f"DL_DB_DSN: the pooler does not keep prepared statements ({text}); use PgBouncer 1.21 or later with"
            " max_prepared_statements of 100 or more"
        )
    if isinstance(error, _PASSING) or (isinstance(error, asyncpg.ProgramLimitExceededError) and "NOTIFY queue" in text):
        return StoreUnavailable(f"the database can't serve us now ({text})")
    if isinstance(error, _UNSTORABLE):
        return Unstorable(text)
    if isinstance(error, asyncpg.PostgresError):
        refused = isinstance(error, asyncpg.InsufficientPrivilegeError)
        return StoreError(missing_right(text) if refused else text)
    return None


def missing_right(said: str, role: str = "the role of DL_DB_DSN") -> str:
    """The text for a right that `role` lacks: what the server said, and who should run which statement."""
    refused = _DENIED.search(said)
    if refused is None:
        todo = "its owner can do this, or grant the right"
    elif refused["name"].startswith("dl_"):
        todo = "the owner of the tables should run the script for it under Roles in docs/operations.md"
    else:
        kind, name = refused["kind"], refused["name"]
        todo = f"the {kind}'s owner should run: GRANT {_RIGHTS[kind]} ON {kind.upper()} {name} TO {role}"
    return f"{role} lacks a right ({said}); {todo}"
