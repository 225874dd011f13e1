"""What the bridge uses of trio_asyncio, which ships no types (0.16)."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

class TrioEventLoop(asyncio.SelectorEventLoop): ...

def open_loop(queue_len: int | None = None) -> AbstractAsyncContextManager[TrioEventLoop]: ...
def aio_as_trio(
    proc: Callable[_P, Awaitable[_T]], *, loop: asyncio.AbstractEventLoop | None = None
) -> Callable[_P, Awaitable[_T]]: ...
