"""Fixtures for tests of writes by loads."""

from __future__ import annotations

from functools import partial

import etl_loads
import pytest
from performers import performer_of

from dataloader.jobs.client.loads import Loads
from dataloader.jobs.contract import Operator
from dataloader.store.queue.transaction import Transactions


@pytest.fixture
async def transactions(store):
    transactions = Transactions(store)
    yield transactions
    transactions.close()


@pytest.fixture
def loads(store):
    return Loads(performer_of(store, Operator("w")))


@pytest.fixture
def open_dimension(transactions, raw):
    return partial(etl_loads.open_dimension, transactions, raw)


@pytest.fixture
def history(raw):
    """Return a function that reads the versions as short texts: key, values, days of the month from and to."""

    async def history(values="a"):
        rows = await raw.fetch(
            f"SELECT concat_ws(' ', key, {values}, extract(day FROM valid_from) || '-' || extract(day FROM valid_to),"
            " CASE WHEN is_current THEN extract(day FROM valid_from) || '-' END) AS version"
            " FROM target ORDER BY key, valid_from"
        )
        return [row["version"] for row in rows]

    return history
