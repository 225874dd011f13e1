"""Reads pages and makes their rows in an ETL worker's separate process. See page_wire.py."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence

from dataloader.flows.etl.parse import page_wire
from dataloader.flows.etl.parse.maker import read_page
from dataloader.flows.etl.parse.transform import Recipe, process_page
from dataloader.flows.etl.sources.source import Source, SourceError

Sent = tuple[bytes, Sequence[bytes]]


class PageMaker:
    """Makes the rows of one run of a load, whose tables it knows."""

    def __init__(self) -> None:
        """Begin without tables."""
        self._tables: list[tuple[Source, Recipe]] = []

    def __call__(self, head: bytes, body: bytes) -> Iterator[Sent]:
        """Add a table if there is no head. Otherwise read the response with this body and make its rows.

        Both are from the service itself, so they may be pickled.
        """
        if not head:
            self._learn(body)
            yield page_wire.encode(page_wire.Known()), ()
            return
        number, response, key, metadata = pickle.loads(head)  # noqa: S301 - the service has sent it
        source, recipe = self._tables[number]
        object.__setattr__(response, "body", body)  # no other code has this object
        try:
            page = read_page(source, response)
            yield page_wire.encode(page_wire.Read(page.following)), ()
            made = process_page(recipe, page, key, metadata)
        except SourceError as error:
            yield page_wire.encode(page_wire.Unread.of(error)), ()
            return
        yield page_wire.encode(page_wire.Made.of(made, page)), [lines.text for lines in made.lines]

    def _learn(self, table: bytes) -> None:
        try:
            self._tables.append(pickle.loads(table))  # noqa: S301 - the service has sent it
        except Exception as error:
            raise RuntimeError(
                f"a child process cannot import the load's source or functions: {type(error).__name__}: {error}"
            ) from error
