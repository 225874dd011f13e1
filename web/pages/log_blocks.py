"""Log of a run on its page: the lines of one block, and the whole log as text.

Lines are masked as everywhere. A search matches only the displayed text: a match in a hidden value does not count,
since searches would otherwise reveal secrets.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from datetime import UTC
from typing import Any, Final
from uuid import UUID

import attrs
import trio

from dataloader.jobs.listings import Level, LogLine
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.connection.bridge import Database
from dataloader.store.etl.run_logs import MAX_LINES, LinePage, LinesWanted, read_lines
from dataloader.store.etl.run_views import RunView
from dataloader.web.pages.formats import inert

OWN: Final = 0
"""Number of the block with the lines of no task: beginnings and ends of attempts, and lines of the job itself."""
MOST_TEXT: Final = 16 << 20
"""Maximum number of characters of a log as text; the rest is left out, and the last line says so."""
_AT_ONCE: Final = 100
"""Lines that are masked before other tasks may run."""


@attrs.frozen(kw_only=True)
class LogFilter:
    """Filter of lines: of these tasks (all if none is named), of at least this level, with this text."""

    tasks: Sequence[str] = ()
    level: Level | None = None
    text: str | None = None


@attrs.frozen
class ShownLine:
    """Displayed line. `task`: its task, None for the run's own; `said`: its fields, `name=value`."""

    line: LogLine
    task: str | None
    said: str


@attrs.frozen
class BlockOfLines:
    """Lines of a block. `number`: the task's, `OWN`, or None for all lines. `begins`: the event after which it begins.

    `behind`: the event after which the next lines come; `is_more`: whether there are more now.
    """

    number: int | None
    lines: list[ShownLine]
    begins: int
    behind: int
    is_more: bool


async def read_block(
    database: Database, run_id: UUID, wanted: LogFilter, number: int | None, behind: int
) -> BlockOfLines:
    """Return the next lines of a block."""
    lines: list[ShownLine] = []
    at = behind
    while True:
        page = await read_lines(database, run_id, _lines_wanted(wanted, number), after=at, limit=MAX_LINES)
        lines += await _matching_lines(page, wanted)
        # The end of a search's page depends only on displayed lines, so that it confirms no guess about a secret.
        if page.after is None or len(page.lines) < MAX_LINES or len(lines) >= MAX_LINES:
            break
        at = page.after
    if len(lines) >= MAX_LINES and (page.after is not None or len(lines) > MAX_LINES):
        lines = lines[:MAX_LINES]
        return BlockOfLines(number, lines, behind, lines[-1].line.event_id, is_more=True)
    if page.after is not None:
        return BlockOfLines(number, lines, behind, page.after, is_more=True)
    last = max((one.line.event_id for one in lines), default=behind)
    return BlockOfLines(number, lines, behind, last, is_more=False)


def _lines_wanted(wanted: LogFilter, number: int | None) -> LinesWanted:
    either = LinesWanted(level=wanted.level, text=wanted.text)
    if number is None:
        return attrs.evolve(either, tasks=list(wanted.tasks), own=False) if wanted.tasks else either
    return attrs.evolve(either, tasks=[]) if number == OWN else attrs.evolve(either, task=number)


async def _matching_lines(page: LinePage, wanted: LogFilter) -> list[ShownLine]:
    found = []
    for number, line in enumerate(page.lines, 1):
        one = _shown_line(line)
        if wanted.text is None or wanted.text.casefold() in f"{one.line.message} {one.said}".casefold():
            found.append(one)
        if number % _AT_ONCE == 0:
            await trio.lowlevel.checkpoint()
    return found


def _shown_line(line: LogLine) -> ShownLine:
    shown = masked(line)
    fields = dict(shown.fields)
    load = fields.pop("load", None) if line.kind == "log" else None
    return ShownLine(
        shown, load if isinstance(load, str) else None, " ".join(_field_text(*one) for one in fields.items())
    )


def _field_text(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return f"{name}={text}"


async def log_as_text(database: Database, run: RunView, wanted: LogFilter, *, by_task: bool) -> bytes:
    """Return the log as text: a paragraph for each task, in order, or all lines in order, each with its task."""
    texts = [f"# {_on_one_line(masked(run).name)}, run {run.run_id}: {run.status}\n"]
    length = 0
    parts = _by_task(run, wanted) if by_task else [("", None)]
    for title, number in parts:
        if title:
            texts.append(f"\n## {_on_one_line(title)}\n")
        async for line in _lines(database, run, wanted, number):
            text = _line_as_text(line, with_task=number is None)
            length += len(text)
            if length > MOST_TEXT:
                texts.append("… the log is cut here: download single tasks\n")
                return "".join(texts).encode()
            texts.append(text)
    return "".join(texts).encode()


def _by_task(run: RunView, wanted: LogFilter) -> list[tuple[str, int | None]]:
    tasks = [task for task in run.tasks if not wanted.tasks or task.task in wanted.tasks]
    own: list[tuple[str, int | None]] = [] if wanted.tasks else [("Run", OWN)]
    return [*own, *((f"{task.ordinal} {masked(task).task}: {task.status}", task.ordinal) for task in tasks)]


async def _lines(database: Database, run: RunView, wanted: LogFilter, number: int | None) -> AsyncIterator[ShownLine]:
    behind, is_more = 0, True
    while is_more:
        block = await read_block(database, run.run_id, wanted, number, behind)
        for line in block.lines:
            yield line
        behind, is_more = block.behind, block.is_more


def _line_as_text(one: ShownLine, *, with_task: bool) -> str:
    """Return a line as one line, whatever its content."""
    at = one.line.ts.astimezone(UTC).isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")
    task = f"[{one.task or 'run'}] " if with_task else ""
    text = _on_one_line(f"{task}{one.line.message} {one.said}".rstrip())
    return f"{at} {one.line.level or '-':7} {text}\n"


def _on_one_line(text: str) -> str:
    said: str = inert(text.replace("\r", "\\r").replace("\n", "\\n").replace("\t", " "))
    return said
