"""ETL workers in processes, for CPU-intensive work: each sends its pages to a separate process.

The process reads the response and makes lines of the rows, so that it returns only bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import attrs
import msgspec

from dataloader.flows.etl.parse import page_wire
from dataloader.flows.etl.parse.maker import Maker
from dataloader.flows.etl.parse.page_maker import PageMaker
from dataloader.flows.etl.parse.transform import Processed
from dataloader.flows.etl.plan.segment import OpenTable
from dataloader.flows.etl.run.load_log import LoadLog
from dataloader.flows.etl.run.pipeline_state import Fetched
from dataloader.flows.etl.sources.source import Page
from dataloader.jobs.calls import CallProcess, Calls
from dataloader.jobs.errors import BodyFailed
from dataloader.jobs.module_names import Place, place_of

MOST_PRINTED: Final = 500
"""Maximum printed lines of a process that are kept in the load's log."""
_MAKER: Final[Place] = place_of(PageMaker)


@asynccontextmanager
async def open_in_process(calls: Calls, log: LoadLog) -> AsyncIterator[Maker]:
    """Open the maker of one worker for the duration of a block. Its process starts for the first response."""
    async with AsyncExitStack() as stack:
        yield _InProcess(calls, log, stack)


@attrs.define(eq=False)
class _InProcess:
    """Has the worker's process and the tables that the process knows."""

    calls: Calls
    log: LoadLog
    stack: AsyncExitStack
    _process: CallProcess | None = None
    _tables: list[OpenTable] = attrs.field(factory=list)
    _printed: int = 0

    async def read(self, fetched: Fetched, metadata: Mapping[str, Any]) -> Page:
        """Send the response; return the page without its records. Raises `SourceError`."""
        table, response = fetched.part.table, fetched.response
        process = await self._knowing(table)
        sent = self._tables.index(table), attrs.evolve(response, body=b""), fetched.request.key, metadata
        await process.call(pickle.dumps(sent), response.body)
        answer, _ = await self._answer(process)
        assert isinstance(answer, page_wire.Read)  # noqa: S101 - the maker's first answer
        return answer.page()

    async def make(self, fetched: Fetched, page: Page, metadata: Mapping[str, Any]) -> Processed:
        """Return the rows that the process has made of the page. Raises `SourceError`."""
        del fetched, metadata
        assert self._process is not None  # noqa: S101 - the process has read the page
        answer, body = await self._answer(self._process)
        assert isinstance(answer, page_wire.Made)  # noqa: S101 - the maker's second answer
        page.broken.extend(answer.broken)
        return answer.processed(body)

    async def _knowing(self, table: OpenTable) -> CallProcess:
        """Return the process, after it knows the table."""
        if self._process is None:
            self._process = await self.stack.enter_async_context(self.calls.open(_MAKER, self._print))
        if table not in self._tables:
            await self._process.call(b"", pickle.dumps((table.source.for_reading(), table.recipe)))
            await self._answer(self._process)
            self._tables.append(table)
        return self._process

    async def _answer(self, process: CallProcess) -> tuple[page_wire.Answer, bytes]:
        """Return the next answer. Raises `SourceError`, or `BodyFailed` if the process ended or its answer is bad."""
        head, body = await process.answer()
        try:
            answer = page_wire.decode(head)
        except msgspec.DecodeError as error:
            raise BodyFailed(f"the load's process sent an invalid answer: {error}") from error
        if isinstance(answer, page_wire.Unread):
            raise answer.error()
        return answer, body

    def _print(self, stream: str, line: str) -> bool:
        self._printed += 1
        if self._printed <= MOST_PRINTED:
            self.log.info(line, phase="processing", stream=stream)
        elif self._printed == MOST_PRINTED + 1:
            self.log.warning("the process printed more lines than are stored", phase="processing", kept=MOST_PRINTED)
        return self._printed <= MOST_PRINTED
