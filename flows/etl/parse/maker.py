"""What an ETL worker does with a response, wherever that is done: it reads the page, then makes rows of its records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from dataloader.flows.etl.parse.transform import Processed
from dataloader.flows.etl.run.pipeline_state import Fetched
from dataloader.flows.etl.sources.source import Page, Response, Source, SourceError
from dataloader.jobs.text import said_by


class Maker(Protocol):
    """An ETL worker's, for one response after the other."""

    async def read(self, fetched: Fetched, metadata: Mapping[str, Any]) -> Page:
        """The page; all that is known of it, if its records are elsewhere. Raises `SourceError`."""

    async def make(self, fetched: Fetched, page: Page, metadata: Mapping[str, Any]) -> Processed:
        """The rows of the page that was read last; what is broken of it is known then. Raises `SourceError`."""


def read_page(source: Source, response: Response) -> Page:
    """What the source reads. Raises `SourceError`, also for what else a format raises: the answer can't be read."""
    try:
        return source.read(response)
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(f"the answer can't be read: {said_by(error)}", is_retryable=False) from error
