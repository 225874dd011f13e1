"""Fixture of the HTTP tests."""

from __future__ import annotations

from functools import partial

import pytest
from web_server import open_server


@pytest.fixture
def open_web(database):
    """Return `open_server` for the test's database: `async with open_web(tokens=…, max_body_bytes=…) as web`."""
    return partial(open_server, database.dsn)
