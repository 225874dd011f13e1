"""Sends requests to a source, each in its turn, and counts and logs them (E1).

All that a run asks of a source goes through here, a list of objects too: so `requests` is the number of requests that
were sent, each try and each hop of a redirect for itself, as budgets count them.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Final, TypeVar

import attrs
import stamina
import stamina.instrumentation
import trio
from stamina.instrumentation import RetryHook

from dataloader.flows.etl.belt import Shared
from dataloader.flows.etl.sources.base import Source, SourceError
from dataloader.flows.etl.turnstile import Slot, Turnstile

T = TypeVar("T")

RETRY_S: Final = (1.0, 30.0)
"""The first wait between two tries of a request, which doubles, and the longest."""


def wait_s(tries: int) -> float:
    """How many seconds to wait when so many tries have failed."""
    return min(RETRY_S[0] * 2.0 ** (tries - 1), RETRY_S[1])


def _unless_told(hook: RetryHook) -> RetryHook:
    """What stamina says of a retry, but not of a request's: the line `request failed` has said it already."""
    return lambda details: None if isinstance(details.caused_by, SourceError) else hook(details)


stamina.instrumentation.set_on_retry_hooks(
    [_unless_told(hook) for hook in stamina.instrumentation.get_on_retry_hooks()]
)


@attrs.frozen(eq=False)
class Sender:
    """Sends the requests of one run."""

    shared: Shared
    turnstile: Turnstile

    def turn(self, source: Source) -> AbstractAsyncContextManager[Slot]:
        """The turn at a source, for the length of a block."""
        return self.turnstile.turn(source.name)

    async def tried(self, ask: Callable[[int], Awaitable[T]]) -> T:
        """Await `ask`, which is told the number of the try, again as long as it fails by what may pass."""
        numbers = itertools.count(1)
        caller = stamina.AsyncRetryingCaller(
            attempts=self.shared.config.attempts, timeout=None, wait_initial=RETRY_S[0], wait_max=RETRY_S[1]
        )
        return await caller(_is_passing, lambda: ask(next(numbers)))

    async def send(self, slot: Slot, endpoint: str, ask: Callable[[float], Awaitable[T]]) -> T:
        """Send a request in its turn by `ask`, which is told how many seconds there are, and have the answer.

        Raises what `ask` raises.
        """
        report, began = self.shared.report, trio.current_time()

        async def sent() -> T:
            report.count(requests=1)
            return await ask(slot.within(self.shared.config.request_timeout))

        try:
            return await slot.send(sent)
        except SourceError as error:
            slot.hint_s = error.retry_after_s or 0.0
            self.shared.log.warning(
                "request failed", phase="requests", endpoint=_shown(endpoint), status=error.status, error=str(error)
            )
            raise
        finally:
            report.phases["requests"].add(trio.current_time() - began)

    def answered(self, endpoint: str, status: int, took_s: float) -> None:
        """Log that a request was answered."""
        self.shared.log.info(
            "request", phase="requests", endpoint=_shown(endpoint), status=status, took_s=round(took_s, 3)
        )

    async def listed(self, source: Source, endpoint: str, ask: Callable[[float], Awaitable[T]]) -> T:
        """Send a request for a list of what there is to ask for, again if it may help.

        Raises `SourceError` when it failed for good: without the list nobody knows what the run has to do.
        """

        async def once(_try: int) -> T:
            async with self.turn(source) as slot:
                began = trio.current_time()
                answer = await self.send(slot, endpoint, ask)
                self.answered(endpoint, HTTPStatus.OK, trio.current_time() - began)
                return answer

        return await self.tried(once)


def _shown(endpoint: str) -> str:
    """What the log says was asked for: the address of a redirect may be signed."""
    return endpoint.partition("?")[0]


def _is_passing(error: Exception) -> bool:
    return isinstance(error, SourceError) and error.is_passing
