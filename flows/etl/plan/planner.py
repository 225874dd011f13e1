"""Plans the segments of a run: new ones, those that its args name, or only earlier failures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, date, datetime
from functools import partial
from typing import Any, Final

import attrs
import trio

from dataloader.flows.etl.declare.load import Load
from dataloader.flows.etl.declare.pipeline_limits import LIMITS, PipelineLimits
from dataloader.flows.etl.declare.rows import Rows
from dataloader.flows.etl.plan.known_history import KnownHistory
from dataloader.flows.etl.plan.segment import OpenTable, Segment
from dataloader.flows.etl.sources.source import AskForList, Request, Window, ask_at_once
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.text import storable_text
from dataloader.store.etl.load_state import window_state

MAX_SEGMENT_NAME: Final = 1_500
"""Maximum bytes of a segment's name: an index stores at most 2,704 bytes of it, the run and the load."""
KEPT_OF_NAME: Final = 150
"""Characters that are kept at each end of a longer name."""

Kept = Mapping[int, Sequence[Mapping[str, Any]]]
"""Requests that are stored with failures, by the numbers of the failures."""


@attrs.frozen(kw_only=True)
class LoadArgs:
    """Args of a load's job: `from` and `to` instead of the new windows, and settings of the pipeline.

    With `failures`, the run only retries earlier failures: all (an empty tuple), or those with these numbers.
    """

    since: date | datetime | None = None
    until: date | datetime | None = None
    pipeline: Mapping[str, Any] = attrs.field(factory=dict)
    failures: tuple[int, ...] | None = None

    @property
    def is_span(self) -> bool:
        """Return whether the args name a time span."""
        return self.since is not None or self.until is not None


def read_args(args: Mapping[str, Any], limits: PipelineLimits = LIMITS) -> LoadArgs:
    """Return the args of a load's job. Raises `BadRequest` with the field, its value and the allowed values."""
    for name in args:
        if name not in {"from", "to", "pipeline", "failures"}:
            raise BadRequest(f"args.{name}", "must be one of from, to, pipeline, failures")
    pipeline = args.get("pipeline") or {}
    if not isinstance(pipeline, Mapping):
        raise BadRequest("args.pipeline", f"must be an object with settings such as rate_min, not {pipeline!r:.200}")
    failures = args.get("failures")
    if failures == "all":
        failures = ()
    elif failures is not None and (
        not isinstance(failures, list) or not failures or any(type(number) is not int for number in failures)
    ):
        raise BadRequest("args.failures", f'must be "all" or a list of failure numbers, not {failures!r:.80}')
    if failures is not None and (given := [name for name in ("from", "to") if args.get(name) is not None]):
        raise BadRequest(f"args.{given[0]}", "cannot be combined with failures, which are retried in all windows")
    if failures and len(failures) > (most := limits.most_retried):
        raise BadRequest("args.failures", f'must have at most {most:,} numbers, or be "all", not {len(failures):,}')
    return LoadArgs(
        since=_instant_of_args(args, "from"),
        until=_instant_of_args(args, "to"),
        pipeline=pipeline,
        failures=None if failures is None else tuple(failures),
    )


def _instant_of_args(args: Mapping[str, Any], name: str) -> date | datetime | None:
    text = args.get(name)
    if text is None:
        return None
    for kind in (date, datetime):
        try:
            return kind.fromisoformat(text)
        except (TypeError, ValueError):
            continue
    raise BadRequest(f"args.{name}", f"must be a date or a timestamp, such as 2026-01-31, not {text!r:.200}")


def refuse_span(load: Load, asked: LoadArgs) -> None:
    """Refuse `from` and `to` for a load without windows, which would load everything. Raises `BadRequest`."""
    if load.windows is None and asked.is_span:
        name, value = ("from", asked.since) if asked.since is not None else ("to", asked.until)
        is_function = isinstance(load.source, Rows)
        why = "and a function yields its rows" if is_function else "so each run loads everything"
        raise BadRequest(name, f"must be omitted, not {value}: {load.name} has no windows, {why}")


def windows_of(load: Load, asked: LoadArgs, *, watermark: datetime | None, now: datetime) -> list[Window]:
    """Return the windows from `watermark` to `now`, or the requested ones, in order; one window if the load has none.

    Raises `BadRequest` for a span that is empty or too long.
    """
    if load.windows is None:
        return [Window()]
    return load.windows.plan(watermark=watermark, now=now.astimezone(UTC), since=asked.since, until=asked.until)


def why_idle(load: Load, asked: LoadArgs, windows: Sequence[Window], watermark: datetime | None) -> str:
    """Return the reason why a run of these windows sends no request."""
    if isinstance(load.source, Rows):
        return f"the function of {load.name} yields the rows, and sends its own requests"
    if not windows:
        before = "now" if asked.until is None else str(asked.until)
        loaded = "the load's begin is later" if watermark is None else f"data before {watermark.isoformat()} is loaded"
        return f"there is nothing to load before {before}: {loaded}; set `from` to load a period again"
    span = Window(windows[0].start, windows[-1].end)
    return f"the source of {load.name} has nothing to request{'' if load.windows is None else f' for {span}'}"


async def new_segments(
    load: Load,
    windows: Sequence[Window],
    tables: list[OpenTable],
    ask: AskForList,
    *,
    watermark: datetime | None,
    known: KnownHistory | None = None,
) -> AsyncGenerator[Segment, None]:
    """Yield the segments of windows, in order. `ask` sends list requests. Everything before `watermark` is loaded."""
    if load.source.walks_are_segments:
        async with aclosing(single_walks(load, windows, ask, known)) as walks:
            async for window, request in walks:
                made = Segment(
                    name=name_of_walk(request),
                    window=window,
                    tables=tables,
                    requests=partial(_these, [request]),
                    is_dated=load.windows is None or load.source.window(request) is not None,
                )
                yield made  # noqa: ASYNC119 - load_run.py closes this generator as well
        return
    # Everything before the watermark is loaded, so a run that begins after the watermark must not move it.
    loaded_to = None if load.windows is None else watermark or load.windows.begin()
    moves = loaded_to is not None and all(one.start is not None and one.start <= loaded_to for one in windows[:1])
    for window in windows:
        yield Segment(
            name=str(window),
            window=window,
            tables=tables,
            requests=partial(load.source.listed, window, ask),
            state=window_state(window.end) if moves and window.end is not None else None,
            planned=len(windows),
        )


def name_of_walk(request: Request) -> str:
    """Return the name of a segment of a source whose walks are segments."""
    return segment_name(f"{request.endpoint} {request.key}".strip())


def segment_name(name: str) -> str:
    """Return `name` as an index can store it. A digest of the whole name replaces the middle of a long one."""
    stored = storable_text(name)
    if len(stored.encode()) <= MAX_SEGMENT_NAME:
        return stored
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return f"{stored[:KEPT_OF_NAME]}…{digest}…{stored[-KEPT_OF_NAME:]}"


async def single_walks(
    load: Load, windows: Sequence[Window], ask: AskForList = ask_at_once, known: KnownHistory | None = None
) -> AsyncGenerator[tuple[Window, Request], None]:
    """Yield the requests of a source whose walks are segments, such as files, each once and with its window.

    For a load with windows, they are in the order of their own windows, so that an older snapshot is first.

    Raises `BadRequest` if a request without its own window would become a snapshot that is older than the newest one of
    the table that is `known`.
    """
    if not windows:
        return
    span = Window(windows[0].start, windows[-1].end)
    async with aclosing(load.source.listed(span, ask)) as requests:
        if load.windows is None:
            async for request in requests:
                yield span, request  # noqa: ASYNC119 - the caller closes this generator
            return
        # A request without its own window is for the source's current content.
        by_now = windows[-1] if load.table.history is not None else span
        found = []
        async for request in requests:
            window = _window_within(span, load.source.window(request))
            if window is None and known is not None:
                known.check_undated(by_now, name_of_walk(request))
            found.append((window or by_now, request))
    for window, request in sorted(found, key=lambda walk: walk[0].start or _EVER):
        yield window, request


def _window_within(span: Window, own: Window | None) -> Window | None:
    """Return a file's own window, with open ends replaced by those of the run's span."""
    return own and Window(own.start or span.start, own.end or span.end)


_EVER: Final = datetime.min.replace(tzinfo=UTC)


def check_failures(asked: Sequence[int], kept: Kept) -> None:
    """Refuse the numbers of failures that cannot be retried. Raises `BadRequest`."""
    if unknown := [number for number in asked if number not in kept]:
        told = (
            f"the load has no unresolved failure {_listed(unknown)}; list its failures with `dataloader etl failures`"
        )
        raise BadRequest("args.failures", told)
    if whole := [number for number in asked if not kept[number]]:
        told = f"failure {_listed(whole)} is a whole segment, which cannot be retried alone; run the load again"
        raise BadRequest("args.failures", told)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


async def retried_segments(
    kept_behind: Callable[[int], Awaitable[Kept]], tables: list[OpenTable]
) -> AsyncGenerator[Segment, None]:
    """Yield segments of the requests that are stored with failures. `kept_behind` returns the next ones after a number.

    Each segment resolves its failures when it is committed, so that a resumed run finds only the remaining ones. Its
    name has the number of its first failure.
    """
    last = 0
    while kept := await kept_behind(last):
        last = max(kept)
        requests = await _kept_once(kept)
        yield Segment(
            name=f"failures from {min(kept)}",
            window=Window(),
            tables=tables,
            requests=partial(_these, requests["list"]),
            details=requests["detail"],
            retries=tuple(kept),
        )


async def _kept_once(kept: Kept) -> dict[str, list[Request]]:
    """Return the requests for lists and for details, each once: several records of one response may have failed."""
    once: dict[str, tuple[str, Request]] = {}
    fields = {field.name for field in attrs.fields(Request)}
    for requests in kept.values():
        # Each failure may have the requests of a whole batch.
        await trio.lowlevel.checkpoint()
        for request in requests:
            made = Request(**{name: value for name, value in request.items() if name in fields})
            same = {name: value for name, value in request.items() if name not in {"tried_by", "segment"}}
            once.setdefault(json.dumps(same, sort_keys=True), (request["of"], made))
    return {of: [request for whose, request in once.values() if whose == of] for of in ("list", "detail")}


async def _these(requests: Sequence[Request]) -> AsyncGenerator[Request, None]:
    for request in requests:
        yield request
