"""Implementations of operations over the database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import attrs

from dataloader.jobs.contract import Operator
from dataloader.jobs.operations.operation import Operation
from dataloader.jobs.process_telemetry import ProcessTelemetry
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.answers import Answers, Waiter
from dataloader.store.processes.asker import Asker
from dataloader.store.queue.enqueuer import Enqueuer

K = TypeVar("K", bound=Operation[Any])
R = TypeVar("R")


@attrs.frozen(kw_only=True)
class Store:
    """Dependencies of an implementation.

    Attributes:
        database: the database.
        operator: the name for the audit.
        by_hand: whether a person makes the requests to processes, not a program; then starts, calls and withdrawals are
            audited, too.
        enqueuer: adds jobs.
        asker, answers, telemetry: send, await and count the requests to processes.
        sent: called after a change of processes that sinks may receive.
    """

    database: Database
    operator: Operator
    by_hand: bool = False
    enqueuer: Enqueuer
    asker: Asker = attrs.field(
        default=attrs.Factory(lambda self: Asker(self.database, self.enqueuer.default_lease_s), takes_self=True)
    )
    answers: Waiter = attrs.field(default=attrs.Factory(lambda self: Answers(self.database), takes_self=True))
    telemetry: ProcessTelemetry = attrs.field(factory=ProcessTelemetry)
    sent: Callable[[], None] = lambda: None


IMPLEMENTATIONS: dict[type[Operation[Any]], Callable[[Store, Any], Awaitable[Any]]] = {}
"""Implementation of each operation."""


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
