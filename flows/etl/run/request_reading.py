"""Reading of a source that sends requests: one fetcher, and several parsers of the responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import attrs

from dataloader.flows.etl.fetch.fetcher import Fetcher
from dataloader.flows.etl.parse.parsers import Parsers
from dataloader.flows.etl.plan.segment import Segment


@attrs.frozen(eq=False)
class RequestReading:
    """Sends the requests of segments that are planned before they are read."""

    fetcher: Fetcher
    parsers: Parsers
    segments: AsyncGenerator[Segment, None]

    async def read(self) -> None:
        """Send all requests."""
        await self.fetcher.run(self.segments)

    async def process(self) -> None:
        """Parse the responses until no more arrive."""
        await self.parsers.run()
