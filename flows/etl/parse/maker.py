"""Work of an ETL worker for a response, in a thread or a process: reads the page, then makes rows of its records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from dataloader.flows.etl.parse.transform import Processed
from dataloader.flows.etl.run.pipeline_state import Fetched
from dataloader.flows.etl.sources.source import Page, Response, Source, SourceError
from dataloader.jobs.text import said_by


class Maker(Protocol):
    """Parses one response after the other for an ETL worker."""

    async def read(self, fetched: Fetched, metadata: Mapping[str, Any]) -> Page:
        """Return the page. Its records may be in another process. Raises `SourceError`."""

    async def make(self, fetched: Fetched, page: Page, metadata: Mapping[str, Any]) -> Processed:
        """Return the rows of the last page that was read. Its broken parts are known then. Raises `SourceError`."""


def read_page(source: Source, response: Response) -> Page:
    """Return the page that the source reads. Raises `SourceError`, also for any other error of a format."""
    try:
        return source.read(response)
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(f"the answer cannot be read: {said_by(error)}", is_retryable=False) from error
