"""Who may do what: bearer tokens with three roles, and what protects a server that needs none.

With tokens, each request that is not public carries one; the app knows only their SHA-256, and a request's is compared
with all of them in constant time. Clients that guess are throttled (token_check.py). Without tokens the supervisor
binds loopback addresses only, but a browser on this machine is still a way in for any web page, so we look at what a
page can't forge: the `Host` must be a loopback one (a page that rebinds its own name to 127.0.0.1 sends that name), and
a request that changes something must come from no foreign `Origin`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import attrs
from werkzeug.datastructures import Headers

from dataloader.jobs.roles import Role
from dataloader.web.problems import ProblemError

LOCAL_ACTOR: Final = "local"
"""Who acts when no tokens are configured, in the audit."""
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})


@attrs.frozen
class Token:
    """A token that is accepted: whose it is, what it allows, and its SHA-256."""

    name: str
    role: Role
    digest: bytes = attrs.field(repr=False)

    @classmethod
    def from_secret(cls, name: str, role: str, secret: str) -> Token:
        """The token with the text `secret`; `role` is `read`, `operate` or `admin`."""
        return cls(name, Role[role.upper()], hashlib.sha256(secret.encode()).digest())


def authorize(find: Callable[[str], Token | None] | None, method: str, headers: Headers, needed: Role) -> str:
    """Return the name of the caller, for the audit. Raises `ProblemError` 401, 403, or what `find` raises.

    `find` returns the token with a text; without it no tokens are configured.
    """
    if find is None:
        refuse_foreign_hosts(headers)
        _refuse_foreign_pages(method, headers)
        return LOCAL_ACTOR
    scheme, _, secret = headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret:
        raise ProblemError(
            HTTPStatus.UNAUTHORIZED,
            "This address needs an API token: send `Authorization: Bearer …`.",
            headers={"WWW-Authenticate": 'Bearer realm="dataloader"'},
        )
    found = find(secret)
    if found is None:
        raise ProblemError(
            HTTPStatus.UNAUTHORIZED,
            "This API token is unknown.",
            headers={"WWW-Authenticate": 'Bearer realm="dataloader", error="invalid_token"'},
        )
    if found.role < needed:
        raise ProblemError(
            HTTPStatus.FORBIDDEN,
            f"The token {found.name!r} has the role {found.role.name.lower()}; this needs {needed.name.lower()}.",
            headers={"WWW-Authenticate": 'Bearer realm="dataloader", error="insufficient_scope"'},
        )
    return found.name


def token_of(tokens: Sequence[Token], secret: str) -> Token | None:
    """The token with this text, if there is one."""
    digest = hashlib.sha256(secret.strip().encode("utf-8", "surrogateescape")).digest()
    found: Token | None = None
    for token in tokens:  # to the end, whichever fits
        if hmac.compare_digest(token.digest, digest):
            found = token
    return found


def refuse_foreign_hosts(headers: Headers) -> None:
    """Where there are no tokens: refuse a `Host` that is not this machine's own. Raises `ProblemError` 403."""
    host = headers.get("Host", "")
    if not _is_loopback(host):
        raise ProblemError(
            HTTPStatus.FORBIDDEN,
            f"The host {host[:100]!r} is not served without tokens; use localhost, 127.0.0.1 or [::1].",
        )


def _refuse_foreign_pages(method: str, headers: Headers) -> None:
    host = headers.get("Host", "")
    origin = headers.get("Origin")
    if method not in _READING and origin is not None and _host_of(origin) != host:
        raise ProblemError(HTTPStatus.FORBIDDEN, f"Pages of {origin[:100]!r} must not change anything on this server.")


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


@lru_cache(maxsize=64)
def _is_loopback(host: str) -> bool:
    """Tell whether a Host header names this machine by itself, with any port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
