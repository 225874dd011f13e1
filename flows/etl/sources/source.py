"""Contract of a source: the requests for a window, the response to a request, the records of a response.

The pipeline knows nothing of HTTP, files or formats. A source knows nothing of pauses, queues, retries or the database.
`fetch` is awaited in the only task that sends requests. `read` runs in a worker thread (or process) and may take long.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar

import attrs

from dataloader.jobs.secrets.masking import mask, mask_text
from dataloader.jobs.text import storable_text


def _masked_repr(value: object) -> str:
    """Return a value for a `repr`, with secrets masked: a request's `repr` is written to logs and errors."""
    return repr(mask(value))


def _sample_of_text(text: str) -> str:
    return storable_text(mask_text(text[:SAMPLE]))


SAMPLE: Final = 200
"""Characters that are kept of a broken part."""

LIST_S: Final = 60.0
"""Seconds for a list outside of runs."""

T = TypeVar("T")

Param = str | int | float | bool
"""Value of a parameter: valid in JSON and in a query."""

Record = Mapping[str, Any]
"""One raw record of the source: an object of a JSON list, a row of a CSV file, an element of an XML document."""


@attrs.frozen
class Window:
    """Half-open time span [start, end) that a segment loads. Both ends are open for a load without windows.

    Args:
        start: first timestamp, with a time zone; None without a bound.
        end: first timestamp after it, with a time zone; None without a bound.
    """

    start: datetime | None = None
    end: datetime | None = None

    def __str__(self) -> str:
        if self.start is None and self.end is None:
            return "everything"
        start, end = (
            "…" if instant is None else f"{instant:%Y-%m-%dT%H:%M:%S%z}" for instant in (self.start, self.end)
        )
        return f"{start} to {end}"


@attrs.frozen(kw_only=True)
class Request:
    """One request to a source, with all data to send it again, so that a failed one can be stored as JSON.

    Args:
        endpoint: a URL, a path, or an object's name. Only the address of a next page has its query, which is sent
            unchanged.
        params: the query; a list if a name occurs several times. Without secrets, which the source adds when it sends.
        method: GET or POST.
        body: value that is sent as JSON.
        key: the single requested thing (the ID of a detail, the member of an archive), if it is one.
        page: number of the page in a walk, from 1.
        mark: memory of the walk about earlier pages, to detect repeated ones.
        total: number of records in the walk, if an earlier page had it.
        segment: for a retried request, the segment in which it failed first.
    """

    endpoint: str = attrs.field(repr=_masked_repr)
    params: Mapping[str, Param | Sequence[Param]] = attrs.field(factory=dict, repr=_masked_repr)
    method: str = "GET"
    body: Any = attrs.field(default=None, repr=_masked_repr)
    key: str = ""
    page: int = 1
    mark: str = attrs.field(default="", repr=False)
    total: int | None = attrs.field(default=None, repr=False)
    segment: str = attrs.field(default="", repr=False)


@attrs.frozen(kw_only=True)
class Response:
    """Complete response.

    Args:
        request: the request that was sent.
        url: its address after redirects.
        status: HTTP status; 200 for sources other than HTTP.
        headers: headers, with names in lower case; empty for sources other than HTTP.
        body: the whole body, unpacked.
        took_s: seconds from sending to the last byte.
    """

    request: Request
    url: str = attrs.field(repr=_masked_repr)
    status: int
    headers: Mapping[str, str] = attrs.field(repr=_masked_repr)
    body: bytes = attrs.field(repr=False)
    took_s: float


@attrs.frozen
class Broken:
    """Part of a response that is not a record, while the rest is valid. It is counted and reported.

    `key` names the part (`row 12`), `error` is its error, and `sample` its beginning, without secrets.
    """

    key: str = attrs.field(converter=storable_text)
    error: str = attrs.field(converter=storable_text)
    sample: str = attrs.field(default="", converter=_sample_of_text)


@attrs.frozen(kw_only=True)
class Page:
    """Content of a response.

    Args:
        records: the records in order. They are iterated once, in a thread. If they are read only during the iteration,
            it may raise `SourceError`, and the broken parts are known when it has ended.
        broken: parts that are not records.
        following: the request for the next page; None at the end.
    """

    records: Iterable[Record] = attrs.field(repr=False)
    broken: list[Broken] = attrs.field(factory=list)
    following: Request | None = None


class SourceError(Exception):
    """A request failed.

    `is_retryable`: another try may help (a timeout, 429, 5xx, a truncated body). `retry_after_s`: seconds for which the
    source asks for no request. `status`: HTTP status, if there was one. `ends_walk`: later pages of the walk would fail
    as well and are not requested.
    """

    def __init__(
        self,
        message: str,
        *,
        is_retryable: bool,
        retry_after_s: float | None = None,
        status: int | None = None,
        ends_walk: bool = False,
    ) -> None:
        super().__init__(message)
        self.is_retryable = is_retryable
        self.retry_after_s = retry_after_s
        self.status = status
        self.ends_walk = ends_walk


class SourceConnection(Protocol):
    """Open source: clients and sessions, for the duration of a run."""

    async def fetch(self, request: Request, *, timeout_s: float) -> Response:
        """Send the request once and return the complete response within `timeout_s` seconds.

        Raises `SourceError`. After a valid response, `Source.hint_s` returns the seconds for which the source asks for
        no request.
        """


class AskForList(Protocol):
    """Sends a request that lists the objects to fetch. A run uses a request slot for it and counts it."""

    async def __call__(self, source: Source, endpoint: str, ask: Callable[[float], Awaitable[T]]) -> T:
        """Call `ask` with its timeout in seconds; return its result. The log shows `endpoint`.

        Raises `SourceError` if `ask` failed for good.
        """


async def ask_at_once(source: Source, endpoint: str, ask: Callable[[float], Awaitable[T]]) -> T:
    """Call `ask` once, without a request slot, for use outside of runs. Raises the errors of `ask`."""
    del source, endpoint
    return await ask(LIST_S)


class Source(Protocol):
    """Source of records. A user's source inherits defaults for the methods that it does not define."""

    @property
    def name(self) -> str | None:
        """Return the supplier's name. Requests to it are sent one at a time, across all processes. None: no limit."""
        return None

    @property
    def needs_answer(self) -> bool:
        """Return True if `read` must run to know the next request, or whether this one must be sent again."""
        return False

    @property
    def walks_are_segments(self) -> bool:
        """Return True if each walk is a segment, committed separately, such as a file; otherwise each window is one."""
        return False

    def window(self, request: Request) -> Window | None:
        """Return the window of a request's records, if walks are segments; None if the request has none."""
        del request
        return None

    def hide(self, text: str) -> str:
        """Return a text without the source's secrets, for storage and display."""
        return mask_text(text)

    def open(self) -> AbstractAsyncContextManager[SourceConnection]:
        """Open the source for a run."""

    def requests(self, window: Window) -> AsyncGenerator[Request, None]:
        """Yield the first request of each walk of the window. A source of files yields one for each file.

        If walks are segments, it is called once in a run, with the span of all its windows.

        The caller must close it (`contextlib.aclosing`). It may raise `SourceError`, for example if a folder cannot be
        listed.
        """

    def listed(self, window: Window, ask: AskForList) -> AsyncGenerator[Request, None]:
        """Yield requests as `requests` does, in a run. Requests to list them, as for a bucket, are sent by `ask`."""
        del ask
        return self.requests(window)

    def redirected(self, response: Response) -> Request | None:
        """Return the request to send instead if the response is a redirect.

        It waits for a request slot like any other. Raises `SourceError` if it may not be sent.
        """
        del response
        return None

    def read(self, response: Response) -> Page:
        """Read the response, in a thread. Raises `SourceError` if it is unreadable or reports a failed request."""

    def for_reading(self) -> Source:
        """Return the source for `read` in another process, with `Load(processes=True)`. It must support pickle.

        By default the source itself.
        """
        return self

    def after_failure(self, request: Request) -> Request | None:
        """Return the next request of the walk after this one has failed; None at the end of the walk.

        Also None if the next request is unknown: a page that may not exist is never requested.
        """
        del request
        return None

    def hint_s(self, response: Response) -> float:
        """Return the seconds for which the source asks for no request after this response; 0 if it does not say."""
        del response
        return 0.0
