"""The registry of tasks: names mapped to the user's functions and how to run them.

A user makes one `Tasks`, decorates functions, and names it on the command line (`--tasks my_module:tasks`). Several
registries of a large program are joined with `include`. It is an object that is passed along, not a global, so that
tests and embedded supervisors can hold several.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import attrs

from dataloader.jobs.model import MAX_ATTEMPTS, MAX_LEASE_S, MAX_NAME, MIN_LEASE_S, check_name
from dataloader.jobs.retry import RetryPolicy

H = TypeVar("H", bound=Callable[..., Any])

DEFAULT_RETRY: Final = RetryPolicy()


@attrs.frozen(kw_only=True)
class Task:
    """One kind of job: what to call and how.

    `timeout_s` bounds one run (None: only the lease's renewal does). `max_attempts` and `lease_ttl_sec` serve requests
    that name none. `is_async` tells a Trio function from a plain one, which runs in a thread.
    """

    name: str
    handler: Callable[..., Any]
    is_async: bool
    retry: RetryPolicy = DEFAULT_RETRY
    timeout_s: float | None = None
    max_attempts: int | None = None
    lease_ttl_sec: int | None = None
    description: str = ""


class Tasks(Mapping[str, Task]):
    """The tasks a process knows, by name."""

    def __init__(self) -> None:
        """An empty registry."""
        self._tasks: dict[str, Task] = {}

    def task(
        self,
        name: str,
        *,
        retry: RetryPolicy = DEFAULT_RETRY,
        timeout_s: float | None = None,
        max_attempts: int | None = None,
        lease_ttl_sec: int | None = None,
    ) -> Callable[[H], H]:
        """Register the decorated function as `name` and give it back unchanged.

        An async function is called with a `Job`, a plain one, in a thread of its own, with a `ThreadJob`.
        Raises `ValueError` for a name that is taken or that the queue can't carry, and for settings out of range.
        """
        check_name("task", name, MAX_NAME)
        if name in self._tasks:
            message = f"task {name!r} is registered twice: {self._tasks[name].handler!r} has the name already"
            raise ValueError(message)
        if timeout_s is not None and not timeout_s > 0:
            message = f"task {name!r}: timeout_s must be a number of seconds greater than 0, not {timeout_s!r}"
            raise ValueError(message)
        if max_attempts is not None and not 1 <= max_attempts <= MAX_ATTEMPTS:
            message = f"task {name!r}: max_attempts must be an integer from 1 to {MAX_ATTEMPTS:,}, not {max_attempts!r}"
            raise ValueError(message)
        if lease_ttl_sec is not None and not MIN_LEASE_S <= lease_ttl_sec <= MAX_LEASE_S:
            allowed = f"an integer from {MIN_LEASE_S} to {MAX_LEASE_S:,}"
            message = f"task {name!r}: lease_ttl_sec must be {allowed}, not {lease_ttl_sec!r}"
            raise ValueError(message)

        def register(handler: H) -> H:
            self._tasks[name] = Task(
                name=name,
                handler=handler,
                is_async=inspect.iscoroutinefunction(handler),
                retry=retry,
                timeout_s=timeout_s,
                max_attempts=max_attempts,
                lease_ttl_sec=lease_ttl_sec,
                description=(inspect.getdoc(handler) or "").partition("\n")[0],
            )
            return handler

        return register

    def include(self, other: Tasks) -> None:
        """Take over every task of `other`. Raises `ValueError` when a name is in both."""
        both = self._tasks.keys() & other._tasks.keys()
        if both:
            message = f"tasks registered in both registries: {', '.join(sorted(both))}"
            raise ValueError(message)
        self._tasks.update(other._tasks)

    def __getitem__(self, name: str) -> Task:
        """The task called `name`; `KeyError` when there is none."""
        return self._tasks[name]

    def __iter__(self) -> Iterator[str]:
        """The names, in order of registration."""
        return iter(self._tasks)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._tasks)
