"""Rows as a source: a function that yields the rows of a load, and what it gets and may yield.

@tasks.load("shop.orders", table=Table("orders", key="id"))
def orders(run):
    for page in pages_since(run.state):
        yield page.orders
        yield Checkpoint(page.cursor)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any, Final, Protocol

import attrs
import msgspec

from dataloader.flows.etl.declare import option_checks
from dataloader.flows.etl.sources.source import Page, Request, Response, Source, SourceConnection, Window
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.secrets.masking import mask_text

EVERY_ROWS: Final = 100_000
EVERY_S: Final = 30.0
_NUL: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
"""NUL in an encoded state. PostgreSQL does not store it."""


def _as_stored(state: Any) -> Any:
    """Return a copy of a state as a later run reads it. Raises `BadRequest` if that would not equal the state."""
    try:
        text = msgspec.json.encode(state)
        copy = msgspec.json.decode(text)
        is_kept = bool(copy == state) and _NUL.search(text) is None
    except Exception:  # noqa: BLE001 - any error of an object's own encoding or comparison
        is_kept = False
    if not is_kept:
        raise BadRequest(
            "state",
            "must be a JSON value: None, a bool, a finite number, text without NUL, a list, or a dict with text keys;"
            f" not {mask_text(repr(state))[:200]}",
        )
    return copy


@attrs.frozen
class Checkpoint:
    """Point in the rows of a function at which a later run can continue.

    Args:
        state: JSON value that the function gets as `run.state` when it is called again. It covers all rows that were
            yielded before it. It is copied: later changes of the object do not change the checkpoint.

    Raises:
        BadRequest: the state would not be equal after it is stored as JSON, such as a tuple, a `datetime` or NaN.
    """

    state: Any = attrs.field(converter=_as_stored)


class RequestBlock(AbstractContextManager[None], AbstractAsyncContextManager[None], Protocol):
    """Time of one request to a supplier: a `with` block in a generator, `async with` in an async generator."""


class _NoSlot(nullcontext[None]):
    """Slot without a wait, outside of a run."""


@attrs.frozen(kw_only=True)
class RowsRun:
    """Run of a load, for the function that yields its rows.

    Args:
        load: name of the load.
        state: state of the last `Checkpoint` whose rows are committed; None before the first one.
        new_slot: makes the blocks of `request`; by default blocks that wait for nothing.
    """

    load: str
    state: Any = None
    new_slot: Callable[[], RequestBlock] = attrs.field(default=_NoSlot, repr=False)

    def request(self) -> RequestBlock:
        """Return a block for one request to the load's supplier: `with run.request(): …`.

        It waits until no other request is sent to the supplier, and its pause and rate limits allow one. Inside the
        block, send one request and read its answer within the pipeline's `request_timeout`. Blocks cannot be nested.
        A block raises an error after the end of the run, so that a function in a thread sends no more requests.
        """
        return self.new_slot()


Yielded = Iterable[Any] | AsyncIterable[Any]
"""Items of a function: rows, lists of rows, and checkpoints."""


def _check_function(_instance: Any, _attribute: attrs.Attribute[Any], value: Any) -> None:
    if not callable(value) or any(map(inspect.iscoroutinefunction, (value, type(value).__call__))):
        raise option_checks.refuse("function", value, "a generator, such as `def rows(run): yield …`")


@attrs.frozen
class Rows(Source):
    """Rows that a function yields: a generator (`def`), which runs in a thread, or an async generator.

    A row is a mapping, or an attrs, dataclass or msgspec object. The function may also yield lists of rows, and a
    `Checkpoint` after the rows that its state covers.

    The rows are cut into segments, each of which is one transaction: after `every_rows` rows or `every_s` seconds, at
    any row if the table has a key, otherwise at the next `Checkpoint`. With `history` or `delete_missing`, all rows of
    a run are one segment. When the function raises an error, it is called again, with the state of the last committed
    `Checkpoint`.

    Args:
        function: function that takes a `RowsRun` and yields the rows.
        every_rows: number of rows after which a segment ends.
        every_s: seconds after which a segment ends.
        supplier: name of the supplier that the function sends requests to, each in a block `with run.request()`.
        asyncio: the async generator runs on asyncio instead of Trio, in the loop of asyncio handlers.
    """

    function: Callable[[RowsRun], Yielded] = attrs.field(validator=_check_function)
    every_rows: int = attrs.field(default=EVERY_ROWS, kw_only=True, validator=option_checks.whole_from(1))
    every_s: float = attrs.field(default=EVERY_S, kw_only=True, validator=option_checks.positive_seconds)
    supplier: str | None = attrs.field(default=None, kw_only=True, validator=option_checks.text_or_none)
    asyncio: bool = attrs.field(default=False, kw_only=True)

    @asyncio.validator
    def _check_asyncio(self, attribute: attrs.Attribute[bool], value: object) -> None:
        if not isinstance(value, bool):
            raise option_checks.refuse(attribute.name, value, "True or False")
        if value and not self.is_async:
            raise ValueError("asyncio: True needs an async generator, such as `async def rows(run): yield …`")

    @property
    def name(self) -> str | None:
        """Return the supplier's name."""
        return self.supplier

    @property
    def is_async(self) -> bool:
        """Return whether the function is an async generator."""
        function = self.function
        return inspect.isasyncgenfunction(function) or inspect.isasyncgenfunction(type(function).__call__)

    def open(self) -> AbstractAsyncContextManager[SourceConnection]:
        """Refuse: the function sends its requests itself."""
        raise NotImplementedError

    async def requests(self, window: Window) -> AsyncGenerator[Request, None]:
        """Yield nothing: the function sends its requests itself."""
        del window
        return
        yield  # pragma: no cover - makes this a generator

    def read(self, response: Response) -> Page:
        """Refuse: there are no responses."""
        raise NotImplementedError
