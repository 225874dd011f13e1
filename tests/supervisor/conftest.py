"""Fixtures for the supervisor's tests: the command line as a real process, with nothing of this machine's settings."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest


def command_environment(**settings: str) -> dict[str, str]:
    """The environment of this process without any setting of ours, and `settings` in it."""
    ours = ("DL_", "WORKERS_JSON", "PG")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | settings


@pytest.fixture
def dataloader(tmp_path):
    """Runs `dataloader` in an empty directory: positional arguments are its own, keywords its settings."""

    def run(*arguments: object, stdin: str = "", **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dataloader", *map(str, arguments)],
            cwd=tmp_path,
            env=command_environment(**settings),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def on_database(dataloader, database):
    """Runs `dataloader` with the test's database as DL_DB_DSN."""
    return functools.partial(dataloader, DL_DB_DSN=database.dsn)


@pytest.fixture
def start(tmp_path):
    """Starts `dataloader` as `dataloader` runs it; gives the process, which is ended with the test."""
    started = []

    def start(*arguments: object, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **settings: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "dataloader", *map(str, arguments)],
            cwd=tmp_path,
            env=command_environment(**settings),
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=20)


@pytest.fixture
def add(on_database):
    """Triggers a job in the test's database; its id comes back."""

    def add(*arguments: object) -> str:
        result = on_database("trigger", *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout.split()[0]

    return add
