"""Start of the standalone binary's program, in the folder that head.sh has unpacked. PyInstaller runs it as `__main__`.

It makes a process that differs from an installed `dataloader` in nothing that others see, then hands over to it.
`sys.executable` is this program and no Python, so it knows the two commands by which a service starts one: the guard of
a body (actors/children/child.py), and a worker of multiprocessing, which handlers may use.
"""

import contextlib
import fcntl
import multiprocessing
import os
import re
import runpy
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

UNUSED_S = 30 * 86_400
"""When the folder of another version is removed."""
LEFT_S = 86_400
"""When what a killed start has left half unpacked is removed."""


def main() -> None:
    """Become the guard, a worker, or the command line."""
    clean_environment()
    if sys.argv[1:2] == ["-P"] and sys.argv[2:3] == [str(Path(sys.prefix, "dataloader/actors/children/guard.py"))]:
        del sys.argv[:2]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    multiprocessing.freeze_support()
    with contextlib.suppress(OSError):  # the cache may be another's, and read-only
        care_for_cache(Path(sys.executable).resolve().parent)
    from dataloader.__main__ import main as command_line  # noqa: PLC0415 - a guard does without

    command_line()


def clean_environment() -> None:
    """Take away what PyInstaller's loader has set: PostgreSQL and users' commands need the libraries of the system.

    This process has read LD_LIBRARY_PATH when it began, and keeps to it.
    """
    original = os.environ.pop("LD_LIBRARY_PATH_ORIG", None)
    os.environ.pop("LD_LIBRARY_PATH", None)
    if original is not None:
        os.environ["LD_LIBRARY_PATH"] = original
    for name in [name for name in os.environ if name.startswith("_PYI_")]:
        del os.environ[name]


def care_for_cache(own: Path) -> None:
    """Note that this version is used, for as long as this process lives, and remove what nobody has used for long."""
    if not is_version(own.name):  # not unpacked by head.sh
        return
    lock = os.open(own / "used", os.O_RDWR)
    # Never as 0, 1 or 2, if one of those is closed.
    fcntl.flock(fcntl.fcntl(lock, fcntl.F_DUPFD_CLOEXEC, 10), fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(lock)
    os.utime(own / "used")
    now = time.time()
    for other in own.parent.iterdir():
        with contextlib.suppress(OSError):  # gone, another's, or in use
            if is_version(other.name) and now - (other / "used").stat().st_mtime > UNUSED_S:
                remove_version(other)
            elif is_version(other.name[1:].partition(".")[0]) and now - other.stat().st_ctime > LEFT_S:
                shutil.rmtree(other, ignore_errors=True)


def is_version(name: str) -> bool:
    """Return whether this is the name of a folder to which an archive was unpacked."""
    return re.fullmatch("[0-9a-f]{16}", name) is not None


def remove_version(folder: Path) -> None:
    """Remove a folder from which nothing runs. Raises `OSError` if something does.

    A service holds the lock; a PostgreSQL whose service was killed does not.
    """
    with (folder / "used").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if any(folder in program.parents for program in running_programs()):
            raise BlockingIOError
        shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.{os.getpid()}")), ignore_errors=True)


def running_programs() -> Iterator[Path]:
    """Return the programs of all visible processes: those of this user, and for root all."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                yield (process / "exe").readlink()


if __name__ == "__main__":
    main()
