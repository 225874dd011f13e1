"""Jobs of a filter as a file: NDJSON or CSV, newest first, in UTC, without secrets, sent while it is read."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from dataloader.jobs.args_pattern import ArgsPattern
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.model import JobRecord
from dataloader.jobs.secrets.record_masks import masked
from dataloader.web.pages.job_choice import JobChoice
from dataloader.web.pages.page_answers import PageAnswer, Stream
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit
from dataloader.web.problems import too_busy

pages: Final = PageRoutes()

_READ: Final = 200
_encode: Final = msgspec.json.Encoder().encode
_COLUMNS: Final = (
    "job_id", "status", "queue", "task", "lock_key", "partition_key", "priority", "attempt", "max_attempts",
    "created_at", "available_at", "started_at", "finished_at", "schedule", "producer", "claimed_by", "error", "args",
    "result",
)  # fmt: skip
# A spreadsheet treats a cell as a formula by its first sign; a Japanese one also by a full-width sign. If `;`, a tab or
# `|` separates cells (Excel in German or French), a cell also begins after these, even within quotes.
_FORMULA: Final = re.compile(r"""\A(?=[\t\r\n])|(?:\A|[;|\t\r\n])(?=[ "]{0,4}[=+@\uff1d\uff0b\uff0d\uff20-])""")
_MEDIA: Final = {"ndjson": "application/x-ndjson", "csv": "text/csv; charset=utf-8"}


class ExportQuery(JobChoice, kw_only=True):
    """Filter of jobs, and the kind of file."""

    format: Literal["ndjson", "csv"] = "ndjson"


@pages.show("/jobs/export", query=ExportQuery)
async def export_jobs(visit: Visit, query: ExportQuery) -> PageAnswer:
    """Send the jobs as a file. The first one is read before the answer begins, so that errors are still reported."""
    wanted = query.job_filter(visit.preferences.tz)
    pattern = None if query.args is None else ArgsPattern.parsed(query.args)
    if not visit.services.turns.files.may_have_one_more(visit.operator.name):
        raise too_busy("The server sends at most four files concurrently, and two per operator. Try again in a minute.")
    await visit.jobs.find(wanted, limit=1, after=query.after)
    name = f"jobs-{datetime.now(UTC):%Y%m%d-%H%M%SZ}.{query.format}"
    return Stream(_pieces(visit, query.format, wanted, pattern, query.after), _MEDIA[query.format], name)


async def _pieces(
    visit: Visit, kind: str, wanted: JobFilter, pattern: ArgsPattern | None, after: str | None
) -> AsyncGenerator[bytes]:
    turns, most = visit.services.turns, visit.services.http_limits.exported_jobs
    # If many requests begin at the same time, those over the limit wait here, with no jobs in memory.
    async with turns.files.place_of(visit.operator.name):
        if kind == "csv":
            yield _csv([_COLUMNS])  # noqa: ASYNC119 - the sender of the pieces closes them
        read = 0
        while True:
            # One part of one file at a time, so that many files use no more connections than one.
            async with turns.exports:
                page = await visit.jobs.find(wanted, limit=_READ, after=after)
            jobs, after = page.jobs[: most - read], page.next
            read += len(jobs)
            piece = await visit.in_thread(_piece, kind, jobs, pattern)
            del page, jobs
            if piece:
                yield piece  # noqa: ASYNC119 - as above
            if after is None or read >= most:
                return


def _piece(kind: str, jobs: Sequence[JobRecord], pattern: ArgsPattern | None) -> bytes:
    shown = [masked(job) for job in jobs if pattern is None or pattern.shows_in(job.args)]
    if kind == "ndjson":
        return b"".join(_encode(job) + b"\n" for job in shown)
    return _csv([[_cell(getattr(job, name)) for name in _COLUMNS] for job in shown])


def _csv(rows: Sequence[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerows(rows)
    return text.getvalue().encode()


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case datetime():
            return value.astimezone(UTC).isoformat() if value.year < 9999 else ""
        case dict() | list():
            text = _encode(value).decode()
        case _:
            text = str(value)
    return text if isinstance(value, int) else _FORMULA.sub(r"\g<0>'", text)
