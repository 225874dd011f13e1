"""Settings of tasks for their jobs, stored in the database, so that they apply to every way of adding a job.

Each process writes them when it starts, and the last one wins; the statement that adds jobs reads them (enqueue.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from dataloader.jobs.args import ArgsType
from dataloader.jobs.model import MAX_NAME, check_text
from dataloader.jobs.task import Task
from dataloader.jobs.task_listings import TaskNotFound, TaskRecord
from dataloader.jobs.text import shown_json
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.command_tag import row_count
from dataloader.store.connection.fetching import aio_fetchrow
from dataloader.store.limits.limit_rows import TELL

LAYOUT: Final = 3
"""Increases with each setting that rows get: a program does not change rows of a larger layout."""

_COLUMNS: Final = {
    "queue": "text",
    "priority": "int",
    "lock_key": "jsonb",
    "max_attempts": "int",
    "lease_ttl_sec": "int",
    "uniqueness": "jsonb",
    "description": "text",
    "args_schema": "jsonb",
    "first_stage": "text",
}


def _list(form: str, *more: str) -> str:
    return ", ".join([*map(form.format, _COLUMNS), *more])


_ATTEMPTS: Final = "coalesce((t.override ->> 'max_attempts')::int, excluded.max_attempts)"
"""A number set by an operator survives a deploy."""
# All sessions write in one order, so that processes that start together do not deadlock. JSON is passed as text.
_DECLARE: Final = f"""
INSERT INTO dl_tasks AS t (task, {_list("{}")}, layout, declared_by)
SELECT d.task, {", ".join(f"d.{name}::{kind}" for name, kind in _COLUMNS.items())}, $1, $2
FROM unnest($3::text[], {", ".join(f"${n}::{kind.replace('jsonb', 'text')}[]" for n, kind in enumerate(_COLUMNS.values(), 4))})
  AS d (task, {_list("{}")})
ORDER BY d.task
ON CONFLICT (task) DO UPDATE SET
  {_list("{0} = excluded.{0}", "layout = excluded.layout").replace("= excluded.max_attempts", f"= {_ATTEMPTS}")},
  declared_by = excluded.declared_by, declared_at = now()
WHERE t.layout <= excluded.layout
  AND ({_list("t.{}", "t.layout")}) IS DISTINCT FROM
      ({_list("excluded.{}", "excluded.layout").replace("excluded.max_attempts", _ATTEMPTS)})
"""  # noqa: E501 - one line a part

_SHOWN: Final = ("args_schema", "uniqueness")
_ONE: Final = """
SELECT task, description, queue, priority, args_schema::text AS args_schema, uniqueness::text AS uniqueness,
       declared_by, declared_at
FROM dl_tasks WHERE task = $1
"""


async def aio_declare(connection: Any, tasks: Iterable[Task[Any]], worker: str) -> None:
    """Write the settings of the tasks of `worker` for their jobs (asyncio-flavored). Only changes are written."""
    rows = [
        (
            task.name,
            task.queue,
            task.priority,
            _encoded_or_none(task.lock_key),
            task.max_attempts,
            task.lease_ttl_sec,
            _encoded_or_none(None if task.unique is None else task.unique.settings()),
            task.description or None,
            _encoded_or_none(None if task.args is None else _schema(task.args)),
            task.stages.first_task if task.stages is not None and task.stages.name == task.name else None,
        )
        for task in tasks
    ]
    columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * (len(_COLUMNS) + 1)
    if row_count(await connection.execute(_DECLARE, LAYOUT, worker, *columns)):
        await connection.execute(TELL)  # other processes may have removed from memory a task that an operator removed


def _schema(args: ArgsType[Any]) -> dict[str, Any]:
    whole, parts = args.schema()
    return whole | ({"$defs": parts} if parts else {})


async def get_task(database: Database, name: str) -> TaskRecord:
    """Return the declaration of a task. Raises `TaskNotFound`, and `BadRequest` if the name is not a valid text."""
    check_text("task", name, MAX_NAME)
    record = await database.run(aio_fetchrow, _ONE, name)
    if record is None:
        raise TaskNotFound(f"no process has declared a task {name!r:.200}")
    return TaskRecord(**dict(record) | {key: shown_json(record[key]) if record[key] else None for key in _SHOWN})


def _encoded_or_none(value: object) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()
