"""What a pipeline asks of a source: which requests a window takes, how one is answered, what an answer holds.

The pipeline knows nothing of HTTP, files or formats; a source knows nothing of pauses, queues, retries or the
database. `fetch` is awaited in the one task that sends requests; `read` runs in a worker thread (or process) and may
take its time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import attrs

from dataloader.jobs.secrets.masking import mask, mask_text


def _shown(value: object) -> str:
    """A value as a `repr` may show it: what is in a request goes to logs and error texts (Q16)."""
    return repr(mask(value))


def _sample(text: str) -> str:
    return mask_text(text[:SAMPLE])


SAMPLE: Final = 200
"""How many characters of something broken are kept."""

LIST_S: Final = 60.0
"""Seconds for a list outside of runs."""

T = TypeVar("T")

Param = str | int | float | bool
"""What a parameter of a request may be: what JSON and a query can both hold."""

Record = Mapping[str, Any]
"""One raw record as the source has it: an object of a JSON list, a row of a CSV file, an element of an XML document."""


@attrs.frozen
class Window:
    """The half-open span of time [start, end) that a segment loads; a source without windows gets one that is open.

    Instants have a time zone. None is open: since ever, or for ever.
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
    """One thing to ask of a source; all that is needed to ask it again, so that a failed one can be kept as JSON.

    `endpoint` is a URL without its query, a path, or an object's name. `params` are the query, a list where a name
    comes several times; no secrets, which a source adds when it sends. `key` names what is asked for where that is one
    thing (the id of a detail, the member of an archive). `page` counts from 1 within a walk over pages. `mark` is what
    the walk remembers of an earlier page, to notice that it goes in a circle; `total` is how many records the walk has,
    where an earlier page has told. `segment` is the one in which it failed, of a request that is tried again.
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
    """An answer that has come in whole. `url` is where it came from in the end; `took_s` from sending to the last byte.

    `headers` have names in lower case. What is not HTTP has status 200 and no headers.
    """

    request: Request
    url: str = attrs.field(repr=_shown)
    status: int
    headers: Mapping[str, str] = attrs.field(repr=_shown)
    body: bytes = attrs.field(repr=False)
    took_s: float


@attrs.frozen
class Broken:
    """A part of an answer that is no record, while the rest is fine: counted and named, never passed over in silence.

    `key` says which one (`row 12`), `error` what is wrong with it, `sample` how it begins, without secrets.
    """

    key: str
    error: str
    sample: str = attrs.field(default="", converter=_sample)


@attrs.frozen(kw_only=True)
class Page:
    """What an answer holds: its records in order, what is broken, the request for the next page (None at the end).

    The records are gone through once, in a thread; if they are read as one goes, they may raise `SourceError`, and what
    is broken is known in the end.
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

    def __reduce__(self) -> tuple[Any, ...]:
        """As what `read` raises in a process comes out of it."""
        fields = {name: getattr(self, name) for name in ("is_retryable", "retry_after_s", "status", "ends_walk")}
        return partial(SourceError, **fields), self.args


class SourceConnection(Protocol):
    """A source that is open: clients and sessions, for the length of a run."""

    async def fetch(self, request: Request, *, timeout_s: float) -> Response:
        """Ask once, and have the whole answer within `timeout_s` seconds.

        Raises `SourceError`; how long a source wants to be left alone after an answer that is fine, `hint_s` tells.
        """


class AskForList(Protocol):
    """Sends a request for a list of what there is to fetch; a run takes a request slot for it, and counts it."""

    async def __call__(self, source: Source, endpoint: str, ask: Callable[[float], Awaitable[T]]) -> T:
        """The answer of `ask`, which is told how many seconds it has. `endpoint` is what the log says of it.

        Raises `SourceError` when `ask` has failed for good.
        """


async def ask_at_once(source: Source, endpoint: str, ask: Callable[[float], Awaitable[T]]) -> T:
    """Send it without a request slot, once: outside of runs. Raises what `ask` raises."""
    del source, endpoint
    return await ask(LIST_S)


class Source(Protocol):
    """Where records come from. A source of one's own inherits from it what it does not say itself."""

    @property
    def name(self) -> str | None:
        """The supplier's name: requests to one name go one at a time, over all processes. None: without a limit."""
        return None

    @property
    def needs_answer(self) -> bool:
        """True if what `read` says of one request decides on the next one, or on whether it must be asked again."""
        return False

    @property
    def walks_are_segments(self) -> bool:
        """True if what one request brings is committed by itself, as a file is; else a window is."""
        return False

    def window(self, request: Request) -> Window | None:
        """The window that a request's records belong to, where walks are segments; None if nothing tells of one."""
        del request
        return None

    def open(self) -> AbstractAsyncContextManager[SourceConnection]:
        """Open it for a run."""

    def requests(self, window: Window) -> AsyncGenerator[Request, None]:
        """The first request of each walk that the window takes, one after the other; a file source lists its files.

        Where walks are segments it is called once in a run, with the span of all its windows.

        Who iterates it closes it, too (`contextlib.aclosing`). Raises `SourceError` meanwhile, for example when a
        folder can't be listed.
        """

    def listed(self, window: Window, ask: AskForList) -> AsyncGenerator[Request, None]:
        """As `requests`, in a run. What has to be sent to learn of them, such as a bucket's list, is sent by `ask`."""
        del ask
        return self.requests(window)

    def redirected(self, response: Response) -> Request | None:
        """The request to send instead, if the answer says that what was asked for is elsewhere.

        It waits for a request slot as any other. Raises `SourceError` if it may not be sent.
        """
        del response
        return None

    def read(self, response: Response) -> Page:
        """What the answer holds, in a thread. Raises `SourceError` for what can't be read, or says that it failed."""

    def after_failure(self, request: Request) -> Request | None:
        """The next request of the walk when this one could not be answered; None, which ends it, if there is none.

        None, too, when that can't be known. A page that may not exist is never asked for.
        """
        del request
        return None

    def hint_s(self, response: Response) -> float:
        """How many seconds the source wants to be left alone after this answer, by its own words; 0 if it says none."""
        del response
        return 0.0
