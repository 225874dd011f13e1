"""One PostgreSQL cluster in a data directory: creates, starts, recovers and stops it.

Only postgres.py uses it. It blocks while it waits for programs, so it must not be called on Trio's loop. data_dir.py
handles the directory, members.py counts the users of the server, server_programs.py runs PostgreSQL's programs.

The server itself, with all its processes, holds `server.lock`. So no second server is started on the same files, even
if the first was started by another path or in another container, or has not answered for long.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import select
import shlex
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
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
# sockaddr_un has 108 bytes, the last of which is NUL.
SOCKET_PATH_LIMIT_BYTES: Final = 107
PORT: Final = "5432"
VERSION: Final = 18
"""Major version of PostgreSQL that a new data directory gets."""


@attrs.frozen
class Postmaster:
    """Content of a server's lock file: its main process, its data directory and the directory of its socket."""

    pid: int
    directory: Path
    socket_dir: Path


@attrs.frozen
class Cluster:
    """Files and processes of one cluster. `ensure_…` and `stop` must be called within `serialized`.

    Processes that a former server has left behind get `orphans_timeout_s` seconds to end.
    """

    data_dir: Path
    version: int
    programs: ServerPrograms
    orphans_timeout_s: float = ORPHANS_TIMEOUT_S

    @classmethod
    def in_directory(cls, data_dir: Path, version: int, bin_dir: Path | None = None) -> Cluster:
        """Return the cluster in `data_dir`, with its programs and its user; create the directory if it is missing.

        Raises `EmbeddedDatabaseError` if the directory has another version or owner, `ConfigError` if it cannot be
        created.
        """
        bin_dir = bin_dir or programs_of(version)
        data_dir = make_writable(data_dir.expanduser())
        check_own(data_dir)
        other_versions = [found for found in versions_in(data_dir) if found != version]
        if other_versions:
            raise EmbeddedDatabaseError(
                f"The data directory {data_dir} has a cluster of PostgreSQL {other_versions[0]}, but this is "
                f"PostgreSQL {version}: choose another data directory, and move the data with "
                "`dataloader backup` and `restore`"
            )
        account = system_user() if os.geteuid() == 0 else None
        # Not by getpwuid: in a container this process may run as a user without an account.
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
        """Name that is unique on this machine. The command line of each of the cluster's processes shows it."""
        return "dataloader-" + hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:16]

    @property
    def password_path(self) -> Path:
        """File with the superuser's password, which only its owner can read."""
        return self.data_dir / "postgres.password"

    def serialized(self) -> AbstractContextManager[None]:
        """Return a block in which no other process starts, joins or stops the server."""
        return members.serialized(self.data_dir, LONGEST_STEP_S)

    def membership(self) -> AbstractContextManager[None]:
        """Return a block that counts as a user of the server; the last one to leave stops it."""
        return members.membership(self.data_dir, LONGEST_STEP_S, self.stop)

    def has_members(self) -> bool:
        """Return whether any process uses the server. Call it within `serialized`, so that none joins or leaves."""
        return members.has_members(self.data_dir)

    def ensure_initialized(self, *, durable: bool) -> None:
        """Create the cluster if there is none. If this process is killed, no incomplete cluster takes its place."""
        for leftover in self.data_dir.glob(f"{self.directory.name}.*.new"):
            shutil.rmtree(leftover, ignore_errors=True)  # an initdb whose starter was killed may still write there
        if self.directory.exists():
            return
        new = Path(tempfile.mkdtemp(prefix=f"{self.directory.name}.", suffix=".new", dir=self.data_dir))
        try:
            self.programs.give_to_server(new)
            password = secrets.token_urlsafe(32)
            reader, writer = os.pipe()  # not a file, which a crash would leave behind
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
                    # Version 17 introduced its own C.UTF-8; before, the machine's might be missing.
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
        """Start the server, or wait for one that is starting or recovering, until it accepts connections.

        It is started only once. Raises `EmbeddedDatabaseError` if it ends again, or is not ready within
        `START_TIMEOUT_S`.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        started = False
        while (state := self.state()) != "ready":
            if time.monotonic() > deadline:
                raise self.programs.error(
                    f"PostgreSQL did not become ready in {START_TIMEOUT_S:.0f} s and is still starting"
                )
            if state == "busy":
                time.sleep(0.05)
            elif started:
                raise self.programs.error("PostgreSQL ended immediately after its start")
            else:
                started = True
                self._start(extra_settings, deadline)

    def state(self) -> Literal["ready", "busy", "absent"]:
        """Return whether the server accepts connections; `busy` means starting, recovering, stopping or stuck.

        A lock file that names another directory was copied with the files and belongs to another server. The socket is
        tried first, because it also answers across containers that share the directory. A process ID alone proves
        nothing: it may belong to another process by now, or to a zombie.
        """
        try:
            postmaster = self.postmaster()
        except (FileNotFoundError, IndexError, ValueError):  # there is none, or it is not completely written yet
            return "absent"
        if postmaster.directory != self.directory.resolve():
            return "absent"
        if postmaster.socket_dir.is_absolute():  # the line is empty until the server listens
            arguments = ["--host", str(postmaster.socket_dir), "--port", PORT, "--timeout", "3", "--quiet"]
            answer = self.programs.run(["pg_isready", *arguments]).returncode
            if answer in {0, 1}:  # 0: accepts connections; 1: refuses them now
                return "ready" if answer == 0 else "busy"
        return "busy" if self.owns_process(postmaster.pid) else "absent"

    def postmaster(self) -> Postmaster:
        """Return the server that the lock file names, which may be stale."""
        lines = (self.directory / "postmaster.pid").read_text().splitlines()
        return Postmaster(pid=int(lines[0]), directory=Path(lines[1]), socket_dir=Path(lines[4]))

    def stop(self) -> None:
        """Stop the server if it accepts connections. A recovering server is left running; the next start finds it."""
        if self.state() == "ready":
            postmaster = self.postmaster()
            socket_dir = postmaster.socket_dir
            timeout = f"--timeout={STOP_TIMEOUT_S:.0f}"
            # pg_ctl waits until the lock file is gone, which the server removes shortly before it ends.
            with self._awaiting_end_of(postmaster.pid):
                self.programs.run_as_server(
                    "pg_ctl", "stop", "--pgdata=.", "--mode=fast", "--wait", timeout, cwd=self.directory
                )
            if socket_dir != self.directory:
                with contextlib.suppress(OSError):
                    socket_dir.rmdir()

    @contextlib.contextmanager
    def _awaiting_end_of(self, pid: int) -> Iterator[None]:
        """Wait for the end of our process `pid` after the block that stops it, at most `STOP_TIMEOUT_S` seconds."""
        process, ended = None, select.poll()
        with contextlib.suppress(OSError):  # it has ended, or runs in another container
            process = os.pidfd_open(pid)
        try:
            if process is not None and self.owns_process(pid):
                ended.register(process, select.POLLIN)
            yield
            ended.poll(STOP_TIMEOUT_S * 1_000)
        finally:
            if process is not None:
                os.close(process)

    def _start(self, extra_settings: Mapping[str, str], deadline: float) -> None:
        """Start a server if none runs, also after a crash."""
        self._end_orphans()
        server_lock = self._lock_for_server()
        try:
            self._start_with(server_lock, extra_settings, deadline)
        finally:
            os.close(server_lock)

    def _lock_for_server(self) -> int:
        """Take the lock that the server inherits and holds while one of its processes lives."""
        lock = open_lock(self.data_dir / "server.lock")
        with contextlib.ExitStack() as unless_locked:
            unless_locked.callback(os.close, lock)
            try:
                lock_alone(lock, self.orphans_timeout_s)
            except TimeoutError:
                raise self.programs.error(
                    f"The cluster {self.directory} is in use by a server that cannot be reached here: it was started "
                    "with another path, in another container or on another machine; use or stop it there"
                ) from None
            unless_locked.pop_all()
        return lock

    def _start_with(self, server_lock: int, extra_settings: Mapping[str, str], deadline: float) -> None:
        """Start a server that inherits the lock."""
        # Both lock files name the process that has ended. If its ID is in use again, even by a zombie, PostgreSQL
        # refuses to start.
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
        # pg_ctl passes its paths to a shell within double quotes, so it gets relative ones.
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
        """Return whether `pid` is a process of this cluster, by the part of /proc that every user can read."""
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
        """Kill the processes that a killed server left behind. They block the next server until they notice its end.

        This is as safe as the crash before: recovery by the write-ahead log repairs both.
        """
        deadline = time.monotonic() + self.orphans_timeout_s
        pids = [int(process.name) for process in Path("/proc").iterdir() if process.name.isdigit()]
        while pids := [pid for pid in pids if self.owns_process(pid)]:
            if time.monotonic() > deadline:
                raise self.programs.error(f"Processes {pids} of a server that crashed in {self.directory} do not end")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _socket_dir(self) -> Path:
        """Return the socket's directory: the cluster's, or a private one if that path does not fit a socket."""
        if _fits_socket(self.directory):
            return self.directory
        bases = [Path("/tmp")]  # noqa: S108 - for a directory of a known name, whose owner and mode are checked
        if os.geteuid() != 0:  # the server's user cannot enter root's own directories
            bases = [Path(os.environ.get("XDG_RUNTIME_DIR", "/nonexistent")), Path(tempfile.gettempdir()), *bases]
        for base in bases:
            if os.access(base, os.W_OK | os.X_OK) and _fits_socket(base / self.name):
                return self._private_directory(base / self.name)
        raise EmbeddedDatabaseError(
            f"The paths of the data directory {self.data_dir} and of TMPDIR are too long for a socket"
        )

    def _private_directory(self, path: Path) -> Path:
        """Make `path` a directory that only the server's user can enter, even if others can write to its parent."""
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            self.programs.give_to_server(path)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != self.programs.uid or stat.S_IMODE(found.st_mode) & 0o077:
            raise EmbeddedDatabaseError(
                f"{path} must be a directory of user ID {self.programs.uid} with mode 0700, for the server's socket"
            )
        return path

    def _prepare_log(self) -> None:
        """Create a log file that only the server's user can write; rename one that is too large to `.log.1`."""
        with contextlib.suppress(FileNotFoundError):
            if self.programs.log_path.stat().st_size > LOG_LIMIT_BYTES:
                self.programs.log_path.replace(self.programs.log_path.with_suffix(".log.1"))
        log = os.open(self.programs.log_path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.programs.give_to_server(log)
        os.close(log)

    def read_password(self) -> str:
        """Return the password of the superuser `postgres`."""
        try:
            return self.password_path.read_text()
        except FileNotFoundError:
            raise EmbeddedDatabaseError(
                f"The password of the cluster {self.directory} is missing; restore the file {self.password_path}"
            ) from None

    def _check_owner(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            owner = self.directory.stat().st_uid
            if owner != self.programs.uid:
                raise EmbeddedDatabaseError(
                    f"The cluster {self.directory} belongs to user ID {owner}, but the server would run as user ID "
                    f"{self.programs.uid}: start it as the user who created it, or choose another data directory"
                )


def _fits_socket(directory: Path) -> bool:
    """Return whether the path of a socket in `directory` is short enough to bind and needs no quotes in an address."""
    path = directory / f".s.PGSQL.{PORT}"
    return len(os.fsencode(path)) <= SOCKET_PATH_LIMIT_BYTES and re.fullmatch(r"[\w./+-]+", str(path)) is not None
