"""Kinds of settings: how the text of a setting becomes a value, and which values are allowed.

settings.py names a kind for each setting. The kind's `read` takes the text of an environment variable, or the value
itself (tests and embedding programs construct `Settings` directly), so both have the same check and the same message.
`read` raises `RefusedSetting`, or a group of them for a list with several errors. settings.py turns them into lines
such as `NAME: must be an integer from 1 to 50, not '0'`. This module does not know the settings' names. The kinds of
lists of objects are in setting_lists.py.
"""

import ipaddress
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import attrs

from dataloader.jobs.dask_address import ALLOWED, refusal_of
from dataloader.jobs.secrets.masking import mask_address
from dataloader.jobs.text import CONTROL
from dataloader.jobs.visible import visible

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_SCHEMES: Final = frozenset({"postgresql", "postgres", "postgresql+asyncpg", "postgres+asyncpg"})
_LONGEST_S: Final = 31_536_000
_PUBLIC: Final = re.compile(r"https?://[A-Za-z0-9._~:\[\]/%-]+")
_SHORTEST_S: Final = 0.001
MOST_OF_POSTGRES_S: Final = 2_147_000
"""Longest timeout that PostgreSQL accepts: milliseconds in 31 bits."""


class RefusedSetting(Exception):  # noqa: N818 - the result of a check, always caught
    """Refusal of a value. `allowed` describes allowed values, `where` names the refused part, `shown` is its text."""

    def __init__(self, allowed: str, where: str = "", shown: str | None = None) -> None:
        super().__init__(allowed)
        self.allowed = allowed
        self.where = where
        self.shown = shown


class Missing(RefusedSetting):
    """A part of a value is missing. `where` names it, `allowed` says what it must be."""


@attrs.frozen
class SettingKind:
    """Kind of a setting: `allowed` in words, `read` to check a text or a value, `show` to print it without secrets."""

    allowed: str
    read: Callable[[object], Any]
    show: Callable[[Any], str] = str


def quoted(value: object) -> str:
    """Return a value for a message: quoted, on one line, cut to 200 characters."""
    text = visible(str(value))
    return f"'{text[:200]}…'" if len(text) > 200 else f"'{text}'"


def seconds(example: str, *, zero: bool = False, most: int = _LONGEST_S) -> SettingKind:
    """Return the kind of a duration from 1 ms (also 0 if `zero`) to `most` seconds."""
    allowed = f"a number of seconds{', at least' if zero else ' greater than'} 0, for example {example}"

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise RefusedSetting(allowed)
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise RefusedSetting(allowed) from None
        if math.isnan(number) or number < 0 or (number == 0 and not zero):
            raise RefusedSetting(allowed)
        if 0 < number < _SHORTEST_S:
            raise RefusedSetting(f"{allowed}, and at least {_SHORTEST_S}")
        if number > most:
            raise RefusedSetting(
                f"{allowed}, and at most {most} ({'a year' if most == _LONGEST_S else 'the limit of PostgreSQL'})"
            )
        return number

    return SettingKind(allowed, read, lambda value: f"{value:.12g}")


def whole(least: int, most: int) -> SettingKind:
    """Return the kind of an integer from `least` to `most`."""
    allowed = f"an integer from {least} to {most}"

    def read(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise RefusedSetting(allowed)
        return value

    return SettingKind(allowed, read)


def choice(*choices: str) -> SettingKind:
    """Return the kind of a word out of `choices`, in upper or lower case."""
    allowed = f"one of {', '.join(choices)}"

    def read(value: object) -> str:
        word = value.strip().lower() if isinstance(value, str) else ""
        if word not in choices:
            raise RefusedSetting(allowed)
        return word

    return SettingKind(allowed, read)


def _read_flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in {"true", "yes", "on", "1"}:
        return True
    if word in {"false", "no", "off", "0"}:
        return False
    raise RefusedSetting(FLAG.allowed)


def _read_line(value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value.strip()) <= 200 or CONTROL.search(value):
        raise RefusedSetting(LINE.allowed)
    return value.strip()


def _read_directory(value: object) -> Path:
    if not isinstance(value, (str, Path)) or CONTROL.search(str(value)):
        raise RefusedSetting(DIRECTORY.allowed)
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise RefusedSetting(f"{DIRECTORY.allowed} (there is no such user)") from None


def _read_host(value: object) -> str:
    host = value.strip() if isinstance(value, str) else ""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        if re.fullmatch(r"(?=.{1,253}$)(?![0-9.]+$)[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?", host):
            return host
        raise RefusedSetting(HOST.allowed) from None


LIBPQ_ONLY: Final = frozenset(
    {
        *("channel_binding", "connect_timeout", "fallback_application_name", "gssdelegation", "gssencmode", "hostaddr"),
        *("keepalives", "keepalives_count", "keepalives_idle", "keepalives_interval", "load_balance_hosts"),
        *("max_protocol_version", "min_protocol_version", "replication", "require_auth", "requirepeer"),
        *("requiressl", "sslcertmode", "sslcompression", "sslcrldir", "sslkeylogfile", "sslsni", "tcp_user_timeout"),
    }
)
"""Parameters of an address that only libpq knows; asyncpg would send them to the server, which refuses them."""


def _read_dsn(value: object) -> str:
    scheme, _, rest = value.strip().partition("://") if isinstance(value, str) else ("", "", "")
    dsn = f"postgresql://{rest}"
    if scheme.lower() not in _SCHEMES or not rest or re.search(r"\s", rest) or CONTROL.search(rest):
        raise RefusedSetting(DSN.allowed)
    try:
        parts = urlsplit(dsn)
        # The driver accepts a list of hosts, whose port urlsplit cannot read.
        whole_address = not parts.fragment and ("," in parts.netloc or parts.port != 0)
    except ValueError:
        whole_address = False
    if not whole_address:
        raise RefusedSetting(f"{DSN.allowed} (in the password, encode / ? # as %2F %3F %23)")
    if unknown := LIBPQ_ONLY.intersection(name for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
        advice = "set DL_CONNECT_TIMEOUT_SEC instead" if min(unknown) == "connect_timeout" else "omit it"
        raise RefusedSetting(f"an address without the parameter {min(unknown)}, which only libpq supports; {advice}")
    return dsn


def _read_public_url(value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in {"http", "https"} and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or "@" in parts.netloc or parts.query or parts.fragment or not _PUBLIC.fullmatch(text):
        raise RefusedSetting(PUBLIC_URL.allowed)
    return text.rstrip("/")


def _read_networks(value: object) -> tuple[Network, ...]:
    given = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(given, (list, tuple)):
        raise RefusedSetting(NETWORKS.allowed)
    try:
        networks = [ipaddress.ip_network(str(part).strip()) for part in given]
    except ValueError:
        raise RefusedSetting(NETWORKS.allowed) from None
    if any(network.prefixlen == 0 for network in networks):
        raise RefusedSetting(f"{NETWORKS.allowed}; a network of all addresses would trust every client")
    return tuple(networks)


def _read_scheduler(value: object) -> str:
    address = value.strip() if isinstance(value, str) else ""
    if (refusal := refusal_of(address)) is not None:
        raise RefusedSetting(refusal)
    return address


FLAG = SettingKind("true or false", _read_flag, lambda value: str(value).lower())
LINE = SettingKind("1 to 200 characters on one line", _read_line)
DIRECTORY = SettingKind("the path of a directory", _read_directory)
FILE = SettingKind("the path of a file", _read_directory)
SCHEDULER = SettingKind(ALLOWED, _read_scheduler)
HOST = SettingKind("an IP address or host name, without a port, for example 127.0.0.1", _read_host)
PUBLIC_URL = SettingKind(
    "an http or https URL without user and query, for example https://ops.example.com/dataloader",
    _read_public_url,
)
NETWORKS = SettingKind(
    "a list of IP addresses or networks separated by commas, for example 127.0.0.1,10.0.0.0/8",
    _read_networks,
    lambda networks: ",".join(str(one).removesuffix(f"/{one.max_prefixlen}") for one in networks),
)
DSN = SettingKind(
    "the address of a database, for example postgresql://user:password@host:5432/name", _read_dsn, mask_address
)
