"""Finds the owner of an API token, and throttles each client that sends wrong ones.

The API and the sign-in of the pages share one `TokenCheck`. It counts wrong tokens by the client's address. A client
that has sent too many is refused before its next token is compared, so that it learns nothing. Clients at other
addresses are not affected. Cookies of a sign-in are not counted: an expired one is not a guess, and they cannot be
forged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

import attrs
import trio

from dataloader.jobs.logger import get_logger
from dataloader.web.auth import Token, token_of
from dataloader.web.problems import ProblemError
from dataloader.web.server.refusals import Refusal, Refusals

log = get_logger(__name__)

TRIES: Final = 20
"""Wrong tokens that a client may send in a row before it is throttled."""
TRY_EACH_S: Final = 3.0
"""Seconds after which a throttled client may try once more."""
MOST_CLIENTS: Final = 10_000
"""Maximum number of remembered clients. Beyond it, the client without a wrong token for longest is forgotten."""


@attrs.define
class _Client:
    """Remaining tries of a client as of `at`, and whether the log has named it since it last had all its tries."""

    tries: float
    at: float
    is_named: bool


@attrs.define
class TokenCheck:
    """Tokens of one app, and the clients that have sent wrong ones."""

    tokens: Sequence[Token]
    refusals: Refusals
    most_clients: int = MOST_CLIENTS
    _clients: dict[str, _Client] = attrs.field(factory=dict, init=False)
    """Clients by address; the one that failed last is at the end."""

    def find(self, secret: str, address: str, *, forwarded: bool = False) -> Token | None:
        """Return the token with this text, or None if it is unknown.

        Args:
            secret: the text that the client has sent.
            address: the client's address.
            forwarded: whether the request was forwarded by a proxy; only the log line needs it.

        Raises:
            ProblemError: 429; the client has sent too many wrong tokens.
        """
        now = trio.current_time()
        tries = self._tries(address, now)
        if tries < 1:
            self.refusals.count(Refusal.WRONG_TOKENS)
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "Your address has sent too many invalid API tokens; try again later.",
                kind="too-many-wrong-tokens",
                headers={"Retry-After": str(math.ceil((1 - tries) * TRY_EACH_S))},
            )
        token = token_of(self.tokens, secret)
        if token is None:
            self._failed(address, tries - 1, now, forwarded=forwarded)
        return token

    def _tries(self, address: str, now: float) -> float:
        """Return the number of wrong tokens that an address may still send."""
        client = self._clients.get(address)
        return TRIES if client is None else min(TRIES, client.tries + (now - client.at) / TRY_EACH_S)

    def _failed(self, address: str, left: float, now: float, *, forwarded: bool) -> None:
        former = self._clients.pop(address, None)
        was_named = former is not None and former.is_named and left < TRIES - 1
        self._clients[address] = _Client(left, now, was_named or left < 1)
        if len(self._clients) > self.most_clients:
            del self._clients[next(iter(self._clients))]
        if left < 1 and not was_named:
            hint = {"todo": "if this is your proxy, add it to DL_TRUSTED_PROXIES"} if forwarded else {}
            log.warning("throttling an address that has sent too many invalid API tokens", address=address, **hint)
