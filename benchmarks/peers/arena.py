"""Server, its databases, and the adaptors that run on them.

Jobs are loaded by the tool's own bulk call into a template, which is vacuumed and analyzed; every run works on a fresh
copy of it. All tools get the same server: the embedded PostgreSQL 18 as `dataloader` starts it, with full durability.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import psutil  # type: ignore[import-untyped]
import psycopg

from benchmarks.peers.contenders import Contender
from benchmarks.peers.program import Event, Program
from benchmarks.peers.progress import say
from dataloader.store.embedded.postgres import EmbeddedPostgres

COMMAND_TIMEOUT_S = 1800
Change = Callable[[psycopg.Connection[Any]], None]


@attrs.frozen
class Load:
    """Jobs to be enqueued before a run: `count` of them, numbered from `first`."""

    count: int
    first: int = 0
    key: str = ""
    delay_s: float = 0
    urgent: bool = False

    @property
    def arguments(self) -> list[str]:
        """Options of the adaptors."""
        text = [f"--count={self.count}", f"--first={self.first}", f"--key={self.key}", f"--delay={self.delay_s}"]
        return [*text, "--urgent"] if self.urgent else text


class Arena:
    """Creates databases, and runs adaptors on them."""

    def __init__(self, server: EmbeddedPostgres, directory: Path) -> None:
        self.server = server
        self._directory = directory
        self._templates: set[str] = set()
        self._admin = psycopg.connect(server.dsn_of("postgres"), autocommit=True)

    def fresh(
        self, contender: Contender, *loads: Load, change: Change | None = None, label: str = "", name: str = ""
    ) -> str:
        """Create a database with the tool's schema and these jobs, replacing one of that name; return its name.

        `change` is run once on the template, for rows that no call of a tool can create; `label` then names the
        template.
        """
        template = self._template(contender, loads, change, label)
        name = f"b_{contender.name.replace(' ', '_')}{name}"
        self.drop(name)
        self._admin.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY file_copy')
        self._admin.execute("CHECKPOINT")
        return name

    def _template(self, contender: Contender, loads: tuple[Load, ...], change: Change | None, label: str) -> str:
        key = "_".join(f"{x.count}f{x.first}k{x.key[:4]}d{x.delay_s:g}u{x.urgent:d}" for x in loads)
        name = f"t_{contender.peer}_{key}{label}"
        if name in self._templates:
            return name
        self.drop(name)  # one whose creation failed
        is_empty = not loads and change is None
        source = "template1" if is_empty else self._template(contender, (), None, "")
        began = time.monotonic()
        self._admin.execute(f'CREATE DATABASE "{name}" TEMPLATE "{source}"')
        if is_empty:
            self.call(contender, name, "setup")
        for load in loads:
            self.call(contender, name, "load", *load.arguments)
        with self.connect(name) as connection:
            if change is not None:
                change(connection)
            connection.execute("VACUUM ANALYZE")
        self._templates.add(name)
        say(f"{name} made in {time.monotonic() - began:.1f} s")
        return name

    def drop(self, name: str) -> None:
        """Drop a database, even if it has sessions."""
        self._admin.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def forget_templates(self) -> None:
        """Drop the templates, to free space: the next workload creates its own."""
        for name in self._templates:
            self.drop(name)
        self._templates.clear()

    def connect(self, database: str) -> psycopg.Connection[Any]:
        """Return a connection for the harness itself."""
        return psycopg.connect(self.server.dsn_of(database), autocommit=True)

    def call(self, contender: Contender, database: str, *arguments: str) -> list[Event]:
        """Run an adaptor's command to its end, and return its events."""
        with self._log(contender).open("ab") as log:
            result = subprocess.run(
                self._command(contender, arguments),
                env=self._environment(database),
                stdout=subprocess.PIPE,
                stderr=log,
                check=False,
                timeout=COMMAND_TIMEOUT_S,
            )
        if result.returncode:
            raise RuntimeError(f"{contender.name} {' '.join(arguments)}: exit {result.returncode}; see {log.name}")
        return [json.loads(line) for line in result.stdout.splitlines() if line.startswith(b"{")]

    def program(self, contender: Contender, database: str, *arguments: str) -> Program:
        """Start an adaptor's `worker` or `feed`."""
        return Program(self._command(contender, arguments), self._environment(database), self._log(contender))

    @contextlib.contextmanager
    def held_snapshot(self, contender: Contender, database: str) -> Iterator[None]:
        """Hold a snapshot in another session that is older than all work within the block."""
        with psycopg.connect(self.server.dsn_of(database)) as holder:
            holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            holder.execute(contender.rows.encode())
            yield

    def done(self, contender: Contender, connection: psycopg.Connection[Any]) -> int:
        """Return the number of jobs recorded as complete."""
        return scalar(connection, contender.done)

    def commits(self, database: str) -> int:
        """Return the number of transactions of the database."""
        statement = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = %s"
        return scalar(self._admin, statement, database)

    def backends_cpu_s(self, database: str) -> dict[int, float]:
        """Return the backends that serve the database, with the CPU seconds of each."""
        statement = "SELECT pid FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'"
        used = {}
        for (pid,) in self._admin.execute(statement, (database,)).fetchall():
            times = psutil.Process(pid).cpu_times()
            used[pid] = float(times.user + times.system)
        return used

    def _command(self, contender: Contender, arguments: tuple[str, ...]) -> list[str]:
        first, *rest = arguments
        return [sys.executable, "-m", contender.module, first, "--mode", contender.mode, *rest]

    def _environment(self, database: str) -> dict[str, str]:
        return os.environ | {"BENCH_DSN": self.server.dsn_of(database), "NO_LOG_SUCCESS": "1"}

    def _log(self, contender: Contender) -> Path:
        return self._directory / f"{contender.peer}.err"


def scalar(connection: psycopg.Connection[Any], statement: str, *parameters: object) -> int:
    """Return the only value of a statement's only row."""
    row = connection.execute(statement.encode(), parameters or None).fetchone()
    assert row is not None
    return int(row[0] or 0)
