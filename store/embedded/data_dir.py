"""Data directory of the embedded PostgreSQL: its owner and mode, its versions, its password.

It has the cluster in `postgres-18/`, the files `postgres.password` and `postgres.log` with mode 0600, and the lock
files of members.py and cluster.py.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from contextlib import suppress
from pathlib import Path

from dataloader.jobs.errors import ConfigError, EmbeddedDatabaseError


def make_writable(data_dir: Path) -> Path:
    """Create the directory if it is missing; return its real path.

    Raises `ConfigError` if it cannot be created or written to.
    """
    try:
        found = data_dir.resolve()
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(found, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it is not writable")
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, FileExistsError):
            reason = "it is a file"
        raise ConfigError(
            f"DL_DATA_DIR: must be a directory that this user can write to, not '{data_dir}' ({reason})"
        ) from error
    return found


def check_own(data_dir: Path) -> None:
    """Raise `EmbeddedDatabaseError` if another user could replace the cluster or the password in the directory."""
    found = data_dir.stat()
    if found.st_uid != os.geteuid():
        raise EmbeddedDatabaseError(
            f"The data directory {data_dir} belongs to user ID {found.st_uid}, but this process runs as user ID "
            f"{os.geteuid()}: run it as the owner, or set DL_DATA_DIR to your own directory"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise EmbeddedDatabaseError(
            f"Other users can write into the data directory {data_dir}, its mode is {stat.S_IMODE(found.st_mode):o}: "
            f"run `chmod go-w {shlex.quote(str(data_dir))}`, or set DL_DATA_DIR to your own directory"
        )


def versions_in(data_dir: Path) -> list[int]:
    """Return the major versions of the clusters in a data directory.

    Raises `ConfigError` if this user may not read it, because an unreadable directory need not be empty.
    """
    found = []
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            for path in data_dir.iterdir():
                if re.fullmatch("postgres-[0-9][0-9]", path.name):
                    with suppress(FileNotFoundError, NotADirectoryError):
                        found.append(int((path / "PG_VERSION").read_text()))
    except PermissionError as error:
        raise ConfigError(
            f"DL_DATA_DIR: user ID {os.geteuid()} may not read '{error.filename}': run this as its owner, or use "
            "another directory"
        ) from error
    return found


def write_password(path: Path, password: str) -> None:
    """Write the password to disk, readable only by its owner, replacing an older one."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    new.touch(mode=0o600, exist_ok=False)
    with new.open("w") as file:
        file.write(password)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def sync_directory(directory: Path) -> None:
    """Write the directory's entries (new and renamed files) to disk."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(handle)
    os.close(handle)
