"""ETL workers in threads, the default."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from dataloader.flows.etl.parse.database_reader import Reader, open_reader
from dataloader.flows.etl.parse.maker import Maker, read_page
from dataloader.flows.etl.parse.transform import Processed, process_page
from dataloader.flows.etl.run.pipeline_state import Fetched
from dataloader.flows.etl.sources.source import Page
from dataloader.store.connection.bridge import Database


@asynccontextmanager
async def open_in_threads(database: Database, limiter: trio.CapacityLimiter) -> AsyncIterator[Maker]:
    """Open the maker of one worker, with its reader of the database, for the duration of a block."""
    async with open_reader(database) as reader:
        yield _InThreads(reader, limiter)


@attrs.frozen(eq=False)
class _InThreads:
    """Calls the source and the transform in threads."""

    reader: Reader
    limiter: trio.CapacityLimiter

    async def read(self, fetched: Fetched, _metadata: Mapping[str, Any]) -> Page:
        """Return the page. Its records may be read only during the iteration. Raises `SourceError`."""
        page: Page = await self._in_thread(read_page, fetched.part.table.source, fetched.response)
        return page

    async def make(self, fetched: Fetched, page: Page, metadata: Mapping[str, Any]) -> Processed:
        """Return the rows of the page. Raises `SourceError`."""
        recipe = fetched.part.table.recipe
        made: Processed = await self._in_thread(process_page, recipe, page, fetched.request.key, metadata, self.reader)
        return made

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a thread. On cancellation the thread is abandoned, and its result is discarded."""
        return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=self.limiter)
