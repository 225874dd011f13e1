"""How operations find their implementations over the database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import attrs

from dataloader.jobs.contract import Operator
from dataloader.jobs.operations.operation import Operation
from dataloader.store.connection.bridge import Database

O = TypeVar("O", bound=Operation[Any])  # noqa: E741 - an operation
F = TypeVar("F")


@attrs.frozen(kw_only=True)
class Store:
    """What an implementation works with: the database, and the operator for the audit."""

    database: Database
    operator: Operator


IMPLEMENTATIONS: dict[type[Operation[Any]], Callable[[Store, Any], Awaitable[Any]]] = {}
"""The implementation of each operation."""


class implements(Generic[O]):  # noqa: N801 - a decorator
    """Declare the decorated function as the implementation of a kind of operations."""

    def __init__(self, kind: type[O]) -> None:
        """`kind` is the class of the operations."""
        self._kind = kind

    def __call__(self, function: Callable[[Store, O], Awaitable[F]]) -> Callable[[Store, O], Awaitable[F]]:
        """Register the function. Raises `ValueError` if the operation has one already."""
        if self._kind in IMPLEMENTATIONS:
            raise ValueError(f"{self._kind.__name__} has two implementations")
        IMPLEMENTATIONS[self._kind] = function
        return function
