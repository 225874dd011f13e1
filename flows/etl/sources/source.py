"""The contract of a source: the requests for a window, the answer to a request, the records of an answer.

The pipeline knows nothing of HTTP, files or formats; a source knows nothing of pauses, queues, retries or the
database. `fetch` is awaited in the one task that sends requests; `read` runs in a worker thread (or process) and may
take its time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar

import attrs

from dataloader.jobs.secrets.masking import mask, mask_text
from dataloader.jobs.text import storable_text


def _shown(value: object) -> str:
    """A value for a `repr`, with secrets masked: a request's `repr` goes to logs and error texts (Q16)."""
    return repr(mask(value))


def _sample(text: str) -> str:
    return storable_text(mask_text(text[:SAMPLE]))


SAMPLE: Final = 200
"""How many characters of a broken part are kept."""

LIST_S: Final = 60.0
"""Seconds for a list outside of runs."""

T = TypeVar("T")

Param = str | int | float | bool
"""A parameter's value: JSON and a query can both hold it."""

Record = Mapping[str, Any]
"""One raw record as the source has it: an object of a JSON list, a row of a CSV file, an element of an XML document."""


@attrs.frozen
class Window:
    """The half-open span of time [start, end) that a segment loads; both ends are open for a load without windows.

    Instants have a time zone. None means without a bound.
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
    """One request to a source, with all that is needed to send it again, so that a failed one can be kept as JSON.

    endpoint: a URL, a path, or an object's name. Only the address of a next page has its query, which is sent as it is.
    params: the query; a list where a name occurs several times. No secrets: the source adds them when it sends.
    key: the single thing that is requested (the id of a detail, the member of an archive), if it is one.
    page: its number, from 1, within a walk over pages.
    mark: what the walk remembers of earlier pages, to notice that they come again.
    total: how many records the walk has, if an earlier page has said so.
    segment: for a retried request, the segment in which it failed first.
    """

    endpoint: str = attrs.field(repr=_shown)
    params: Mapping[str, Param | Sequence[Param]] = attrs.field(factory=dict, repr=_shown)
    method: str = "GET"
    body: Any = attrs.field(default=None, repr=_shown)
    key: str = ""
    page: int = 1
    mark: str = attrs.field(default="", repr=False)
    total: int | None = attrs.field(default=None, repr=False)
    segment: str = attrs.field(default="", repr=False)


@attrs.frozen(kw_only=True)
class Response:
    """A complete answer. `url` is where it came from, after redirects; `took_s` the time from sending to the last byte.

    `headers` have names in lower case. Sources other than HTTP give status 200 and no headers.
    """

    request: Request
    url: str = attrs.field(repr=_shown)
    status: int
    headers: Mapping[str, str] = attrs.field(repr=_shown)
    body: bytes = attrs.field(repr=False)
    took_s: float


@attrs.frozen
class Broken:
    """A part of an answer that is not a record, although the rest is valid. It is counted and reported.

    `key` says which part (`row 12`), `error` what is wrong with it, `sample` how it begins, without secrets.
    """

    key: str = attrs.field(converter=storable_text)
    error: str = attrs.field(converter=storable_text)
    sample: str = attrs.field(default="", converter=_sample)


@attrs.frozen(kw_only=True)
class Page:
    """What an answer holds: its records in order, what is broken, the request for the next page (None at the end).

    The records are iterated once, in a thread. If they are read only then, the iteration may raise `SourceError`, and
    the broken parts are known when it has ended.
    """

    records: Iterable[Record] = attrs.field(repr=False)
    broken: list[Broken] = attrs.field(factory=list)
    following: Request | None = None


class SourceError(Exception):
    """A request was not answered as it should.

    `is_retryable`: asking again may help (a timeout, 429, 5xx, a cut body). `retry_after_s`: how many seconds the
    source wants no request, as its answer says. `status`: the HTTP status, if there was one. `ends_walk`: later pages
    of the walk would fail as well, and are not requested.
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
    """A source that is open: clients and sessions, for the length of a run."""

    async def fetch(self, request: Request, *, timeout_s: float) -> Response:
        """Send the request once, and return the complete answer within `timeout_s` seconds.

        Raises `SourceError`. After a valid answer, `Source.hint_s` tells for how long the source wants no request.
        """


class AskForList(Protocol):
    """Sends a request for a list of what there is to fetch; a run takes a request slot for it, and counts it."""

    async def __call__(self, source: Source, endpoint: str, ask: Callable[[float], Awaitable[T]]) -> T:
        """Return the answer of `ask`, which is called with its timeout in seconds. The log shows `endpoint`.

        Raises `SourceError` when `ask` has failed for good.
        """


async def ask_at_once(source: Source, endpoint: str, ask: Callable[[float], Awaitable[T]]) -> T:
    """Call `ask` once, without a request slot; for use outside of runs. Raises what `ask` raises."""
    del source, endpoint
    return await ask(LIST_S)


class Source(Protocol):
    """Where records come from. A source of your own inherits defaults for what it does not define."""

    @property
    def name(self) -> str | None:
        """The supplier's name: requests to one name go one at a time, over all processes. None: without a limit."""
        return None

    @property
    def needs_answer(self) -> bool:
        """True if only `read` tells which request is the next one, or whether this one must be sent again."""
        return False

    @property
    def walks_are_segments(self) -> bool:
        """True if each walk is a segment, committed by itself, as a file is; otherwise each window is one."""
        return False

    def window(self, request: Request) -> Window | None:
        """The window of a request's records, if walks are segments; None if the request has none."""
        del request
        return None

    def hide(self, text: str) -> str:
        """Return a text without the source's secrets, as it may be kept and shown."""
        return mask_text(text)

    def open(self) -> AbstractAsyncContextManager[SourceConnection]:
        """Open it for a run."""

    def requests(self, window: Window) -> AsyncGenerator[Request, None]:
        """Yield the first request of each walk of the window; a source of files yields one for each file.

        If walks are segments, it is called once in a run, with the span of all its windows.

        The caller must close it (`contextlib.aclosing`). It may raise `SourceError`, for example when a folder can't be
        listed.
        """

    def listed(self, window: Window, ask: AskForList) -> AsyncGenerator[Request, None]:
        """As `requests`, in a run. Requests that are needed to list them, as for a bucket, are sent by `ask`."""
        del ask
        return self.requests(window)

    def redirected(self, response: Response) -> Request | None:
        """The request to send instead, if the answer is a redirect.

        It waits for a request slot like any other. Raises `SourceError` if it may not be sent.
        """
        del response
        return None

    def read(self, response: Response) -> Page:
        """Read the answer, in a thread. Raises `SourceError` if it can't be read, or says that the request failed."""

    def for_reading(self) -> Source:
        """What another process needs of it to `read`, with `Load(processes=True)`: it must be possible to pickle that.

        By default all of it.
        """
        return self

    def after_failure(self, request: Request) -> Request | None:
        """The next request of the walk after this one has failed; None, which ends the walk, at its end.

        Also None if the next one is not known: a page that may not exist is never requested.
        """
        del request
        return None

    def hint_s(self, response: Response) -> float:
        """For how many seconds the source wants no request after this answer; 0 if it does not say."""
        del response
        return 0.0
