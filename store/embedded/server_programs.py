"""Runs PostgreSQL's own programs (initdb, pg_ctl, pg_isready) with the account of the server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, Final

import attrs

from dataloader.jobs.errors import EmbeddedDatabaseError
from dataloader.store.embedded.server_account import package_utils

LOG_TAIL_BYTES: Final = 10_000


@attrs.frozen
class ServerPrograms:
    """Programs in `bin_dir` for the server of `data_dir`, whose account has `uid` and `gid`.

    No program runs longer than `timeout_s` seconds.
    """

    data_dir: Path
    bin_dir: Path
    uid: int
    gid: int
    timeout_s: float

    @property
    def log_path(self) -> Path:
        """The server's log file."""
        return self.data_dir / "postgres.log"

    def give_to_server(self, file: str | Path | int) -> None:
        """Give a file that root has created to the server's account."""
        if os.geteuid() == 0:
            os.chown(file, self.uid, self.gid)

    def run_as_server(
        self, program: str, *arguments: str, cwd: Path | None = None, pass_fds: tuple[int, ...] = ()
    ) -> None:
        """Run a program with the server's account, and without our environment, which has secrets."""
        environment = {"PATH": os.defpath, "LC_ALL": "C"} | {k: os.environ[k] for k in ("TZ",) if k in os.environ}
        options: dict[str, Any] = {"cwd": cwd or self.data_dir, "env": environment, "pass_fds": pass_fds}
        if os.geteuid() == 0:
            options |= {"user": self.uid, "group": self.gid, "extra_groups": ()}
        result = self.run([program, *arguments], **options)
        if result.returncode != 0:
            raise self.error(f"{program} failed for the data directory {self.data_dir}: {result.stdout.strip()}")

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; return its output and exit code."""
        try:
            return subprocess.run(  # noqa: S603 - fixed programs, no shell
                [str(self.bin_dir / command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
                start_new_session=True,  # Ctrl-C must not interrupt a start or a stop midway
                timeout=self.timeout_s,
                **options,
            )
        except subprocess.TimeoutExpired as error:
            raise self.error(f"{command[0]} did not end within {error.timeout:.0f} s for {self.data_dir}") from error

    def log_tail(self, lines: int) -> list[str]:
        """Return the last lines that the server has written."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES, 0))
                return log.read().decode(errors="replace").splitlines()[-lines:]
        except OSError:
            return []

    def error(self, message: str) -> EmbeddedDatabaseError:
        """Return an error that ends with the last lines of the server's log."""
        return EmbeddedDatabaseError("\n".join([message, *self.log_tail(20)]))


def programs_of(version: int) -> Path:
    """Return the folder of PostgreSQL's programs. Raises `EmbeddedDatabaseError` without the extra or the version."""
    try:
        found: dict[int, Path] = package_utils().POSTGRES_VERSIONS
    except ImportError as error:
        raise EmbeddedDatabaseError(
            "The embedded PostgreSQL is not installed: pip install 'dataloader-supervisor[embedded]', or set "
            "DL_DB_DSN to the address of a database"
        ) from error
    if version not in found:
        raise EmbeddedDatabaseError(
            f"The embedded PostgreSQL {version} is not available; versions: {', '.join(map(str, sorted(found)))}"
        )
    return found[version]
