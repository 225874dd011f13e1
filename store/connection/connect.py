"""Opens one connection to PostgreSQL, with our timeouts, planner settings and types.

Every connection is opened here, so an address that can't be used or a server that is too old is refused here, by an
error that names the setting.
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
    # Every statement of ours is meant to use an index, whatever the statistics say: a plan made for a table that was
    # empty when it was analysed would scan a million rows. Where a statement names rows by id, its other conditions are
    # written `(…) IS TRUE`, for which no index can be used: otherwise, if the statistics show few running rows, the
    # plan would walk them by status, once for each id. With sorts disabled, only the index that has the wanted order
    # remains. A join by id is written `= ANY (ARRAY[…])`, which no merge join can use: otherwise a plan that is made
    # while the index has no page would walk the whole of it, which costs no more then, and go on doing so when it has
    # grown. jit is off because the cost of a disabled scan would start it.
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_sort": "off",
    "jit": "off",
    # By default the server would plan these statements anew at each run, which takes half a millisecond: it
    # overestimates a generic plan's cost for arrays of unknown length.
    "plan_cache_mode": "force_generic_plan",
}
PLANNER_OF_USERS: Final = {name: "auto" if name == "plan_cache_mode" else "on" for name in PLANNER if name != "jit"}
"""The planner settings for users' SQL, in a transaction on a connection that may have ours."""
OLDEST: Final = 15
"""The oldest major version of PostgreSQL that the tests run on."""

_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""PostgreSQL counts its timestamps from here."""
_MICROSECOND: Final = timedelta(microseconds=1)
_FIRST: Final = datetime.min.replace(tzinfo=UTC)
_LAST: Final = datetime.max.replace(tzinfo=UTC)


_FILES: Final = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
"""The address's parameters that name files; the driver reads the files for each new connection."""
_HOST: Final = re.compile(r"(?:\[([^\]]+)\]|([^:\[\]/]+))(?::([0-9]+))?")
"""A host and its port, in an address; one of IPv6 is in brackets."""
_UNKNOWN_PARAMETER: Final = "unsupported startup parameter"
"""PgBouncer's error for a parameter that it neither knows nor is configured to ignore."""


async def connect(
    options: DatabaseOptions,
    *,
    direct: bool = False,
    role: str = "pool",
    planner: Mapping[str, str] = PLANNER,
) -> asyncpg.Connection[Any]:
    """Open one connection (asyncio-flavoured), with our timeouts and planner settings.

    Args:
        options: the addresses and timeouts.
        direct: use `direct_dsn`, which leads past a pooler, if there is one.
        role: what the connection is for, as pg_stat_activity shows it after the options' name.
        planner: PostgreSQL's settings for its planner.

    Raises:
        AccessDenied: the server refuses user, password or database, or the driver can't use the address.
        StoreUnavailable: the server does not answer, or its host name has no address.
        ConfigError: the server is older than the versions that are supported.
    """
    timeout_ms = str(int(options.statement_timeout_s * 1000))
    setting = setting_of(options, direct=direct)
    dsn = options.direct_dsn if direct and options.direct_dsn else options.dsn
    try:
        connection = await _aio_first_host(
            dsn,
            options,
            # The server's timeout comes first, since the connection can be used on after it.
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
        # Only the server's text is masked: the masking would take the setting's name for that of a secret.
        raise AccessDenied(f"{setting}: the server refuses the connection ({mask_text(error.args[0])})") from error
    except FROM_POOLER as error:
        if _UNKNOWN_PARAMETER not in str(error):
            raise
        raise AccessDenied(
            f"{setting}: the pooler refuses the connection ({mask_text(error.args[0])}); let it ignore the parameters"
            " that docs/operations.md lists"
        ) from error
    except BAD_ADDRESS as error:
        raise AccessDenied(f"{setting}: the address can't be used ({mask_text(error.args[0])})") from error
    except OSError as error:  # TimeoutError is one, too
        reason = mask_text(f"{type(error).__name__}: {error}".rstrip(": "))
        file = _unusable_file(dsn) if isinstance(error, FileNotFoundError | PermissionError) else None
        # A wrong certificate, on either side. The EOF of a server that ends during the handshake is temporary.
        if file or (isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError)):
            raise AccessDenied(f"{setting}: the address can't be used ({file or reason})") from error
        raise StoreUnavailable(f"{setting}: the database at {_hosts(dsn)} can't be reached ({reason})") from error
    try:
        _check_version(connection.get_server_version().major, setting)
        connection.add_log_listener(_tell_of_warning)
        # jsonb is read and written as Python values.
        await connection.set_type_codec(
            "jsonb", encoder=_encode_json, decoder=stored_json, schema="pg_catalog", format="text"
        )
        # PostgreSQL has timestamps that Python has not, such as infinity; another service may have written one.
        await connection.set_type_codec(
            "timestamptz", encoder=_encode_instant, decoder=_decode_instant, schema="pg_catalog", format="tuple"
        )
    except BaseException:
        connection.terminate()
        raise
    return connection


def _tell_of_warning(_connection: object, message: Any) -> None:
    """Log a warning of our functions. Others, such as of a trigger on our tables, are the server's log's alone."""
    if is_our_warning(message):
        log.warning(message.message)


async def _aio_first_host(dsn: str, options: DatabaseOptions, **given: Any) -> asyncpg.Connection[Any]:
    """Connect to the first host of the address that takes us: the last one that did comes first.

    The driver's own loop has one timeout for all hosts, so a host that answers nothing would hide the others, and it
    ends at a host that closes the connection. Here each host has its share of the timeout. A process stays with the
    promoted server also when the former primary comes back.
    """
    hosts = hosts_of(dsn)
    if len(hosts) < 2:  # the driver reads it, and the environment
        return await _aio_open(dsn, timeout=options.connect_timeout_s, **given)
    timeout_s = options.connect_timeout_s / len(hosts)
    hosts.sort(key=lambda host: host != options.last_host.get(dsn))
    failure: Exception | None = None
    for host, port in hosts:
        try:
            connection = await _aio_open(dsn, host=host, port=port, timeout=timeout_s, **given)
        except NEXT_HOST as error:
            failure = failure or error
        else:
            options.last_host[dsn] = (host, port)
            return connection
    raise failure or StoreUnavailable("the address has no host")


async def _aio_open(dsn: str, **given: Any) -> asyncpg.Connection[Any]:
    connection: asyncpg.Connection[Any] = await asyncpg.connect(dsn, **given)
    return connection


def hosts_of(dsn: str) -> list[tuple[str, int | None]]:
    """Return the hosts of an address and their ports, None for the default; none if it can't be split so."""
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
            host, port = match[1] or match[2], match[3] or port  # noqa: PLW2901 - its parts
        if port and not port.isdecimal():
            return []
        hosts.append((host, int(port) if port else None))
    return hosts


def _check_version(major: int, setting: str) -> None:
    if major < OLDEST:
        raise ConfigError(f"{setting}: PostgreSQL {major} is too old; PostgreSQL {OLDEST} or later is needed")


def setting_of(options: DatabaseOptions, *, direct: bool) -> str:
    """The setting that the address comes from."""
    return "DL_DIRECT_DSN" if direct and options.has_pooler else "DL_DB_DSN"


def _hosts(dsn: str) -> str:
    """The hosts of an address, without user and password, even if these contain characters not allowed in a URL."""
    address, _, query = dsn.partition("://")[2].partition("?")
    hosts = address.rpartition("@")[2].partition("/")[0]
    return hosts or dict(parse_qsl(query)).get("host") or "the default socket"


def _unusable_file(dsn: str) -> str | None:
    """Why one of the files that an address names can't be read; None if all can."""
    given = dict(parse_qsl(dsn.partition("?")[2]))
    for name in _FILES:
        path = given.get(name) or os.environ.get(f"PG{name.upper()}")
        if path:
            try:
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            except OSError as error:
                return f"{name}: {path} can't be read: {error.strerror}"
    return None


def _encode_instant(value: datetime) -> tuple[int]:
    return ((value - _EPOCH) // _MICROSECOND,)


def _decode_instant(value: tuple[int]) -> datetime:
    """The instant; if Python has none for it, Python's first or last one."""
    try:
        return _EPOCH + timedelta(microseconds=value[0])
    except OverflowError:
        return _LAST if value[0] > 0 else _FIRST


def _encode_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
