"""Fixtures for the tests of a module of tasks: `pytest_plugins = ["dataloader.pytest"]` in `conftest.py`.

`dataloader_dsn` is the address of a migrated database for one test. One server, with one template database that is
copied, serves the session; it needs the extra `testing`. The database has the defaults of the tasks that the fixture
`dataloader_tasks` returns: override that fixture, with the scope of the session.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import trio

from dataloader.jobs.tasks import Tasks
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.testing import temporary_database


@pytest.fixture(scope="session")
def dataloader_tasks() -> Tasks | None:
    """Tasks whose queues and other defaults each test's database has; none until a `conftest.py` overrides it."""
    return None


@pytest.fixture(scope="session")
def _dataloader_databases(dataloader_tasks: Tasks | None) -> Iterator[Callable[[], str]]:
    """Return a function that creates a database and returns its address."""
    numbers = itertools.count(1)
    with temporary_database(dataloader_tasks) as template, ThreadPoolExecutor(1) as thread:

        def make() -> str:
            name = f"dataloader_test_{next(numbers)}"
            # In a thread, since the test may already be in a Trio run.
            thread.submit(trio.run, _copy, template, name).result()
            return _other(template, name)

        yield make


@pytest.fixture
def dataloader_dsn(_dataloader_databases: Callable[[], str]) -> str:
    """Address of a migrated database for one test. It is removed with the session's server."""
    return _dataloader_databases()


async def _copy(template: str, name: str) -> None:
    async with open_database(DatabaseOptions(dsn=_other(template, "postgres"))) as database:
        await database.run(_aio_copy, urlsplit(template).path.removeprefix("/"), name)


async def _aio_copy(connection: object, template: str, name: str) -> None:
    await connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')  # type: ignore[attr-defined]


def _other(dsn: str, name: str) -> str:
    return urlsplit(dsn)._replace(path=f"/{name}").geturl()
