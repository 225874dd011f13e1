"""Sends requests to a source, each in a request slot, and counts and logs them.

All requests of a run are sent here, including those for lists of objects. So `requests` is the number of sent requests:
each try and each redirect counts, as it does for rate limits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeVar

import attrs
import trio

from dataloader.flows.etl.fetch.rate_limiter import RateLimiter, SlotForRequest
from dataloader.flows.etl.run.pipeline_state import PipelineState
from dataloader.flows.etl.sources.source import Source, SourceError

T = TypeVar("T")


@attrs.frozen(eq=False)
class RequestSender:
    """Sends the requests of one run."""

    shared: PipelineState
    rate_limiter: RateLimiter

    async def tried(self, ask: Callable[[int], Awaitable[T]], *, after: int = 0) -> T:
        """Await `ask`, called with the number of the try. Repeat it while that may help.

        `after` is the number of earlier failed tries. Raises the `SourceError` of the last try.
        """
        tries = after
        while True:
            if tries:
                await trio.sleep(self._wait_s(tries))
            tries += 1
            try:
                return await ask(tries)
            except SourceError as error:
                if not self.shared.is_to_be_tried_again(error, tries):
                    raise

    def _wait_s(self, tries: int) -> float:
        """Return the seconds to wait before the next try after `tries` failed ones."""
        first_s, longest_s = self.shared.limits.retry_s
        return min(first_s * 2.0 ** (tries - 1), longest_s)

    async def send(
        self, slot: SlotForRequest, endpoint: str, ask: Callable[[float], Awaitable[T]], **about: object
    ) -> T:
        """Send a request in its slot by `ask`, called with its timeout in seconds; return the response.

        `about` has further fields of the log line of a failure.

        Raises the errors of `ask`.
        """
        progress, began = self.shared.progress, trio.current_time()

        async def sent() -> T:
            progress.count(requests=1)
            return await ask(slot.within(self.shared.config.request_timeout))

        try:
            return await slot.send(sent)
        except SourceError as error:
            slot.hint_s = error.retry_after_s or 0.0
            self.shared.log.warning(
                "request failed",
                phase="requests",
                endpoint=_without_query(endpoint),
                **about,
                attempt=f"{slot.tries} of {self.shared.config.attempts}",
                status=error.status,
                error=str(error),
            )
            raise
        finally:
            progress.phases["requests"].add(trio.current_time() - began)

    def answered(self, endpoint: str, status: int, took_s: float, **about: object) -> None:
        """Log that a request was answered. `about` has further fields of the line."""
        self.shared.log.info(
            "request",
            phase="requests",
            endpoint=_without_query(endpoint),
            **about,
            status=status,
            took_s=round(took_s, 3),
        )

    async def listed(self, source: Source, endpoint: str, ask: Callable[[float], Awaitable[T]]) -> T:
        """Send a request that lists the objects to fetch. Retry it if that may help.

        Raises `SourceError` if it failed for good, because the run needs the list.
        """

        async def once(tries: int) -> T:
            async with self.rate_limiter.slot(source.name, tries) as slot:
                began = trio.current_time()
                answer = await self.send(slot, endpoint, ask)
                self.answered(endpoint, HTTPStatus.OK, trio.current_time() - began)
                return answer

        return await self.tried(once)


def _without_query(endpoint: str) -> str:
    """Return the endpoint for the log, without the query: the address of a redirect may contain a signature."""
    return endpoint.partition("?")[0]
