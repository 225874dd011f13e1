"""The part of a declared task that enqueueing needs, so that a job handle does not depend on the task registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from dataloader.jobs.args import ArgsType

A = TypeVar("A")


class DeclaredTask(Protocol[A]):
    """A task as returned by `Tasks.task`."""

    @property
    def name(self) -> str:
        """Name of the task."""

    @property
    def args(self) -> ArgsType[A] | None:
        """Type of its jobs' arguments; None if they are a dictionary."""

    @property
    def check(self) -> Callable[[Mapping[str, Any]], object] | None:
        """Raise `BadRequest` for arguments that the task refuses, if `args` is None."""
