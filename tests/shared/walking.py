"""Walk of a source from the first request to the last page, one after the other, without pauses and retries."""

from __future__ import annotations

from contextlib import aclosing

import attrs
import trio

from dataloader.flows.etl.sources.source import Page, Request, Window

WATCHDOG_S = 60


async def walk(source, window: Window | None = None) -> list[Page]:
    """Return all pages of a window."""
    pages = []
    with trio.fail_after(WATCHDOG_S):
        async with source.open() as connection, aclosing(source.requests(window or Window())) as first_requests:
            async for request in first_requests:
                following: Request | None = request
                while following is not None:
                    response = await fetch(source, connection, following)
                    page = await trio.to_thread.run_sync(read, source, response)
                    pages.append(page)
                    following = page.following
    return pages


def read(source, response) -> Page:
    """Return the page, with all records."""
    page = source.read(response)
    return attrs.evolve(page, records=list(page.records))


async def ask(source, request: Request | None = None, *, timeout_s: float = WATCHDOG_S):
    """Return the answer to one request, by default the first."""
    with trio.fail_after(WATCHDOG_S):
        async with source.open() as connection:
            return await fetch(source, connection, request or await first(source), timeout_s=timeout_s)


async def fetch(source, connection, request: Request, *, timeout_s: float = WATCHDOG_S):
    """Return the answer to a request, after all redirects."""
    asked = request
    while asked is not None:
        response = await connection.fetch(asked, timeout_s=timeout_s)
        asked = source.redirected(response)
    return attrs.evolve(response, request=request)


async def first(source, window: Window | None = None) -> Request:
    """Return the first request of a window."""
    return (await requests(source, window))[0]


async def requests(source, window: Window | None = None) -> list[Request]:
    """Return the requests of a window, without those for further pages."""
    return [request async for request in source.requests(window or Window())]


def records(pages: list[Page]) -> list:
    """Return the records of all pages."""
    return [record for page in pages for record in page.records]


def broken(pages: list[Page]) -> list:
    """Return the broken records of all pages."""
    return [one for page in pages for one in page.broken]
