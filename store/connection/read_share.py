"""Part of the pool for reads over HTTP, so that enqueueing and the actors always find a connection.

Without it, four slow reads of one API token take all connections: triggers wait, and the reaper, the stager and the
poller stop. All services of the HTTP side get their database from `share_of`, so no view can take more.

* At most `pool_size - 1` connections read at a time. A pool of 1 gets a second connection for reads.
* One caller uses at most half of those, so that its slow reads do not delay the reads of others.
* A read ends after `MOST_S`, which is less than the deadline of its request, and with its request. The server cancels
  its statement in both cases.

Writes use the whole pool. The caller is a context variable, since reads are called from all views.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import trio

from dataloader.jobs.errors import StoreUnavailable
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.fair_places import FairPlaces

P = ParamSpec("P")
T = TypeVar("T")

MOST_S: Final = 10.0
"""The seconds that a read over HTTP may take, once it has a connection of the share."""
_caller: ContextVar[str] = ContextVar("caller of reads", default="")


def read_for(caller: str) -> None:
    """Count the reads of this task from now on as those of `caller`: the name of a token or of an operator."""
    _caller.set(caller)


def share_of(database: Database) -> ReadShare:
    """Return the share of a pool. There is one for each pool, however often this is called."""
    if isinstance(database, ReadShare):
        return database
    if not isinstance(database.share, ReadShare):
        database.share = ReadShare(database)
    return database.share


class ReadShare(Database):
    """A database whose reads (`run`) use a part of its pool only."""

    def __init__(self, pool: Database, *, most_s: float = MOST_S) -> None:
        """Create the share; use `share_of` instead."""
        self.__dict__.update(pool.__dict__)  # the same connections
        pool.add_connections(2)
        self.pool = pool
        most = max(pool.options.pool_size - 1, 1)
        self.places = FairPlaces(most=most, most_of_one=max(most // 2, 1))
        self._most_s = most_s

    async def run(self, operation: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a read. Raises `StoreUnavailable` if it takes too long."""
        async with self.places.place_of(_caller.get()):
            with trio.move_on_after(self._most_s):
                return await self.pool.run(operation, *args, **kwargs)
        raise StoreUnavailable(f"a read took longer than {self._most_s:g} s")
