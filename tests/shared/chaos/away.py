"""Statements to a database that may be unavailable."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import asyncpg
import trio
from databases import RawConnection, raw_connection

T = TypeVar("T")
GONE = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""Errors of a lost connection. The driver raises the last one if it is lost between two messages."""
Act = Callable[[RawConnection], Awaitable[T]]


class AwayError(Exception):
    """The database did not answer, or has refused the session."""


async def ask_once(dsn: str, act: Act[T]) -> T:
    """Act on a new connection. Raises `AwayError`; then it is unknown whether the action was done."""
    try:
        async with raw_connection(dsn) as raw:
            return await act(raw)
    except* GONE as group:
        away = group
    raise AwayError from away


async def insist(dsn: str, act: Act[T], on_failure: Callable[[], object] = lambda: None) -> T:
    """Repeat an action until it succeeds."""
    while True:
        try:
            return await ask_once(dsn, act)
        except AwayError:
            on_failure()
            await trio.sleep(0.3)
