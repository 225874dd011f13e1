"""Routes generated from the declarations of operations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeVar
from uuid import UUID

from msgspec import Struct

from dataloader.jobs.errors import Conflict, IdempotencyConflict, InUse
from dataloader.jobs.operations.operation import Operation
from dataloader.jobs.secrets.record_masks import mask_of
from dataloader.web.paging import page_answer
from dataloader.web.routes import DEADLINE_S, Answer, Call, Route, Routes

K = TypeVar("K", bound=Operation[Any])

ROOT: Final = "/api/v1"
_CONVERTERS: Final = {UUID: "uuid", int: "int", str: "path"}
"""Converters of the parts of an address, by their types."""
_CONFLICTS: Final = (Conflict, IdempotencyConflict, InUse)
"""Errors that are answered with 409."""


class OperationRoutes(Routes):
    """Routes of operations. `operation` declares a view written by hand, `operations` adds all others."""

    def __init__(self) -> None:
        """Start without routes."""
        super().__init__()
        self._by_hand: set[type[Operation[Any]]] = set()

    def operation(
        self, kind: type[K], *, answers: Mapping[int, Any] | None = None
    ) -> Callable[[Callable[[Call, K], Awaitable[Answer]]], Callable[[Call, K], Awaitable[Answer]]]:
        """Declare the decorated function as the view of an operation, for answers that differ over HTTP.

        `answers` are the types of the answer by status; by default 200 with the operation's own.
        """

        def declare(view: Callable[[Call, K], Awaitable[Answer]]) -> Callable[[Call, K], Awaitable[Answer]]:
            self._by_hand.add(kind)
            self.append(_route(kind, view, answers or {200: kind.declaration.result}))
            return view

        return declare

    def operations(self, kinds: Iterable[type[Operation[Any]]]) -> None:
        """Add the operations that have no view written by hand."""
        for kind in kinds:
            if kind not in self._by_hand:
                self.append(_route(kind, usual_view(kind), {200: kind.declaration.result}))


def usual_view(kind: type[K]) -> Callable[[Call, K], Awaitable[Answer]]:
    """Return a view that performs the operation and answers without secrets."""
    mask = mask_of(kind.declaration.result)
    is_page, large = _is_page(kind), kind.declaration.large

    async def view(call: Call, operation: K) -> Answer:
        answer = await call.perform(operation)
        # Masking a megabyte takes 100 ms.
        masked = await call.in_thread(mask, answer) if large or is_page else mask(answer)
        return page_answer(call, masked) if is_page else Answer(value=masked)

    return view


def _route(kind: type[K], view: Callable[[Call, K], Awaitable[Answer]], answers: Mapping[int, Any]) -> Route:
    declaration = kind.declaration
    request = declaration.request

    async def view_of_parts(
        call: Call, *, query: Struct | None = None, body: Struct | None = None, **path: Any
    ) -> Answer:
        given = query if body is None else body
        if isinstance(given, kind):
            return await view(call, given)
        names = () if given is None else given.__struct_fields__
        return await view(call, kind(**path, **{name: getattr(given, name) for name in names}))

    view_of_parts.__name__, view_of_parts.__doc__ = declaration.operation_id, kind.__doc__
    # Of several texts in an address only the last may have slashes.
    texts = [name for name, part in declaration.path_fields.items() if part is str]
    parts = {
        name: f"<{name}>" if name in texts[:-1] else f"<{_CONVERTERS[part]}:{name}>"
        for name, part in declaration.path_fields.items()
    }
    return Route(
        method=declaration.method,
        path=ROOT + declaration.path.format_map(parts),
        view=view_of_parts,
        role=declaration.role,
        query=request if declaration.in_query else None,
        body=None if declaration.in_query else request,
        answers=answers,
        conflicts=any(issubclass(error, _CONFLICTS) for error in declaration.errors),
        names=declaration.not_found is not None,
        rows=declaration.large,
        pages=_is_page(kind),
        deadline_s=DEADLINE_S if declaration.deadline_s is None else declaration.deadline_s,
    )


def _is_page(kind: type[Operation[Any]]) -> bool:
    """Return True if the answer is a page of a list. A change may also have a `next`, but is not a page."""
    return kind.declaration.method == "GET" and hasattr(kind.declaration.result, "next")
