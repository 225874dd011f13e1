"""`CancellationToken`, which stops a pipeline from any thread.

A job needs none: a cancel of the job cancels its pipeline. The token is for programs that run a load themselves, and
for loads with a time limit.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import trio


class CancellationToken:
    """Stops the requests of all runs that have it. Responses that have arrived are still processed and written.

    It cancels itself `timeout` seconds after its creation. Raises `ValueError` for a timeout that is not greater than
    0.
    """

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None and not timeout > 0:
            message = f"timeout: must be a number of seconds greater than 0, not {timeout!r}"
            raise ValueError(message)
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._cancelled = False
        self._lock = threading.Lock()
        self._scopes: list[tuple[trio.lowlevel.TrioToken, trio.CancelScope]] = []

    @property
    def is_cancelled(self) -> bool:
        """Return True after `cancel` was called or the timeout has passed. Callable from any thread."""
        return self._cancelled or time.monotonic() >= self._deadline

    def cancel(self) -> None:
        """Stop the requests of all runs that have this token. Callable repeatedly, from any thread; does not block."""
        with self._lock:
            self._cancelled = True
            scopes = list(self._scopes)
        for loop, scope in scopes:
            with suppress(trio.RunFinishedError):
                loop.run_sync_soon(scope.cancel)

    @contextmanager
    def scope(self) -> Iterator[trio.CancelScope]:
        """Open a cancel scope that ends when the token is canceled, for the duration of a block in a Trio task."""
        with trio.CancelScope() as scope:
            entry = (trio.lowlevel.current_trio_token(), scope)
            with self._lock:
                self._scopes.append(entry)
            try:
                if self.is_cancelled:
                    scope.cancel()
                elif self._deadline < math.inf:
                    scope.deadline = trio.current_time() + self._deadline - time.monotonic()
                yield scope
            finally:
                with self._lock:
                    self._scopes.remove(entry)
