"""Fixtures of the ETL tests: the service that they load from, and runs of loads."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio
from data_sets import DATA
from etl_tasks import DETAIL, ITEM, Items, with_limits
from source_app import Answer, open_source_app

from dataloader import Settings, Tasks, Worker, open_supervisor
from dataloader.flows.etl import add_loads
from dataloader.flows.etl.declare.pipeline_limits import LIMITS, PipelineLimits
from dataloader.testing import Signals, run_task


@pytest.fixture
def data() -> Path:
    """Return the folder of the data sets; tests that need them are skipped without it."""
    if not DATA.is_dir():
        pytest.skip(f"the data sets are not at {DATA}; DATALOADER_TEST_DATA says where they are")
    return DATA


@pytest.fixture
def service():
    """Return a service without data: `.url`, `.put(path, answer)`, `.requests`, `.misbehave(…)`; see source_app.py."""
    with open_source_app() as app:
        yield app


@pytest.fixture
def source_app(data, service):
    """Return the service with the data sets."""
    return service


@pytest.fixture
def items(service, database):
    """Return the records of the service, see etl_tasks.py, and create a table for them."""
    database.psql(ITEM)
    items = Items(service)
    service.put("/items", items.answer)
    return items


@pytest.fixture
def details(items, database):
    """Return the IDs of the requests for details, in order, and create a table for them."""
    database.psql(DETAIL)

    def answer(seen):
        return Answer(json.dumps({"id": int(seen.query["id"]), "about": "a"}).encode())

    items.service.put("/detail", answer)
    return lambda: [int(seen.query["id"]) for seen in items.service.asked("^/detail")]


@attrs.define
class TestLimits:
    """Current limits of a test's runs."""

    __test__ = False

    now: PipelineLimits = LIMITS

    def set(self, **values):
        """Change some of them for runs that are declared later."""
        self.now = attrs.evolve(self.now, **values)


@pytest.fixture
def limits():
    """Return the limits of the runs of `outcome_of` and `supervised`."""
    return TestLimits()


@pytest.fixture
def outcome_of(database, limits):
    """Return a function that runs a load, or tasks instead, once like a worker with `args`."""

    async def outcome_of(load, **args):
        tasks = load if isinstance(load, Tasks) else Tasks()
        if tasks is not load:
            add_loads(tasks, load)
        with trio.fail_after(60):
            return await run_task(with_limits(tasks, limits.now), next(iter(tasks)), args, dsn=database.dsn)

    return outcome_of


@pytest.fixture
def counts_of(outcome_of):
    """Return a function that runs a load, which must succeed, and returns its counts."""

    async def counts_of(load, **args):
        outcome = await outcome_of(load, **args)
        assert outcome.status == "succeeded", outcome.error
        return outcome.result["counts"]

    return counts_of


@pytest.fixture
def counts_of_failed(outcome_of):
    """Return a function that runs a load with too many failures, whose valid rows are written.

    It returns the counts.
    """

    async def counts_of_failed(load, **args):
        outcome = await outcome_of(load, **args)
        assert (outcome.status, outcome.result["status"]) == ("failed", "failed")
        return outcome.result["counts"]

    return counts_of_failed


@pytest.fixture
def table(raw):
    """Return a function that reads the rows of a table as texts, in order."""

    async def table(columns="t", name="item"):
        return [row[0] for row in await raw.fetch(f"SELECT ({columns})::text FROM {name} t ORDER BY 1")]

    return table


@pytest.fixture
def soon(limits):
    """Make runs repeat requests immediately, and write their progress continuously."""
    limits.set(retry_s=(0.001, 0.001), show_s=0.01)


@pytest.fixture
def supervised(database, limits):
    """Return a function that opens a supervisor with the queue `q` for loads, or for a registry of tasks."""

    @asynccontextmanager
    async def supervised(*loads, **settings):
        tasks = loads[0] if isinstance(loads[0], Tasks) else Tasks()
        if tasks is not loads[0]:
            add_loads(tasks, *loads)
        ready = Settings(db_dsn=database.dsn, workers=(Worker("q", 4),), port=0, **({"drain_timeout_s": 5} | settings))
        with trio.fail_after(60):
            async with open_supervisor(ready, with_limits(tasks, limits.now), signals=Signals()) as supervisor:
                yield supervisor

    return supervised
