"""Opens one connection to PostgreSQL, with our timeouts, planner settings and types.

Every connection is opened here. So an unusable address or an old server is refused here, by an error that names the
setting.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

import asyncpg
import msgspec

from dataloader.jobs.errors import AccessDenied, ConfigError, StoreUnavailable
from dataloader.jobs.logger import get_logger
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.text import stored_json
from dataloader.store.connection.error_meanings import BAD_ADDRESS, DENIED, FROM_POOLER, NEXT_HOST, is_our_warning
from dataloader.store.connection.options import DatabaseOptions

log = get_logger(__name__)

PLANNER: Final = {
    # Every statement of ours must use an index, whatever the statistics say: a plan made for a table that was empty
    # when it was analyzed would scan a million rows. If a statement names rows by ID, its other conditions are written
    # `(…) IS TRUE`, for which no index can be used. Otherwise, if the statistics show few running rows, the plan would
    # walk them by status, once for each ID. With sorts disabled, only the index with the wanted order remains. A join
    # by ID is written `= ANY (ARRAY[…])`, which no merge join can use. Otherwise a plan that is made while the index
    # has no page would walk all of it, which costs no more then, and would still do so when the index has grown. jit is
    # off because the cost of a disabled scan would start it.
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_sort": "off",
    "jit": "off",
    # By default the server would plan these statements again at each run, which takes half a millisecond: it
    # overestimates a generic plan's cost for arrays of unknown length.
    "plan_cache_mode": "force_generic_plan",
}
PLANNER_OF_USERS: Final = {name: "auto" if name == "plan_cache_mode" else "on" for name in PLANNER if name != "jit"}
"""Planner settings for users' SQL, in a transaction on a connection that may have ours."""
OLDEST: Final = 15
"""Oldest major version of PostgreSQL that the tests run on."""

_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""Start of PostgreSQL's timestamps."""
_MICROSECOND: Final = timedelta(microseconds=1)
_FIRST: Final = datetime.min.replace(tzinfo=UTC)
_LAST: Final = datetime.max.replace(tzinfo=UTC)


_FILES: Final = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
"""Parameters of the address that name files; the driver reads the files for each new connection."""
_HOST: Final = re.compile(r"(?:\[([^\]]+)\]|([^:\[\]/]+))(?::([0-9]+))?")
"""A host and its port in an address; an IPv6 host is in brackets."""
_UNKNOWN_PARAMETER: Final = "unsupported startup parameter"
"""PgBouncer's error for a parameter that it neither knows nor is configured to ignore."""


async def connect(
    options: DatabaseOptions,
    *,
    direct: bool = False,
    role: str = "pool",
    planner: Mapping[str, str] = PLANNER,
) -> asyncpg.Connection[Any]:
    """Open one connection (asyncio-flavored), with our timeouts and planner settings.

    Args:
        options: the addresses and timeouts.
        direct: use `direct_dsn`, which bypasses a pooler, if there is one.
        role: the purpose of the connection, which pg_stat_activity shows after the options' name.
        planner: PostgreSQL's settings for its planner.

    Raises:
        AccessDenied: the server refuses user, password or database, or the driver cannot use the address.
        StoreUnavailable: the server does not answer, or its host name has no address.
        ConfigError: the server is older than the supported versions.
    """
    timeout_ms = str(int(options.statement_timeout_s * 1000))
    setting = setting_of(options, direct=direct)
    dsn = options.direct_dsn if direct and options.direct_dsn else options.dsn
    try:
        connection = await _aio_first_host(
            dsn,
            options,
            # The server's timeout comes first, because the connection remains usable after it.
            command_timeout=options.statement_timeout_s + 1,
            server_settings={
                "application_name": f"{options.name} {role}",
                "statement_timeout": timeout_ms,
                "idle_in_transaction_session_timeout": timeout_ms,
                "timezone": "UTC",
                "standard_conforming_strings": "on",
                # A claim needs two snapshots; a fenced write waits for a locked row and must see its newest version.
                "default_transaction_isolation": "read committed",
                **planner,
            },
        )
    except DENIED as error:
        # Mask only the server's text: masking would take the setting's name for that of a secret.
        raise AccessDenied(f"{setting}: the server rejected the connection ({mask_text(error.args[0])})") from error
    except FROM_POOLER as error:
        if _UNKNOWN_PARAMETER not in str(error):
            raise
        raise AccessDenied(
            f"{setting}: the pooler rejected the connection ({mask_text(error.args[0])}); let it ignore the parameters"
            " that docs/postgresql.md lists"
        ) from error
    except BAD_ADDRESS as error:
        raise AccessDenied(f"{setting}: the address is invalid ({mask_text(error.args[0])})") from error
    except OSError as error:  # also a TimeoutError
        reason = mask_text(f"{type(error).__name__}: {error}".rstrip(": "))
        file = _unusable_file(dsn) if isinstance(error, FileNotFoundError | PermissionError) else None
        # This is a wrong certificate, on either side. The EOF of a server that ends during the handshake is temporary.
        if file or (isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError)):
            raise AccessDenied(f"{setting}: the address is invalid ({file or reason})") from error
        raise StoreUnavailable(f"{setting}: the database at {_hosts(dsn)} cannot be reached ({reason})") from error
    try:
        _check_server_version(connection.get_server_version().major, setting)
        connection.add_log_listener(_tell_of_warning)
        # jsonb is read and written as Python values.
        await connection.set_type_codec(
            "jsonb", encoder=_encode_json, decoder=stored_json, schema="pg_catalog", format="text"
        )
        # PostgreSQL has timestamps that Python lacks, such as infinity; another service may have written one.
        await connection.set_type_codec(
            "timestamptz", encoder=_encode_instant, decoder=_decode_instant, schema="pg_catalog", format="tuple"
        )
    except BaseException:
        connection.terminate()
        raise
    return connection


def _tell_of_warning(_connection: object, message: Any) -> None:
    """Log a warning of our functions. Others, such as of a trigger on our tables, are only in the server's log."""
    if is_our_warning(message):
        log.warning(message.message)


async def _aio_first_host(dsn: str, options: DatabaseOptions, **given: Any) -> asyncpg.Connection[Any]:
    """Connect to the first host of the address that accepts us, starting with the last one that did.

    The driver's own loop has one timeout for all hosts, so a host that does not answer would hide the others, and it
    ends at a host that closes the connection. Here each host has its share of the timeout. A process stays with the
    promoted server even when the former primary comes back.
    """
    hosts = hosts_of(dsn)
    if len(hosts) < 2:  # the driver reads the address and the environment
        return await _aio_open_connection(dsn, timeout=options.connect_timeout_s, **given)
    timeout_s = options.connect_timeout_s / len(hosts)
    hosts.sort(key=lambda host: host != options.last_host.get(dsn))
    failure: Exception | None = None
    for host, port in hosts:
        try:
            connection = await _aio_open_connection(dsn, host=host, port=port, timeout=timeout_s, **given)
        except NEXT_HOST as error:
            failure = failure or error
        else:
            options.last_host[dsn] = (host, port)
            return connection
    raise failure or StoreUnavailable("the address has no host")


async def _aio_open_connection(dsn: str, **given: Any) -> asyncpg.Connection[Any]:
    connection: asyncpg.Connection[Any] = await asyncpg.connect(dsn, **given)
    return connection


def hosts_of(dsn: str) -> list[tuple[str, int | None]]:
    """Return the hosts of an address and their ports, None for the default; none if it cannot be split."""
    address, _, query = dsn.partition("://")[2].partition("?")
    fields = dict(parse_qsl(query))
    ports = fields.get("port", "").split(",")
    given = address.rpartition("@")[2].partition("/")[0] or fields.get("host", "")
    hosts = []
    for number, host in enumerate(given.split(",")):
        port = ports[number % len(ports)]
        if not host.startswith("/"):
            match = _HOST.fullmatch(unquote(host))
            if match is None:
                return []
            host, port = match[1] or match[2], match[3] or port  # noqa: PLW2901 - the parts of the host
        if port and not port.isdecimal():
            return []
        hosts.append((host, int(port) if port else None))
    return hosts


def _check_server_version(major: int, setting: str) -> None:
    if major < OLDEST:
        raise ConfigError(f"{setting}: PostgreSQL {major} is too old; PostgreSQL {OLDEST} or later is required")


def setting_of(options: DatabaseOptions, *, direct: bool) -> str:
    """Return the name of the setting that the address comes from."""
    return "DL_DIRECT_DSN" if direct and options.has_pooler else "DL_DB_DSN"


def _hosts(dsn: str) -> str:
    """Return the hosts of an address, without user and password, even if these have characters not allowed in a URL."""
    address, _, query = dsn.partition("://")[2].partition("?")
    hosts = address.rpartition("@")[2].partition("/")[0]
    return hosts or dict(parse_qsl(query)).get("host") or "the default socket"


def _unusable_file(dsn: str) -> str | None:
    """Return the reason why one of the files that an address names cannot be read; None if all can."""
    given = dict(parse_qsl(dsn.partition("?")[2]))
    for name in _FILES:
        path = given.get(name) or os.environ.get(f"PG{name.upper()}")
        if path:
            try:
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            except OSError as error:
                return f"{name}: {path} cannot be read: {error.strerror}"
    return None


def _encode_instant(value: datetime) -> tuple[int]:
    return ((value - _EPOCH) // _MICROSECOND,)


def _decode_instant(value: tuple[int]) -> datetime:
    """Return the timestamp; if Python has none for it, Python's first or last one."""
    try:
        return _EPOCH + timedelta(microseconds=value[0])
    except OverflowError:
        return _LAST if value[0] > 0 else _FIRST


def _encode_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
