"""A job's life as one bar: the time in the queue, each attempt by its outcome, and the delays between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import attrs

from dataloader.jobs.model import JobRecord
from dataloader.store.queue.attempts import Attempt
from dataloader.web.pages.formats import duration, inert

_SHOWN: Final = 40
"""Maximum number of attempts in the bar, the latest ones."""
_SHORTEST: Final = timedelta(seconds=1)
"""A shorter time between the last attempt and the end is not shown."""
_LEAST: Final = 0.006
"""Minimum width of a part, as a fraction of the bar."""
_KINDS: Final = {
    "succeeded": "ok",
    "moved to the next stage": "ok",
    "failed": "bad",
    "lost": "bad",
    "worker lost": "bad",
}
"""Colors of an attempt by its outcome; others, such as a release, are amber."""


@attrs.frozen
class LifePart:
    """Part of the bar: its color, place and width as fractions, text within it, label, and start."""

    kind: str
    at: float
    width: float
    text: str
    label: str
    since: datetime


def timeline_of(job: JobRecord, attempts: Sequence[Attempt], *, is_whole: bool) -> list[LifePart]:
    """Return the parts of a job's bar, from its creation, or from the first of the latest attempts, until its end."""
    try:
        spans = list(_spans(job, attempts[-_SHOWN:], is_whole=is_whole and len(attempts) <= _SHOWN))
    except OverflowError:  # a timestamp at the limits of time, by another service
        return []
    whole = sum((until - since for _, _, since, until in spans), timedelta())
    if whole <= timedelta() or (job.status.is_final and not attempts):
        return []
    widths = [max(_LEAST, (until - since) / whole) for _, _, since, until in spans]
    scale, at = 1 / sum(widths), 0.0
    parts: list[LifePart] = []
    for (kind, name, since, until), width in zip(spans, widths, strict=True):
        took = duration(until - since)
        text = f"{name}, {took}" if width * scale > 0.2 else name if width * scale > 0.1 else ""
        parts.append(LifePart(kind, at, width * scale, text, f"{name} {took}", since))
        at += width * scale
    return parts


def _spans(
    job: JobRecord, attempts: Sequence[Attempt], *, is_whole: bool
) -> Iterator[tuple[str, str, datetime, datetime]]:
    now = _stepped(job.created_at, datetime.now(UTC))
    before = job.created_at if is_whole else None
    for number, one in enumerate(attempts, 1):
        if one.began is None:
            continue
        if before is not None and one.began > before:
            previous = attempts[number - 2] if number > 1 else None
            yield from _spans_without_attempt(before, one.began, None if previous is None else previous.next_at)
        ended = one.ended or (job.finished_at if job.status.is_final else None) or max(now, one.began)
        kind = "run" if one.outcome == "running" and not job.status.is_final else _KINDS.get(one.outcome, "warn")
        yield kind, inert(f"{one.number or number} {one.outcome}"), one.began, max(ended, one.began)
        before = ended
    if before is not None and not (attempts and attempts[-1].ended is None):
        end = job.finished_at or now
        if end - before > _SHORTEST:
            yield from _spans_without_attempt(before, end, attempts[-1].next_at if attempts else job.available_at)


def _spans_without_attempt(
    since: datetime, until: datetime, due: datetime | None
) -> Iterator[tuple[str, str, datetime, datetime]]:
    """Return a time without an attempt: the delay until the job was due, and then the queue."""
    if due is not None and due > since:
        yield "delay", "delay", since, min(due, until)
        since = min(due, until)
    if until > since:
        yield "idle", "queued", since, until


def _stepped(since: datetime, now: datetime) -> datetime:
    """Return the present in steps that grow with the age, so that most refreshes of a page find no change."""
    past_s = max(1.0, (now - since).total_seconds())
    step_s = 2 ** max(0, int(past_s / 64).bit_length())
    return since + timedelta(seconds=past_s // step_s * step_s)
