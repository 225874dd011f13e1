"""Options of a task's declaration, and the task that they make."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from dataloader.jobs.args import ArgsType
from dataloader.jobs.handler_check import check_handler
from dataloader.jobs.limits import LimitOptions, TaskLimits
from dataloader.jobs.retry import RetryPolicy
from dataloader.jobs.task import Task
from dataloader.jobs.unique import Duplicates, uniqueness_of


class TaskOptions(LimitOptions, total=False):
    """Options of `Tasks.task`, besides the name and the type of args; `Task` and `Uniqueness` describe them."""

    retry: RetryPolicy
    timeout_s: float | None
    queue: str | None
    priority: int | None
    lock_key: str | Sequence[str] | None
    max_attempts: int | None
    lease_ttl_sec: int | None
    unique: bool | str | Sequence[str]
    duplicates: Duplicates | None
    keep_time: bool
    when_running: Literal["cancel"] | None
    after_error: Literal["delay"] | None
    asyncio: bool
    process: bool
    dask: str | Literal[True] | None
    memory_mb: int | None
    max_jobs: int


_OF_UNIQUENESS: Final = ("duplicates", "keep_time", "when_running", "after_error")


def check_options(options: TaskOptions) -> None:
    """Raise `TypeError`, which names similar options, for an option that does not exist."""
    unknown = options.keys() - TaskOptions.__annotations__.keys()
    if unknown:
        name, known = min(unknown), sorted({"args", *TaskOptions.__annotations__})
        close = difflib.get_close_matches(name, known)
        hint = f"did you mean {' or '.join(close)}?" if close else ", ".join(known)
        raise TypeError(f"unknown option {name!r}; {hint}")


def task_of(name: str, handler: Callable[..., Any], args: type[Any] | None, options: TaskOptions) -> Task[Any]:
    """Return the task of a function. Raises `ValueError` for values and functions that are not allowed."""
    given: dict[str, Any] = dict(options)
    is_async = inspect.iscoroutinefunction(handler)
    if given.get("asyncio") and not is_async:
        raise ValueError("asyncio=True needs an async function; plain functions run in a thread")
    check_handler(handler)
    key = given.pop("lock_key", None)
    unique = uniqueness_of(given.pop("unique", False), **{one: given.pop(one, None) for one in _OF_UNIQUENESS})
    limits = {one: given.pop(one) for one in LimitOptions.__annotations__ if one in given}
    return Task(
        name=name,
        handler=handler,
        is_async=is_async,
        args=None if args is None else ArgsType(args),
        lock_key=key if key is None or isinstance(key, str) else tuple(key),
        unique=unique,
        limits=TaskLimits(**limits),
        description=(inspect.getdoc(handler) or "").partition("\n")[0],
        **given,
    )
