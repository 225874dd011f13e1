"""Keeps the embedded PostgreSQL running while a supervisor uses it, as the tree keeps its other parts running.

Each process that uses the server runs this. The first one restarts the server, and the others find it running
(cluster.py has the lock). So while a process uses it, a server that an operator stops is restarted immediately.
"""

from __future__ import annotations

import os
from typing import Final

import trio

from dataloader.jobs.errors import EmbeddedDatabaseError
from dataloader.jobs.secrets.masking import mask_address
from dataloader.store.embedded.postgres import EmbeddedPostgres

LOOK_S: Final = 5.0
"""Seconds between checks of a server whose process cannot be watched, for example in another container."""


async def keep_server(server: EmbeddedPostgres, *, look_s: float = LOOK_S) -> None:
    """Start the server if it has ended, and wait for its end. `keep_running` then calls this again.

    A server whose process cannot be watched is checked every `look_s` seconds.

    Raises:
        EmbeddedDatabaseError: it has ended, cannot be started, or now has another address than at our start.
    """
    # The thread is abandoned on cancellation: closing the server waits for it.
    running = await trio.to_thread.run_sync(server.ensure_running, abandon_on_cancel=True)
    if running.dsn != server.dsn:
        raise EmbeddedDatabaseError(
            f"the embedded PostgreSQL has a new address, {mask_address(running.dsn)}; restart this process"
        )
    await _wait_for_end(running, look_s)
    how = await trio.to_thread.run_sync(running.how_it_ended, abandon_on_cancel=True)
    raise EmbeddedDatabaseError(f"the embedded PostgreSQL (process {running.pid}) has ended: {how}")


async def _wait_for_end(server: EmbeddedPostgres, look_s: float) -> None:
    process = _process_of(server)
    if process is not None:
        try:
            await trio.lowlevel.wait_readable(process)
        finally:
            os.close(process)
    else:
        while await trio.to_thread.run_sync(server.is_running, abandon_on_cancel=True):  # noqa: ASYNC110
            await trio.sleep(look_s)


def _process_of(server: EmbeddedPostgres) -> int | None:
    """Return a pidfd of the server's process, which the caller closes, or None if the process must be polled."""
    if not server.is_visible():
        return None
    try:
        return os.pidfd_open(server.pid)
    except OSError:  # it has ended meanwhile, or this sandbox or kernel has no pidfds
        return None
