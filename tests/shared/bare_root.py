"""Root folder with a C library, a shell, coreutils, tar and gzip, and programs that run in it as another user.

    python bare_root.py FOLDER online|offline PROGRAM ARGUMENT…

runs a program there, in place of itself: in a separate mount namespace, with /proc and /dev; offline also in a network
namespace that has only loopback.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

USER = 10_001
TOOLS = (
    "sh",
    "tail",
    "head",
    "sha256sum",
    "gzip",
    "tar",
    "mktemp",
    "mkdir",
    "touch",
    "chmod",
    "mv",
    "rm",
    "sync",
    "stat",
)
OF_LIBC = ("libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1", "libresolv.so.2")

CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def make_bare_root(root: Path) -> Path:
    """Fill a folder, and return it. The user's home is `/home/bare`, and the path has only `TOOLS`."""
    for folder in ("bin", "dev", "etc", "proc", "tmp", "home/bare"):
        (root / folder).mkdir(parents=True)
    root.chmod(0o755)
    (root / "tmp").chmod(0o1777)
    (root / "etc" / "passwd").write_text(f"bare:x:{USER}:{USER}::/home/bare:/bin/sh\n")
    os.chown(root / "home" / "bare", USER, USER)
    for tool in TOOLS:
        program = Path(shutil.which(tool)).resolve()
        shutil.copy(program, root / "bin" / tool)
        needed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True, timeout=20).stdout
        for library in map(Path, re.findall(r"(/\S+) \(0x", needed)):
            for file in [library, *(library.with_name(name) for name in OF_LIBC if library.name == "libc.so.6")]:
                copy = root / file.relative_to("/")
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)
    return root


def in_bare_root(root: Path, *command: str, offline: bool = False) -> list[str]:
    """Return the command that runs `command` there."""
    return [sys.executable, __file__, str(root), "offline" if offline else "online", *command]


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _enter(root: str, network: str, *command: str) -> None:
    _check(_libc.unshare(CLONE_NEWNS | (CLONE_NEWNET if network == "offline" else 0)))
    if network == "offline":
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
    _check(_libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    for kind, flags in (("proc", MS_BIND | MS_REC), ("dev", MS_BIND | MS_REC)):
        _check(_libc.mount(f"/{kind}".encode(), f"{root}/{kind}".encode(), None, flags, None))
    os.chroot(root)
    os.chdir("/home/bare")
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)
    os.execve(command[0], command, {"HOME": "/home/bare", "PATH": "/bin"})


if __name__ == "__main__":
    _enter(*sys.argv[1:])
