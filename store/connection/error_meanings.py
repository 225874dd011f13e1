"""Meaning of each error of PostgreSQL, of its driver and of the network. No other file interprets a SQLSTATE.

A code counts before its class, which is its first two characters. A code of a class that is not listed is a bug.
docs/outages.md says what each meaning leads to, from an HTTP request to a load's segment.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Any, Final

import asyncpg


class ErrorMeaning(enum.Enum):
    """Meaning of a failed statement, which decides what to do about it."""

    OUTAGE = "outage"
    """The database, or the way to it, cannot serve now. Wait and repeat; the value and the program are right."""
    CONFLICT = "conflict"
    """Another session was in the way, and the statement changed nothing. Repeat it."""
    BAD_VALUE = "bad value"
    """The database refuses this value and would refuse it again. Other values of the same statement may succeed."""
    BUG = "bug"
    """The statement, its rights, the tables or the server's files are wrong. Only a change by a person helps."""


BY_CLASS: Final[dict[str, ErrorMeaning]] = {
    "03": ErrorMeaning.BUG,  # SQL statement not yet complete
    "08": ErrorMeaning.OUTAGE,  # connection exception
    "09": ErrorMeaning.BUG,  # triggered action exception
    "0A": ErrorMeaning.BUG,  # feature not supported
    "0B": ErrorMeaning.BUG,  # invalid transaction initiation
    "0F": ErrorMeaning.BUG,  # locator exception
    "0L": ErrorMeaning.BUG,  # invalid grantor
    "0P": ErrorMeaning.BUG,  # invalid role specification
    "0Z": ErrorMeaning.BUG,  # diagnostics exception
    "10": ErrorMeaning.BAD_VALUE,  # XQuery error
    "20": ErrorMeaning.BUG,  # case not found
    "21": ErrorMeaning.BUG,  # cardinality violation
    "22": ErrorMeaning.BAD_VALUE,  # data exception
    "23": ErrorMeaning.BAD_VALUE,  # integrity constraint violation
    "24": ErrorMeaning.BUG,  # invalid cursor state
    "25": ErrorMeaning.BUG,  # invalid transaction state
    "26": ErrorMeaning.BUG,  # invalid SQL statement name: a pooler has lost a prepared statement
    "27": ErrorMeaning.BUG,  # triggered data change violation
    "28": ErrorMeaning.OUTAGE,  # invalid authorization: a password or a rule of pg_hba.conf is being changed
    "2B": ErrorMeaning.BUG,  # dependent privilege descriptors still exist
    "2D": ErrorMeaning.BUG,  # invalid transaction termination
    "2F": ErrorMeaning.BUG,  # SQL routine exception
    "34": ErrorMeaning.BUG,  # invalid cursor name
    "38": ErrorMeaning.BUG,  # external routine exception
    "39": ErrorMeaning.BUG,  # external routine invocation exception
    "3B": ErrorMeaning.BUG,  # savepoint exception
    "3D": ErrorMeaning.OUTAGE,  # invalid catalog name: the database is being created again
    "3F": ErrorMeaning.BUG,  # invalid schema name
    "40": ErrorMeaning.CONFLICT,  # transaction rollback
    "42": ErrorMeaning.BUG,  # syntax error or access rule violation
    "44": ErrorMeaning.BAD_VALUE,  # WITH CHECK OPTION violation
    "53": ErrorMeaning.OUTAGE,  # insufficient resources: disk full, out of memory, too many connections
    "54": ErrorMeaning.BAD_VALUE,  # program limit exceeded; for 54000 see UNCLEAR
    "55": ErrorMeaning.BUG,  # object not in prerequisite state
    "57": ErrorMeaning.OUTAGE,  # operator intervention
    "58": ErrorMeaning.OUTAGE,  # system error, such as of a disk
    "72": ErrorMeaning.CONFLICT,  # snapshot too old
    "F0": ErrorMeaning.BUG,  # configuration file error
    "HV": ErrorMeaning.BUG,  # foreign data wrapper error
    "P0": ErrorMeaning.BAD_VALUE,  # PL/pgSQL error: a user's trigger or check raises it for a row
    "XX": ErrorMeaning.BUG,  # internal error; XX001 and XX002 are damaged data, which waiting does not repair
}
BY_CODE: Final[dict[str, ErrorMeaning]] = {
    "08P01": ErrorMeaning.BUG,  # protocol violation, such as a NUL in a statement's text; see also FATAL
    "25006": ErrorMeaning.OUTAGE,  # read-only transaction: a failover has led to a server that is not promoted yet
    "25P03": ErrorMeaning.OUTAGE,  # idle-in-transaction timeout: this process was suspended, and the session is gone
    "25P04": ErrorMeaning.OUTAGE,  # transaction timeout, likewise
    "40002": ErrorMeaning.BAD_VALUE,  # integrity constraint violation at the COMMIT
    "40003": ErrorMeaning.OUTAGE,  # statement completion unknown
    "55P03": ErrorMeaning.CONFLICT,  # lock not available
    "58P01": ErrorMeaning.BUG,  # undefined file, such as an extension's library
    "58P02": ErrorMeaning.BUG,  # duplicate file
    "58P03": ErrorMeaning.BUG,  # file name too long
    "HV001": ErrorMeaning.OUTAGE,  # foreign data wrapper: out of memory
    "HV00N": ErrorMeaning.OUTAGE,  # foreign data wrapper: unable to establish a connection
}
UNCLEAR: Final = "54000"
"""Code for an exceeded program limit: a bad value, such as for an index, or an outage; `PROBE` decides.

Such outages are an imminent wraparound of transaction IDs, or a full queue of notifications.
"""
PROBE: Final = "SELECT current_setting('transaction_read_only'), pg_current_xact_id(), pg_notify('dl_probe', '')"
"""Statement that needs a transaction ID and space in the notification queue, and has no value that could be bad.

A server that is read-only by default answers `on`.
"""
OUR_WARNING: Final = "01DL1"
"""Code of warnings that our functions raise for operators."""
FATAL: Final = frozenset({"FATAL", "PANIC"})
"""Severities of errors that end the session.

A pooler reports a lost server as a protocol violation of these severities.
"""
_CAN_BE_RAISED: Final = ("08", "25006", "28", "3D", "53400", "HV001", "HV00N")
"""Codes and classes of outages that a single statement can cause on a healthy server.

It reaches a third server, has made its transaction read-only, or exceeds a limit of its session.
"""


class Misused(asyncpg.InterfaceError):
    """Error of a call that the driver refused on an open connection, such as one with too few arguments."""


# The driver's own errors, which have no code; the first match counts. Some are subclasses of an error with a code.
_BY_TYPE: Final[tuple[tuple[type[BaseException], ErrorMeaning], ...]] = (
    (asyncpg.InvalidCachedStatementError, ErrorMeaning.CONFLICT),  # a concurrent migration; the driver forgets the plan
    (asyncpg.OutdatedSchemaCacheError, ErrorMeaning.CONFLICT),  # likewise
    (Misused, ErrorMeaning.BUG),
    (asyncpg.UnsupportedClientFeatureError, ErrorMeaning.BUG),
    (asyncpg.UnsupportedServerFeatureError, ErrorMeaning.BUG),
    (asyncpg.ClientConfigurationError, ErrorMeaning.OUTAGE),  # of the address; an operator can correct it: AccessDenied
)
_WITHOUT_CODE: Final[tuple[tuple[type[BaseException], ErrorMeaning], ...]] = (
    (asyncpg.InterfaceError, ErrorMeaning.OUTAGE),  # the connection is closed
    (asyncpg.InternalClientError, ErrorMeaning.OUTAGE),  # the answer cannot be understood: the connection is closed
    (OSError, ErrorMeaning.OUTAGE),  # also a TimeoutError
    (asyncio.IncompleteReadError, ErrorMeaning.OUTAGE),
    (UnicodeEncodeError, ErrorMeaning.BAD_VALUE),  # half of a surrogate pair
)

# Single conditions, for code whose next step depends on one of them.
LOCKED: Final = asyncpg.LockNotAvailableError
TAKEN: Final = asyncpg.UniqueViolationError
TIMED_OUT: Final = asyncpg.QueryCanceledError
READ_ONLY: Final = asyncpg.ReadOnlySQLTransactionError
NO_RIGHT: Final = asyncpg.InsufficientPrivilegeError
INVALID_PARAMETER: Final = asyncpg.InvalidParameterValueError
"""Error for a bad value, such as an unknown time zone. `dl_refuse` raises it, with the field as `column_name`."""
ROLLED_BACK: Final = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
"""Errors after a rollback because of other transactions: the same operation may succeed immediately."""
UNANSWERED: Final = (asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError)
"""Errors that may come after a commit: the connection was lost, or the server has ended the session."""
MISSING: Final = (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError, asyncpg.UndefinedFunctionError)
NO_NAME: Final = (asyncpg.SyntaxOrAccessError, asyncpg.FeatureNotSupportedError)
"""Errors that show that a text is not the name of a table."""
LOST_STATEMENTS: Final = (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)
"""Errors of a prepared statement behind a pooler that changes the server connection between transactions."""
NEXT_HOST: Final = (
    OSError,  # also a TimeoutError
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.TargetServerAttributeNotMatched,
)
"""Errors of a host of the address that does not accept us now; another one may."""
BAD_ADDRESS: Final = asyncpg.ClientConfigurationError
FROM_POOLER: Final = asyncpg.ProtocolViolationError
DENIED: Final = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
    # The driver sends parameters of the address that it does not know to the server, which may refuse them.
    asyncpg.UndefinedObjectError,
    asyncpg.InvalidParameterValueError,
    asyncpg.CantChangeRuntimeParamError,
)
"""Errors by which the server refuses a new connection."""


def meaning_of_code(code: str) -> ErrorMeaning:
    """Return the meaning of a SQLSTATE; a bug if its class is unknown."""
    return BY_CODE.get(code) or BY_CLASS.get(code[:2], ErrorMeaning.BUG)


def meaning_of_error(error: BaseException) -> ErrorMeaning | None:
    """Return the meaning of an error of PostgreSQL, of its driver or of the network; None for any other error."""
    for kind, meaning in _BY_TYPE:
        if isinstance(error, kind):
            return meaning
    if isinstance(error, asyncpg.PostgresError):
        code = error.sqlstate or "XX000"
        return BY_CLASS[code[:2]] if isinstance(error, FROM_POOLER) and _is_fatal(error) else meaning_of_code(code)
    for kind, meaning in _WITHOUT_CODE:
        if isinstance(error, kind):
            return meaning
    return None


def is_unclear(error: BaseException | None) -> bool:
    """Return whether only `PROBE` can decide if this is an outage."""
    return isinstance(error, asyncpg.PostgresError) and error.sqlstate == UNCLEAR


def is_our_warning(message: Any) -> bool:
    """Return whether a message of the server is a warning of our functions."""
    return bool(message.sqlstate == OUR_WARNING)


def can_be_raised(error: BaseException | None) -> bool:
    """Return whether a statement can cause this outage on a healthy server, so that only `PROBE` can decide."""
    if not isinstance(error, asyncpg.PostgresError) or _is_fatal(error):
        return False
    return (error.sqlstate or "").startswith(_CAN_BE_RAISED)


def _is_fatal(error: Any) -> bool:
    return not FATAL.isdisjoint({error.severity_en, error.severity})


def misused(error: asyncpg.InterfaceError, connection: Any) -> asyncpg.InterfaceError:
    """Return the error as `Misused` if its connection is open, because it then does not mean a lost connection."""
    return error if connection is None or connection.is_closed() else Misused(*error.args)
