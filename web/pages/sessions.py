"""Visitors of pages: the sign-in, its cookie, and protection against requests of other sites.

A sign-in posts an API token once. The cookie has the token's name and the time, signed with a key that scrypt derives
from the token's digest, so that a stolen cookie does not make it easy to guess the token. There is no additional
secret, and a cookie is valid on all replicas. It ends with its token, after `LASTS_S` seconds, or by a sign-out, which
a table records for all replicas. Only the pages read it. The API accepts only bearer tokens, so that a page of another
site cannot use credentials that the browser sends automatically.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import attrs
import trio
from itsdangerous import BadSignature, TimestampSigner
from werkzeug.datastructures import Headers

from dataloader.jobs.roles import Role
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.ended_sessions import end_session, has_ended
from dataloader.web.auth import LOCAL_ACTOR, Token, refuse_foreign_hosts
from dataloader.web.pages.addresses import PublicAddress
from dataloader.web.problems import ProblemError

LASTS_S: Final = 12 * 3600
"""Seconds after which a sign-in ends."""
_MOST_COOKIE: Final = 1_000
_SALT: Final = b"dataloader: sessions of the pages"


@attrs.frozen
class Visitor:
    """Visitor of a page: the name in the audit log, and the role. `signed_in`: by a token."""

    name: str
    role: Role
    signed_in: bool = True

    def may(self, needed: Role) -> bool:
        """Return True if the role includes `needed`."""
        return self.role >= needed


LOCAL: Final = Visitor(LOCAL_ACTOR, Role.ADMIN, signed_in=False)
"""Any user of this machine, if no tokens are configured."""


@attrs.define
class Sessions:
    """Sign-ins of one app. `own_key` signs values that only this process reads again."""

    tokens: Sequence[Token]
    database: Database
    own_key: bytes = attrs.field(factory=lambda: secrets.token_bytes(32), init=False, repr=False)
    _keys: dict[str, bytes] = attrs.field(factory=dict, init=False, repr=False)
    _one_at_a_time: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1), init=False)

    async def visitor(self, cookie: str | None) -> Visitor | None:
        """Return the visitor with this cookie, or None if a sign-in is needed. Without tokens it is `LOCAL`.

        Raises `StoreError` if the database cannot confirm that the sign-in has not ended.
        """
        if not self.tokens:
            return LOCAL
        token = await self._token_of(cookie)
        if cookie is None or token is None or await has_ended(self.database, _hash_of(cookie)):
            return None
        return Visitor(token.name, token.role)

    async def name_of(self, cookie: str | None) -> str:
        """Return the name of the token by which a cookie was made, without asking the database whether it has ended.

        It is empty for a cookie that is not ours.
        """
        if not self.tokens:
            return LOCAL.name
        token = await self._token_of(cookie)
        return "" if token is None else token.name

    async def sign_out(self, cookie: str | None) -> None:
        """End the sign-in of a cookie, on all replicas. An invalid cookie has no effect."""
        if cookie is not None and await self._token_of(cookie) is not None:
            await end_session(self.database, _hash_of(cookie), lasts_s=LASTS_S)

    async def _token_of(self, cookie: str | None) -> Token | None:
        """Return the token of a cookie, or None if there is no such token or the cookie is not ours."""
        if not cookie or len(cookie) > _MOST_COOKIE:
            return None
        name = cookie.rsplit(".", 3)[0]
        token = next((one for one in self.tokens if one.name == name), None)
        if token is None:
            return None
        try:
            signed = (await self._signer(token)).unsign(cookie, max_age=LASTS_S).decode()
        except BadSignature:
            return None
        return token if signed.rpartition(".")[0] == name else None

    async def sign_in(self, token: Token) -> str:
        """Return the cookie for a token."""
        # Two sign-ins within a second have different cookies, so that each ends separately.
        return (await self._signer(token)).sign(f"{token.name}.{secrets.token_hex(8)}").decode()

    async def _signer(self, token: Token) -> TimestampSigner:
        """Return the signer for a token. Deriving its key takes 50 ms, once per process."""
        if token.name not in self._keys:
            self._keys[token.name] = await trio.to_thread.run_sync(_key_of, token, limiter=self._one_at_a_time)
        return TimestampSigner(self._keys[token.name], digest_method=hashlib.sha256)


def _key_of(token: Token) -> bytes:
    return hashlib.scrypt(token.digest, salt=_SALT, n=1 << 14, r=8, p=1)


def _hash_of(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode()).digest()


def cookie_name(kind: str, headers: Headers) -> str:
    """Return the name of one of our cookies. It has the port, since cookies are sent to all ports of a host."""
    port = headers.get("Host", "").rpartition(":")[2]
    return f"dl_{kind}_{port if port.isascii() and port.isdigit() else 'web'}"


def check_origin(method: str, headers: Headers, public: PublicAddress, *, tokens: bool) -> None:
    """Refuse requests from pages of other sites, and unknown hosts. Raises `ProblemError` 403.

    A request that changes something must come from our own origin: its `Origin` must match, and `Sec-Fetch-Site`, which
    browsers send over https and to this machine, must not contradict it. Without tokens the `Host` must be a loopback
    one.
    """
    if not tokens:
        refuse_foreign_hosts(headers)
    if method in {"GET", "HEAD"}:
        return
    origin, host = headers.get("Origin"), headers.get("Host", "")
    if (
        origin is None
        or not _is_ours(origin, host, public)
        or headers.get("Sec-Fetch-Site", "same-origin") != "same-origin"
    ):
        shown = (origin or "none")[:100]
        expected = public.origin or f"the host {host[:100]!r}"
        raise ProblemError(
            HTTPStatus.FORBIDDEN,
            f"The request is from another site (Origin: {shown}), not {expected}. Behind a proxy, set DL_PUBLIC_URL.",
        )


def _is_ours(origin: str, host: str, public: PublicAddress) -> bool:
    if public.origin is not None:
        return origin == public.origin
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and parts.netloc == host
