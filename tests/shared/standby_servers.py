"""Primary and its streaming standby: two servers of Debian's package, each with its own TCP port and directory.

The embedded package has no pg_basebackup. Services and clients reach both by one address with two hosts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import attrs
import trio
from databases import is_at_hand, programs_of, raw_connection
from lacking import skip_without

from dataloader.store.embedded.server_account import open_path, system_user
from dataloader.store.embedded.server_programs import ServerPrograms

VERSION: Final = 15
STANDBY: Final = "standby"
"""Name by which a primary knows its standby."""
SETTINGS: Final = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_connections": "100",
    "listen_addresses": "127.0.0.1",
    "log_line_prefix": "%m [%p] %a: ",
}


def need_programs() -> Path:
    """Return the folder of the programs. Without them the test is skipped, in CI it fails."""
    if not is_at_hand(VERSION):
        skip_without(f"no PostgreSQL {VERSION} for a standby: install Debian's package, or set POSTGRES_BIN_{VERSION}")
    programs = programs_of(VERSION)
    assert programs is not None
    return programs


@attrs.frozen
class Server:
    """One of the two servers; every user of this machine may connect as the superuser, without a password."""

    programs: ServerPrograms
    port: int

    @classmethod
    def in_directory(cls, directory: Path, bin_dir: Path) -> Server:
        """Return a server whose files will be in `directory`, on a free port."""
        directory.mkdir()
        account = system_user() if os.geteuid() == 0 else None
        uid, gid = (os.geteuid(), os.getegid()) if account is None else (account.pw_uid, account.pw_gid)
        if account is not None:
            open_path(directory)
        programs = ServerPrograms(directory, bin_dir, uid, gid, 120)
        programs.give_to_server(directory)
        with socket.create_server(("127.0.0.1", 0)) as free:
            return cls(programs, free.getsockname()[1])

    @property
    def data(self) -> Path:
        """PostgreSQL's own directory."""
        return self.programs.data_dir / "data"

    def dsn(self, database: str = "jobs") -> str:
        """Return the address of this server only."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}?sslmode=disable"

    @property
    def socket_dsn(self) -> str:
        """Address by its socket, for a proxy."""
        return f"postgresql://postgres@:{self.port}/jobs?host={self.data}"

    def create(self) -> None:
        """Create an empty cluster."""
        options = ("--auth=trust", "--username=postgres", "--no-sync", "--encoding=UTF8", "--locale=C")
        self.programs.run_as_server("initdb", "--pgdata=data", *options)

    @staticmethod
    def conninfo_of(primary: Server) -> str:
        """Return the address of `primary` for a standby."""
        return f"host=127.0.0.1 port={primary.port} user=postgres application_name={STANDBY}"

    def copy(self, primary: Server) -> None:
        """Make this server a standby of `primary`."""
        source = self.conninfo_of(primary)
        copied = ("--checkpoint=fast", "--wal-method=stream", "--no-sync", "--write-recovery-conf")
        self.programs.run_as_server("pg_basebackup", "--pgdata=data", f"--dbname={source}", *copied)

    def start(self, **settings: str) -> None:
        """Start it with these settings, which a restart by the server itself keeps."""
        given = SETTINGS | {"port": str(self.port), "unix_socket_directories": "."} | settings
        options = " ".join(f"--{name}='{value}'" for name, value in given.items())
        self.programs.run_as_server(
            "pg_ctl", "start", "--wait", "--pgdata=data", "--log=postgres.log", f"--options={options}"
        )

    def stop(self, mode: str) -> None:
        """Stop it: `immediate` is a crash."""
        self.programs.run_as_server("pg_ctl", "stop", "--pgdata=data", f"--mode={mode}", "--wait")

    def promote(self) -> None:
        """Promote a standby to a primary."""
        self.programs.run_as_server("pg_ctl", "promote", "--pgdata=data", "--wait")

    async def run(self, what: str, *args: str, **settings: str) -> None:
        """Run one of the methods above in a thread."""
        await trio.to_thread.run_sync(partial(getattr(self, what), *args, **settings))

    async def fetch(self, sql: str, *args: object) -> list[Any]:
        """Run a query on a new connection."""
        async with raw_connection(self.dsn()) as raw:
            return await raw.fetch(sql, *args)

    async def execute(self, sql: str, database: str = "jobs") -> None:
        """Run a statement on a new connection."""
        async with raw_connection(self.dsn(database)) as raw:
            await raw.execute(sql)

    async def fetchval(self, sql: str, *args: object) -> Any:
        """Return the first value of a query."""
        return (await self.fetch(sql, *args))[0][0]


@attrs.frozen
class Pair:
    """Both servers. `address` has both hosts, the first primary first."""

    primary: Server
    standby: Server

    @property
    def address(self) -> str:
        """Address of services and clients."""
        hosts = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}"
        return f"postgresql://postgres@{hosts}/jobs?target_session_attrs=read-write&sslmode=disable"

    async def lag(self) -> int:
        """Return the number of bytes of the primary's log that the standby has not replayed."""
        sql = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), replay_lsn)::bigint FROM pg_stat_replication"
        return await self.primary.fetchval(sql)

    async def cut(self) -> None:
        """Stop replication: from now on, commits on the primary are lost with it."""
        await self.standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
        await self.standby.execute("SELECT pg_reload_conf()")

    async def join(self) -> None:
        """Resume replication."""
        await self.standby.execute(f"ALTER SYSTEM SET primary_conninfo = '{self.standby.conninfo_of(self.primary)}'")
        await self.standby.execute("SELECT pg_reload_conf()")

    async def is_cut(self) -> bool:
        """Return True if the primary has no standby anymore."""
        return not await self.primary.fetch("SELECT FROM pg_stat_replication")


@contextlib.contextmanager
def standby_pair(*, synchronous: bool) -> Iterator[Pair]:
    """Run a primary with a streaming standby for the duration of a block; the database `jobs` is empty."""
    bin_dir = need_programs()
    memory = Path("/dev/shm")
    folder = TemporaryDirectory(prefix="dataloader-tests-", dir=memory if os.access(memory, os.W_OK) else None)
    with folder as directory, contextlib.ExitStack() as stack:
        primary, standby = (Server.in_directory(Path(directory, name), bin_dir) for name in ("one", "two"))
        primary.create()
        primary.start()
        stack.callback(_end, primary)
        standby.copy(primary)
        standby.start()
        stack.callback(_end, standby)
        primary.programs.run_as_server("createdb", f"--maintenance-db={primary.dsn('postgres')}", "jobs")
        if synchronous:
            _set(primary, "synchronous_standby_names", STANDBY)
        yield Pair(primary, standby)


def _set(server: Server, name: str, value: str) -> None:
    for statement in (f"ALTER SYSTEM SET {name} = '{value}'", "SELECT pg_reload_conf()"):
        server.programs.run_as_server("psql", "-Xq", f"--dbname={server.dsn('postgres')}", "-c", statement)


def _end(server: Server) -> None:
    if (server.data / "postmaster.pid").exists():
        with contextlib.suppress(Exception):
            server.stop("immediate")
    shutil.rmtree(server.data, ignore_errors=True)
