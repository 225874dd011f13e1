"""Fixtures for tests of the command line, without any settings of this machine.

`dataloader` runs a command within the test's process, which takes a tenth of the time of a new one. `start` runs it as
a process, for tests of signals, terminals, pipes, and services.
"""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys

import attrs
import pytest

from dataloader.cli.entry import run_command_line

OURS = ("DL_", "WORKERS_JSON", "PG")


@attrs.frozen
class Ended:
    """Result of a command: its exit code and output."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def dataloader(tmp_path, monkeypatch, capfd):
    """Return a function that runs a command in an empty directory: arguments are the command's, keywords settings."""

    def dataloader(*arguments: object, stdin: str = "", **settings: str) -> Ended:
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(OURS)]:
                patch.delenv(name)
            for name, value in settings.items():
                patch.setenv(name, value)
            patch.chdir(tmp_path)
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
            patch.setattr(sys, "path", [*sys.path])
            code = run_command_line([str(argument) for argument in arguments])
        return Ended(code, *capfd.readouterr())

    return dataloader


@pytest.fixture
def on_database(dataloader, database):
    """Return `dataloader` with the test's database as DL_DB_DSN."""
    return functools.partial(dataloader, DL_DB_DSN=database.dsn)


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a command as a process, which is ended with the test; arguments as `dataloader`."""
    started = []

    def start(
        *arguments: object, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings: str
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "dataloader", *map(str, arguments)],
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if not name.startswith(OURS)} | settings,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=20)
