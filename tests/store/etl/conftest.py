"""Fixtures of the tests of what loads write."""

from __future__ import annotations

from functools import partial

import etl_loads
import pytest

from dataloader.store.queue.transaction import Transactions


@pytest.fixture
async def transactions(store):
    transactions = Transactions(store)
    yield transactions
    transactions.close()


@pytest.fixture
def open_dimension(transactions, raw):
    return partial(etl_loads.open_dimension, transactions, raw)
