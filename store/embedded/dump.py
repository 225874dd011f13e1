"""Backup and restore of the embedded database, by the programs that came with its server and fit its version.

All functions block. A backup has the database as of one point in time, and is taken while the database is in use; its
file gets its name only when it is complete. A restore fills a new database beside the present one, and replaces that in
one step. If it is interrupted, one of the two is there and complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

from dataloader.jobs.errors import ConfigError, EmbeddedDatabaseError
from dataloader.store.embedded.cluster import VERSION
from dataloader.store.embedded.data_dir import sync_directory
from dataloader.store.embedded.file_lock import lock_alone
from dataloader.store.embedded.postgres import DATABASE, EmbeddedPostgres
from dataloader.store.embedded.server_programs import programs_of

RESTORED: Final = f"{DATABASE}_restored"
"""Database that a restore fills."""
REPLACED: Final = f"{DATABASE}_replaced"
"""Former database, renamed, until it is dropped."""
LOCK_TIMEOUT_S: Final = 60
"""Seconds for which a backup waits for tables that another session has locked exclusively."""
PSQL_TIMEOUT_S: Final = 600.0

_STAGES: Final = "*.dl_stage_*"
"""Staging tables of loads, which a run creates, fills and drops; a new run fills them again."""
_JOBS: Final = re.compile(r"TABLE DATA \S+ dl_jobs\b")
_TABLE: Final = re.compile(r'(?:dumping contents of|processing data for) table "(.+)"$')
_USED: Final = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""
"""It counts client connections only: the server's own processes, such as autovacuum, leave by themselves."""
_NOT_EMPTY: Final = r"""
SELECT format('SELECT 1 FROM %s LIMIT 1', c.oid::regclass)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND n.nspname NOT IN ('pg_catalog', 'information_schema')
  AND c.relname NOT IN ('dl_migrations', 'dl_function_sets', 'dl_workers', 'dl_depths') \gexec
"""


def back_up(server: EmbeddedPostgres, file: Path, tell: Callable[[str], object]) -> int:
    """Write the database as it is now to `file`, which only its owner can read; return its size in bytes.

    Args:
        server: the running server.
        file: must not exist.
        tell: called with the name of each table when its dump begins.

    Raises:
        ConfigError: the file already exists, or cannot be written.
        EmbeddedDatabaseError: the database cannot be read.
    """
    _check_free(file)
    part = file.with_name(f".{file.name}.part")
    options = ("--format=custom", "--verbose", f"--exclude-table={_STAGES}", f"--lock-wait-timeout={LOCK_TIMEOUT_S}s")
    dump = server.program("pg_dump", *options)
    try:
        with _open_alone(part, file) as output:
            try:
                _check_free(file)
                _run(dump, tell, output)
                os.fsync(output.fileno())
                part.rename(file)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            size = os.fstat(output.fileno()).st_size
        sync_directory(file.parent)
    except OSError as error:
        raise ConfigError(f"FILE: {file} cannot be written: {error.strerror}") from error
    return size


def _check_free(file: Path) -> None:
    if file.exists():
        raise ConfigError(f"FILE: {file} already exists; choose another name, or remove it")


def _open_alone(part: Path, file: Path) -> IO[bytes]:
    """Open the unfinished file of a backup. It is empty, and locked while we or our pg_dump have it open.

    The file of a killed backup is used again.
    """
    while True:
        output = os.fdopen(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb")
        with contextlib.ExitStack() as unless_ours:
            unless_ours.callback(output.close)
            try:
                lock_alone(output.fileno(), 0)
            except TimeoutError:
                raise ConfigError(f"FILE: another backup to {file} is in progress; wait until it ends") from None
            found = os.fstat(output.fileno())
            if found.st_uid != os.geteuid():
                raise ConfigError(f"FILE: {part} belongs to another user; remove it, or choose another name")
            # Otherwise another backup has ended meanwhile and has renamed or removed this file: open it again.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(found, part.lstat()):
                    output.truncate(0)
                    unless_ours.pop_all()
                    return output


def check_backup(file: Path) -> None:
    """Read all of a backup, without a server. Raises `ConfigError` if it is no backup, is broken, or has no queue."""
    if file.exists() and not file.is_file():  # it is read several times, and a pipe could block its reader for ever
        raise ConfigError(f"FILE: must be a regular file, not {file}")
    try:
        listed = _read_archive(file, "--list")
        _read_archive(file, "--file=/dev/null")
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().removeprefix("pg_restore: ").removeprefix("error: ")
        raise ConfigError(f"FILE: {file} is not a backup that PostgreSQL {VERSION} can read ({reason})") from error
    if _JOBS.search(listed) is None:
        raise ConfigError(f"FILE: {file} is the backup of another database: it has no table dl_jobs")


def _read_archive(file: Path, how: str) -> str:
    command = [str(programs_of(VERSION) / "pg_restore"), how, _argument(file)]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout  # noqa: S603


def _argument(file: Path) -> str:
    """Return the file's absolute path, because programs take a name that begins with a hyphen for an option."""
    return str(file.absolute())


def restore(server: EmbeddedPostgres, file: Path, tell: Callable[[str], object], *, replace: bool) -> None:
    """Restore the database as it was when `file` was written.

    Args:
        server: the running server, of the version that wrote the file or a newer one.
        file: a backup in which `check_backup` has found no fault.
        tell: called with the name of each table when its restore begins.
        replace: whether a database that is not empty may be replaced.

    Raises:
        ConfigError: the database is not empty and may not be replaced.
        EmbeddedDatabaseError: the database is in use, or the backup cannot be restored; then nothing has changed.
    """
    # Of two concurrent restores, one would put the other's unfinished database in place.
    with _alone(server):
        _restore(server, file, tell, replace=replace)


@contextlib.contextmanager
def _alone(server: EmbeddedPostgres) -> Iterator[None]:
    lock = os.open(server.data_dir / "restore.lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            lock_alone(lock, 0)
        except TimeoutError:
            message = f"Another restore into {server.data_dir} is in progress; wait until it ends"
            raise EmbeddedDatabaseError(message) from None
        yield
    finally:
        os.close(lock)


def _restore(server: EmbeddedPostgres, file: Path, tell: Callable[[str], object], *, replace: bool) -> None:
    if not replace and _psql(server, DATABASE, _NOT_EMPTY):
        raise ConfigError(
            f"--replace: is required, because the database in {server.data_dir} is not empty; it deletes all its data"
        )
    if (connections := _psql(server, DATABASE, _USED)) != "0":
        raise _in_use(server, f"{connections} {'connection' if connections == '1' else 'connections'}")
    drop = "".join(f"DROP DATABASE IF EXISTS {name} WITH (FORCE);\n" for name in (RESTORED, REPLACED))
    _psql(server, "postgres", f"{drop}CREATE DATABASE {RESTORED} TEMPLATE template0")
    try:
        options = ("--exit-on-error", "--single-transaction", "--verbose")
        _run(server.program("pg_restore", *options, f"--dbname={RESTORED}", _argument(file)), tell)
        _psql(server, RESTORED, "ANALYZE")
        try:
            _psql(
                server,
                "postgres",
                f"BEGIN; ALTER DATABASE {DATABASE} RENAME TO {REPLACED};"
                f" ALTER DATABASE {RESTORED} RENAME TO {DATABASE}; COMMIT",
            )
        except EmbeddedDatabaseError as error:
            if "being accessed by other users" not in str(error):
                raise
            raise _in_use(server, "another connection") from error
    finally:
        _psql(server, "postgres", drop)


def _in_use(server: EmbeddedPostgres, users: str) -> EmbeddedDatabaseError:
    return EmbeddedDatabaseError(
        f"The database in {server.data_dir} is in use by {users}: stop the processes that use it, then restore again"
    )


def _psql(server: EmbeddedPostgres, database: str, statements: str) -> str:
    """Run statements and return their rows as text."""
    command, environment = server.psql("-XqAt", "-v", "ON_ERROR_STOP=1", database=database)
    result = subprocess.run(  # noqa: S603
        command, env=environment, input=statements, capture_output=True, text=True, check=False, timeout=PSQL_TIMEOUT_S
    )
    if result.returncode != 0:
        raise EmbeddedDatabaseError(f"The database in {server.data_dir} returned an error: {result.stderr.strip()}")
    return result.stdout.strip()


def _run(
    program: tuple[list[str], dict[str, str]], tell: Callable[[str], object], output: IO[bytes] | None = None
) -> None:
    """Run a program to its end, without a timeout. `tell` gets the names of tables in its output.

    Raises `EmbeddedDatabaseError` with its errors if it fails.
    """
    command, environment = program
    said: deque[str] = deque(maxlen=10)
    with subprocess.Popen(  # noqa: S603
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output or subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stderr is not None  # noqa: S101 - for the type checker
        for line in process.stderr:
            if table := _TABLE.search(line):
                tell(table[1])
            elif "error:" in line or "detail:" in line.lower():
                said.append(line.rstrip())
    if process.returncode != 0:
        raise EmbeddedDatabaseError("\n".join([f"{Path(command[0]).name} failed", *said]))
