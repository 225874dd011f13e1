"""One PostgreSQL cluster in a data directory: making, starting, recovering and stopping it.

postgres.py is the only one who uses it. It runs programs and waits for them, blocking; never on Trio's loop. Beside it:
data_dir.py has the directory, members.py who uses the server, server_programs.py PostgreSQL's programs.

`server.lock` is held by the server itself, and all its processes: whatever path or container it was started by, and
however long it has not answered, no second one is started on the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shlex
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Literal

import attrs

from dataloader.jobs.errors import EmbeddedDatabaseError
from dataloader.store.embedded import members
from dataloader.store.embedded.data_dir import check_own, make_writable, sync_directory, versions_in, write_password
from dataloader.store.embedded.file_lock import lock_alone, open_lock
from dataloader.store.embedded.server_account import open_binaries, open_path, system_user
from dataloader.store.embedded.server_programs import ServerPrograms, programs_of

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 60.0
LONGEST_STEP_S: Final = START_TIMEOUT_S + STOP_TIMEOUT_S
ORPHANS_TIMEOUT_S: Final = 10.0
LOG_LIMIT_BYTES: Final = 10_000_000
# sockaddr_un holds 108 bytes, the last of which is NUL.
SOCKET_PATH_LIMIT_BYTES: Final = 107
PORT: Final = "5432"
VERSION: Final = 18
"""The major version of PostgreSQL that a new data directory gets."""


@attrs.frozen
class Postmaster:
    """What a server notes in its lock file: its main process, its data directory and the directory of its socket."""

    pid: int
    directory: Path
    socket_dir: Path


@attrs.frozen
class Cluster:
    """The files and processes of one cluster. `ensure_…` and `stop` are called under `serialised`."""

    data_dir: Path
    version: int
    programs: ServerPrograms

    @classmethod
    def in_directory(cls, data_dir: Path, version: int, bin_dir: Path | None = None) -> Cluster:
        """Find the binaries and the user for a cluster in `data_dir`, and make the directory if it is missing."""
        bin_dir = bin_dir or programs_of(version)
        data_dir = make_writable(data_dir.expanduser())
        check_own(data_dir)
        other_versions = [found for found in versions_in(data_dir) if found != version]
        if other_versions:
            raise EmbeddedDatabaseError(
                f"The data directory {data_dir} holds a cluster of PostgreSQL {other_versions[0]}, this is PostgreSQL "
                f"{version}: choose another data directory, and move the data by `dataloader backup` and `restore`"
            )
        account = system_user() if os.geteuid() == 0 else None
        # Not by getpwuid: in a container we may run as a user that has no account.
        uid, gid = (os.geteuid(), os.getegid()) if account is None else (account.pw_uid, account.pw_gid)
        cluster = cls(data_dir, version, ServerPrograms(data_dir, bin_dir, uid, gid, LONGEST_STEP_S))
        cluster._check_owner()
        if account is not None:
            open_path(data_dir)
            open_binaries(bin_dir, account)
        return cluster

    @property
    def directory(self) -> Path:
        """PostgreSQL's own data directory (PGDATA)."""
        return self.data_dir / f"postgres-{self.version}"

    @property
    def name(self) -> str:
        """Unique on this machine. The command line of each of the cluster's processes shows it."""
        return "dataloader-" + hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:16]

    @property
    def password_path(self) -> Path:
        """Where the superuser's password is kept, for us alone."""
        return self.data_dir / "postgres.password"

    def serialised(self) -> AbstractContextManager[None]:
        """Alone among all processes in starting, joining and stopping."""
        return members.serialised(self.data_dir, LONGEST_STEP_S)

    def membership(self) -> AbstractContextManager[None]:
        """Count as a user of the server; the last one to leave stops it."""
        return members.membership(self.data_dir, LONGEST_STEP_S, self.stop)

    def has_members(self) -> bool:
        """Whether anybody counts as a user of the server: under `serialised` nobody joins or leaves meanwhile."""
        return members.has_members(self.data_dir)

    def ensure_initialised(self, *, durable: bool) -> None:
        """Make the cluster if there is none. Killed half way, it leaves nothing that looks like one."""
        for leftover in self.data_dir.glob(f"{self.directory.name}.*.new"):
            shutil.rmtree(leftover, ignore_errors=True)  # an initdb whose starter was killed may still be writing there
        if self.directory.exists():
            return
        new = Path(tempfile.mkdtemp(prefix=f"{self.directory.name}.", suffix=".new", dir=self.data_dir))
        try:
            self.programs.give_to_server(new)
            password = secrets.token_urlsafe(32)
            reader, writer = os.pipe()  # no file: a crash would leave it behind
            try:
                self.programs.give_to_server(reader)
                os.write(writer, password.encode())
                os.close(writer)
                self.programs.run_as_server(
                    "initdb",
                    f"--pgdata={new}",
                    "--username=postgres",
                    f"--pwfile=/dev/fd/{reader}",
                    "--auth=scram-sha-256",
                    "--encoding=UTF8",
                    # Version 17 brought its own C.UTF-8; before, the machine's might be missing.
                    *(("--locale-provider=builtin", "--builtin-locale=C.UTF-8") if self.version >= 17 else ()),
                    "--locale=C",
                    "--data-checksums",
                    *(() if durable else ("--no-sync",)),
                    pass_fds=(reader,),
                )
            finally:
                os.close(reader)
            write_password(self.password_path, password)
            new.rename(self.directory)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        sync_directory(self.data_dir)

    def ensure_running(self, extra_settings: Mapping[str, str]) -> None:
        """Start the server, or wait for it if it starts or recovers already, until it takes connections.

        It is started once: one that ends again at once is an error of its own each time.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        started = False
        while (state := self.state()) != "ready":
            if time.monotonic() > deadline:
                raise self.programs.error(
                    f"PostgreSQL did not become ready in {START_TIMEOUT_S:.0f} s and still starts"
                )
            if state == "busy":
                time.sleep(0.05)
            elif started:
                raise self.programs.error("PostgreSQL ended as soon as it was started")
            else:
                started = True
                self._start(extra_settings, deadline)

    def state(self) -> Literal["ready", "busy", "absent"]:
        """Does the server answer? `busy` is starting, recovering, stopping or stuck.

        A lock file that came with a copy of the directory is another server's. The socket is asked first, since it also
        answers across containers that share the directory. A process id alone says nothing: it may be somebody else's
        by now, or a zombie's.
        """
        try:
            postmaster = self.postmaster()
        except (FileNotFoundError, IndexError, ValueError):  # none; or one that has not written all of it yet
            return "absent"
        if postmaster.directory != self.directory.resolve():
            return "absent"
        if postmaster.socket_dir.is_absolute():  # the line is empty until the server listens
            arguments = ["--host", str(postmaster.socket_dir), "--port", PORT, "--timeout", "3", "--quiet"]
            answer = self.programs.run(["pg_isready", *arguments]).returncode
            if answer in {0, 1}:  # takes connections; refuses them for the moment
                return "ready" if answer == 0 else "busy"
        return "busy" if self.owns_process(postmaster.pid) else "absent"

    def postmaster(self) -> Postmaster:
        """The server by its lock file, which may be stale."""
        lines = (self.directory / "postmaster.pid").read_text().splitlines()
        return Postmaster(pid=int(lines[0]), directory=Path(lines[1]), socket_dir=Path(lines[4]))

    def stop(self) -> None:
        """Stop the server if it is up. One that still recovers is left to finish: the next start finds it."""
        if self.state() == "ready":
            socket_dir = self.postmaster().socket_dir
            timeout = f"--timeout={STOP_TIMEOUT_S:.0f}"
            self.programs.run_as_server(
                "pg_ctl", "stop", "--pgdata=.", "--mode=fast", "--wait", timeout, cwd=self.directory
            )
            if socket_dir != self.directory:
                with contextlib.suppress(OSError):
                    socket_dir.rmdir()

    def _start(self, extra_settings: Mapping[str, str], deadline: float) -> None:
        """Start a server where none is, after a crash too."""
        self._end_orphans()
        server_lock = self._lock_for_server()
        try:
            self._start_with(server_lock, extra_settings, deadline)
        finally:
            os.close(server_lock)

    def _lock_for_server(self) -> int:
        """The lock that the server inherits and holds for as long as one of its processes lives."""
        lock = open_lock(self.data_dir / "server.lock")
        with contextlib.ExitStack() as unless_locked:
            unless_locked.callback(os.close, lock)
            try:
                lock_alone(lock, ORPHANS_TIMEOUT_S)
            except TimeoutError:
                raise self.programs.error(
                    f"A server that does not answer here has the cluster {self.directory}: it was started by another "
                    "path, in another container or on another machine; use or stop it there"
                ) from None
            unless_locked.pop_all()
        return lock

    def _start_with(self, server_lock: int, extra_settings: Mapping[str, str], deadline: float) -> None:
        """Start a server that holds the lock from then on."""
        # Both name the process that is gone. If its number is in use again, even by a zombie, they bar the start.
        socket_dir = self._socket_dir()
        (self.directory / "postmaster.pid").unlink(missing_ok=True)
        (socket_dir / f".s.PGSQL.{PORT}.lock").unlink(missing_ok=True)
        self._prepare_log()
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(socket_dir),
            "unix_socket_permissions": "0700",
            "port": PORT,
            "cluster_name": self.name,
            "max_connections": "100",
            **extra_settings,
        }
        # pg_ctl hands its paths to a shell within double quotes, so it gets relative ones.
        options = " ".join(shlex.quote(f"--{name}={value}") for name, value in settings.items())
        timeout = f"--timeout={max(deadline - time.monotonic(), 1):.0f}"
        files = ("--pgdata=.", f"--log=../{self.programs.log_path.name}", f"--options={options}")
        try:
            self.programs.run_as_server(
                "pg_ctl", "start", "--wait", timeout, *files, cwd=self.directory, pass_fds=(server_lock,)
            )
        except EmbeddedDatabaseError:
            if self.state() == "absent":
                raise

    def owns_process(self, pid: int) -> bool:
        """Is `pid` a process of this cluster? From what /proc shows to all: in containers root may not see the rest."""
        process = Path("/proc", str(pid))
        try:
            return (
                process.stat().st_uid == self.programs.uid
                and (process / "comm").read_text() == "postgres\n"
                and self.name.encode() in (process / "cmdline").read_bytes()
            )
        except OSError:
            return False

    def _end_orphans(self) -> None:
        """End what a killed server left behind, as it blocks the next one until it has noticed.

        To kill them is as safe as the crash that has happened: the write-ahead log repairs both.
        """
        deadline = time.monotonic() + ORPHANS_TIMEOUT_S
        pids = [int(process.name) for process in Path("/proc").iterdir() if process.name.isdigit()]
        while pids := [pid for pid in pids if self.owns_process(pid)]:
            if time.monotonic() > deadline:
                raise self.programs.error(f"Processes {pids} of a server that crashed in {self.directory} do not end")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _socket_dir(self) -> Path:
        """The cluster's directory, or a private one with a short and plain path where that won't do."""
        if _fits_socket(self.directory):
            return self.directory
        bases = [Path("/tmp")]  # noqa: S108 - for a directory of a known name, whose owner and mode are checked
        if os.geteuid() != 0:  # root's own directories are closed to the server's user
            bases = [Path(os.environ.get("XDG_RUNTIME_DIR", "/nonexistent")), Path(tempfile.gettempdir()), *bases]
        for base in bases:
            if os.access(base, os.W_OK | os.X_OK) and _fits_socket(base / self.name):
                return self._private_directory(base / self.name)
        raise EmbeddedDatabaseError(
            f"The path of the data directory {self.data_dir} is too long for a socket, and so is TMPDIR"
        )

    def _private_directory(self, path: Path) -> Path:
        """`path` as a directory of the server's user, closed to others: others may write where it lies."""
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            self.programs.give_to_server(path)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != self.programs.uid or stat.S_IMODE(found.st_mode) & 0o077:
            raise EmbeddedDatabaseError(
                f"{path} must be a directory of user id {self.programs.uid} with mode 0700, for the server's socket"
            )
        return path

    def _prepare_log(self) -> None:
        """A log file that the server's user alone can write; the one before is kept when it has grown too large."""
        with contextlib.suppress(FileNotFoundError):
            if self.programs.log_path.stat().st_size > LOG_LIMIT_BYTES:
                self.programs.log_path.replace(self.programs.log_path.with_suffix(".log.1"))
        log = os.open(self.programs.log_path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.programs.give_to_server(log)
        os.close(log)

    def read_password(self) -> str:
        """The password of the superuser `postgres`."""
        try:
            return self.password_path.read_text()
        except FileNotFoundError:
            raise EmbeddedDatabaseError(
                f"The cluster {self.directory} has lost its password: {self.password_path} is missing"
            ) from None

    def _check_owner(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            owner = self.directory.stat().st_uid
            if owner != self.programs.uid:
                raise EmbeddedDatabaseError(
                    f"The cluster {self.directory} belongs to user id {owner}, the server would run as user id "
                    f"{self.programs.uid}: start it as the user who made it, or choose another data directory"
                )


def _fits_socket(directory: Path) -> bool:
    """Can the socket's path be bound, and be written into settings and addresses without quotes?"""
    path = directory / f".s.PGSQL.{PORT}"
    return len(os.fsencode(path)) <= SOCKET_PATH_LIMIT_BYTES and re.fullmatch(r"[\w./+-]+", str(path)) is not None
