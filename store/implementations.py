"""The implementations of operations over the database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import attrs

from dataloader.jobs.contract import Operator
from dataloader.jobs.operations.operation import Operation
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.enqueuer import Enqueuer

K = TypeVar("K", bound=Operation[Any])
R = TypeVar("R")


@attrs.frozen(kw_only=True)
class Store:
    """What an implementation works with: the database, the operator for the audit, and what adds jobs."""

    database: Database
    operator: Operator
    enqueuer: Enqueuer


IMPLEMENTATIONS: dict[type[Operation[Any]], Callable[[Store, Any], Awaitable[Any]]] = {}
"""The implementation of each operation."""


def implements(
    kind: type[K],
) -> Callable[[Callable[[Store, K], Awaitable[R]]], Callable[[Store, K], Awaitable[R]]]:
    """Declare the decorated function as the implementation of an operation. Raises `ValueError` for a second one."""

    def register(function: Callable[[Store, K], Awaitable[R]]) -> Callable[[Store, K], Awaitable[R]]:
        if kind in IMPLEMENTATIONS:
            raise ValueError(f"{kind.__name__} has two implementations")
        IMPLEMENTATIONS[kind] = function
        return function

    return register
