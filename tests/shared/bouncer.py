"""PgBouncer in front of PostgreSQL, from `PGBOUNCER` or the path. Version 1.21 and later keep prepared statements."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import attrs
import pytest
import trio
from conditions import until
from lacking import skip_without
from pooler import AUTHENTICATED, PROTOCOL, Messages, packed, texts
from proxy import open_proxy

NEEDED = (1, 21)
CONSOLE = "pgbouncer"


def find_bouncer(*, keeps_statements=True):
    """Return the program's path, or None and the reason. With `keeps_statements` it must be new enough for that."""
    program = os.environ.get("PGBOUNCER") or shutil.which(CONSOLE, path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        return None, "PgBouncer is not installed: install Debian's package, or set PGBOUNCER"
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=10).stdout
    version = tuple(int(number) for number in re.findall(r"\d+", said)[:2])
    if keeps_statements and version < NEEDED:
        found, needed = (".".join(map(str, one)) for one in (version, NEEDED))
        return None, f"{program}: version {found} is too old, {needed} is needed: set PGBOUNCER"
    return program, ""


@pytest.fixture(scope="session")
def bouncer():
    """Return PgBouncer's path. Without it the test is skipped; in CI it fails."""
    return _found(keeps_statements=False)


@pytest.fixture(scope="session")
def new_bouncer():
    """Return the path of a PgBouncer that keeps prepared statements. With an older one the test is skipped."""
    return _found(keeps_statements=True)


def _found(*, keeps_statements):
    program, why_not = find_bouncer(keeps_statements=keeps_statements)
    if program is None:
        # Debian's stable version may be too old, which is not a fault of the machine.
        (pytest.skip if find_bouncer(keeps_statements=False)[0] else skip_without)(why_not)
    return program


@attrs.frozen
class Bouncer:
    """Running PgBouncer with at most `size` connections to the server; `dsn` leads to it."""

    dsn: str
    port: int
    user: str

    async def is_shared(self, *roles):
        """Return True if it carries connections of exactly the allowed roles, on fewer connections of its own."""
        # Their connections are reset between transactions, and with PgBouncer the application name from the start also
        # is.
        names = [client["application_name"] or "transaction" for client in await self._show("CLIENTS")]
        clients = [name.rpartition(" ")[2] for name in names]
        servers = await self._show("SERVERS")
        came = {*clients}
        return {*roles} <= came and not {"locks", "listener"} & came and 0 < len(servers) < len(clients)

    async def _show(self, what):
        """Return a table of its console, as dictionaries of texts."""
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            messages = Messages(stream)
            hello = texts("user", self.user, "database", CONSOLE, "application_name", "test console", "")
            await stream.send_all(packed(b"", PROTOCOL.to_bytes(4) + hello))
            kind, body = await messages.next()
            assert (kind, body) == (b"R", AUTHENTICATED.to_bytes(4)), body
            await _until_ready(messages)
            await stream.send_all(packed(b"Q", texts(f"SHOW {what}")))
            return [row for row in await _until_ready(messages) if row.get("database") != CONSOLE]


async def _until_ready(messages):
    names, rows = [], []
    while True:
        match await messages.next():
            case b"T", body:
                names = _columns(body)
            case b"D", body:
                rows.append(dict(zip(names, _values(body), strict=True)))
            case b"E", body:
                raise RuntimeError(body)
            case b"Z", _:
                return rows


def _columns(body):
    names, rest = [], body[2:]
    for _ in range(int.from_bytes(body[:2])):
        name, _, rest = rest.partition(b"\0")
        names.append(name.decode())
        rest = rest[18:]
    return names


def _values(body):
    values, rest = [], body[2:]
    for _ in range(int.from_bytes(body[:2])):
        length = int.from_bytes(rest[:4], signed=True)
        values.append(None if length < 0 else rest[4 : 4 + length].decode())
        rest = rest[4 + max(0, length) :]
    return values


@asynccontextmanager
async def open_bouncer(
    dsn: str, *, size: int, ignored: frozenset[str], program: str, mode: str = "transaction", settings: str = ""
) -> AsyncIterator[Bouncer]:
    """Run PgBouncer on a free port of this machine, in transaction mode, in front of the server of `dsn`.

    `settings` are additional lines of its file. By default it keeps prepared statements, if it can.
    """
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    # The account that PgBouncer runs as cannot open the folder of the server's socket.
    async with open_proxy(dsn) as proxy:
        server = urlsplit(proxy.dsn)
        database = server.path.removeprefix("/")
        ini = f"""
[databases]
{database} = host={server.hostname} port={server.port} user={server.username} password={server.password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {size}
{settings or "max_prepared_statements = 100"}
ignore_startup_parameters = {", ".join(sorted(ignored))}
"""
        with _running(program, ini) as process:
            await until(partial(_listens, port, process))
            address = f"postgresql://{server.username}:nobody-asks@127.0.0.1:{port}/{database}?sslmode=disable"
            yield Bouncer(address, port, server.username)


@contextmanager
def _running(program, ini):
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as file:
        file.write(ini)
        file.flush()
        Path(file.name).chmod(0o644)
        # It refuses to run as root.
        with subprocess.Popen([program, "--quiet", file.name], user="nobody" if os.getuid() == 0 else None) as process:
            try:
                yield process
            finally:
                process.kill()


async def _listens(port, process):
    assert process.poll() is None, "PgBouncer has ended"
    try:
        await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
    except OSError:
        return False
    return True
