"""Authorization: bearer tokens with three roles, and protection of a server without tokens.

With tokens, each request that is not public carries one. The app knows only their SHA-256, and compares a request's
with all of them in constant time. Clients that guess are throttled (token_check.py). Without tokens the supervisor
binds only loopback addresses. But a browser on this machine still lets any web page send requests, so two values are
checked that a page cannot forge: the `Host` must be a loopback one (a page that rebinds its own name to 127.0.0.1 sends
that name), and a request that changes something must not have a foreign `Origin`.
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
"""Name of the operator in the audit log if no tokens are configured."""
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})


@attrs.frozen
class Token:
    """Accepted token: its owner's name, its role, and its SHA-256."""

    name: str
    role: Role
    digest: bytes = attrs.field(repr=False)

    @classmethod
    def from_secret(cls, name: str, role: str, secret: str) -> Token:
        """Return the token with the text `secret`; `role` is `read`, `operate` or `admin`."""
        return cls(name, Role[role.upper()], hashlib.sha256(secret.encode()).digest())


def authorize(find: Callable[[str], Token | None] | None, method: str, headers: Headers, needed: Role) -> str:
    """Return the name of the caller, for the audit log. Raises `ProblemError` 401, 403, and the errors of `find`.

    `find` returns the token with a text; it is None if no tokens are configured.
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
    """Return the token with this text, if there is one."""
    digest = hashlib.sha256(secret.strip().encode("utf-8", "surrogateescape")).digest()
    found: Token | None = None
    for token in tokens:  # all of them, for constant time
        if hmac.compare_digest(token.digest, digest):
            found = token
    return found


def refuse_foreign_hosts(headers: Headers) -> None:
    """Refuse a `Host` that is not this machine's, if there are no tokens. Raises `ProblemError` 403."""
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
        raise ProblemError(
            HTTPStatus.FORBIDDEN, f"Requests from pages of {origin[:100]!r} must not change data on this server."
        )


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


@lru_cache(maxsize=64)
def _is_loopback(host: str) -> bool:
    """Return True if a Host header names only this machine, with any port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
