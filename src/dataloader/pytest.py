"""Fixtures for the tests of a module of tasks: `pytest_plugins = ["dataloader.pytest"]` in `conftest.py`.

`dataloader_dsn` is the address of a migrated database that is the test's own. One server, with one database from which
the others are copied, serves the session; it needs the extra `testing`. It knows the defaults of the tasks that the
fixture `dataloader_tasks` returns: override that one, with the scope of the session.
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
    """The tasks whose queues and other defaults each test's database knows; none until a `conftest.py` overrides it."""
    return None


@pytest.fixture(scope="session")
def _dataloader_databases(dataloader_tasks: Tasks | None) -> Iterator[Callable[[], str]]:
    """Makes a database by each call, and gives its address."""
    numbers = itertools.count(1)
    with temporary_database(dataloader_tasks) as template, ThreadPoolExecutor(1) as thread:

        def make() -> str:
            name = f"dataloader_test_{next(numbers)}"
            # In a thread, since the test may have begun a Trio run already.
            thread.submit(trio.run, _copy, template, name).result()
            return _other(template, name)

        yield make


@pytest.fixture
def dataloader_dsn(_dataloader_databases: Callable[[], str]) -> str:
    """The address of a migrated database of the test's own, which goes with the session's server."""
    return _dataloader_databases()


async def _copy(template: str, name: str) -> None:
    async with open_database(DatabaseOptions(dsn=_other(template, "postgres"))) as database:
        await database.run(_aio_copy, urlsplit(template).path.removeprefix("/"), name)


async def _aio_copy(connection: object, template: str, name: str) -> None:
    await connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')  # type: ignore[attr-defined]


def _other(dsn: str, name: str) -> str:
    return urlsplit(dsn)._replace(path=f"/{name}").geturl()
