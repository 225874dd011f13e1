"""Fixtures for all tests: PostgreSQL servers (`--pg 18,15` runs the database tests on each) and databases on them."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import broken
import pytest
from databases import is_at_hand, postgres_server

pytest_plugins = ["services", "command_line", "bouncer", "browser", "progress", "long_first", "database_clock"]

OTHER_PROGRAMS = frozenset({"bouncer", "browser", "new_bouncer"})
"""Fixtures that start a program besides PostgreSQL. Their tests are `full`."""
FIRST = "18"
"""Server of `just test`."""
VERSIONS = pytest.StashKey[list[int]]()
MISSING = pytest.StashKey[list[int]]()
# A database for each test is some gigabytes of writes: in memory they take half the time, and always the same.
MEMORY = Path("/dev/shm")
MEMORY_NEEDED = 4 * 2**30


def pytest_addoption(parser):
    parser.addoption("--pg", default=FIRST, help="such as 18,15: tests of the SQL run on each, all else on the first")
    parser.addoption("--rest", action="store_true", help="the tests that `just test` leaves out, and no others")
    parser.addoption("--server", metavar="FOLDER", help="use the server that runs there instead of starting one")
    parser.addoption("--without", choices=broken.GUARDS, help="take a guard out: its test must fail (shared/broken.py)")


def pytest_configure(config):
    if name := config.getoption("--without"):
        broken.take_out(name)
    versions = [int(version) for version in config.getoption("--pg").split(",")]
    config.stash[VERSIONS] = [version for version in versions if is_at_hand(version)]
    config.stash[MISSING] = [version for version in versions if not is_at_hand(version)]
    if config.stash[MISSING] and "CI" in os.environ:
        pytest.exit(_missing(config), returncode=1)


def pytest_collection(session):
    # Collected tests are never garbage: the collector skips them now and after each test.
    gc.disable()


# Before pytest selects by marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if not OTHER_PROGRAMS.isdisjoint(item.fixturenames):
            item.add_marker("full")
    if config.getoption("--rest"):
        rest = [item for item in items if item.get_closest_marker("full") or not _is_on_first_server(item)]
        left_out = set(items).difference(rest)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = rest


def _is_on_first_server(item):
    version = getattr(item, "callspec", None) and item.callspec.params.get("postgres")
    return version in {None, int(FIRST)}


def pytest_collection_finish(session):
    gc.freeze()
    gc.enable()


def pytest_report_header(config):
    return _missing(config) if config.stash[MISSING] else None


def _missing(config):
    versions = ", ".join(map(str, config.stash[MISSING]))
    return f"PostgreSQL {versions} is not installed: install Debian's package, or set POSTGRES_BIN_…"


def pytest_generate_tests(metafunc):
    if "postgres" in metafunc.fixturenames:
        versions = metafunc.config.stash[VERSIONS]
        if not _depends_on_the_server(metafunc.definition):
            versions = versions[:1]
        metafunc.parametrize("postgres", versions, indirect=True, scope="session", ids=[f"pg{v}" for v in versions])


def _depends_on_the_server(test):
    """Return whether the test runs on each server of `--pg`, as tests of SQL do.

    The longest run only on the first one.
    """
    if test.get_closest_marker("each_server"):
        return True
    return "store" in test.path.parts and not test.get_closest_marker("full")


@pytest.fixture(scope="session")
def postgres(request):
    """Run the server of this session (of this worker, with xdist), without durability; or use that of `--server`."""
    if folder := request.config.getoption("--server"):
        with postgres_server(request.param, Path(folder)) as server:
            yield server
        return
    # Not below pytest's own temporary directory: every session that begins closes it to other accounts, also to root's
    # server.
    in_memory = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_NEEDED
    with (
        TemporaryDirectory(prefix="dataloader-tests-", dir=MEMORY if in_memory else None) as data_dir,
        postgres_server(request.param, Path(data_dir)) as server,
    ):
        yield server


@pytest.fixture
def database(postgres):
    """Create a database with our schema: `.dsn`, `.psql(sql)`."""
    with postgres.database("migrated") as database:
        yield database


@pytest.fixture
def empty_database(postgres):
    """Create an empty database."""
    with postgres.database("empty") as database:
        yield database


@pytest.fixture(scope="session")
def document_ddl():
    """Return the tables of the queue document, for databases that another program has created (Q1)."""
    return Path(__file__).with_name("data").joinpath("document.sql").read_text()
