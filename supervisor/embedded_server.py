"""Keeps the embedded PostgreSQL running while a supervisor uses it, as the tree keeps its other parts.

Other processes may use the same server, and each of them does this. The first one starts it again, the others find it
running (the locks are cluster.py's). A server that an operator stops is back at once, as long as somebody uses it.
"""

from __future__ import annotations

import os
from typing import Final

import trio

from dataloader.jobs.errors import EmbeddedDatabaseError
from dataloader.jobs.secrets.masking import mask_address
from dataloader.store.embedded.postgres import EmbeddedPostgres

LOOK_S: Final = 5.0
"""How often a server is looked at whose process can't be watched, since it is in another container for one."""


async def keep_server(server: EmbeddedPostgres) -> None:
    """Start the server if it has ended, and wait for its end. To be called again then (`keep_running`).

    Raises:
        EmbeddedDatabaseError: it has ended, can't be started, or now runs at another address than all of us know.
    """
    # Left behind when we are to end: whoever leaves the server waits for it.
    running = await trio.to_thread.run_sync(server.ensure_running, abandon_on_cancel=True)
    if running.dsn != server.dsn:
        raise EmbeddedDatabaseError(
            f"the embedded PostgreSQL has another address now, {mask_address(running.dsn)}: start this process again"
        )
    await _wait_for_end(running)
    how = await trio.to_thread.run_sync(running.how_it_ended, abandon_on_cancel=True)
    raise EmbeddedDatabaseError(f"the embedded PostgreSQL (process {running.pid}) has ended: {how}")


async def _wait_for_end(server: EmbeddedPostgres) -> None:
    process = _process_of(server)
    if process is not None:
        try:
            await trio.lowlevel.wait_readable(process)
        finally:
            os.close(process)
    else:
        while await trio.to_thread.run_sync(server.is_running, abandon_on_cancel=True):  # noqa: ASYNC110
            await trio.sleep(LOOK_S)


def _process_of(server: EmbeddedPostgres) -> int | None:
    """A descriptor of the server's process, to be closed; None where it can only be asked."""
    if not server.is_visible():
        return None
    try:
        return os.pidfd_open(server.pid)
    except OSError:  # it has ended meanwhile, or this is a sandbox or a kernel without such descriptors
        return None
