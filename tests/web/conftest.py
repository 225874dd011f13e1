"""The fixture of the HTTP tests."""

from __future__ import annotations

from functools import partial

import pytest
from web_server import open_server


@pytest.fixture
def open_web(database):
    """`async with open_web(tokens=…, max_body_bytes=…) as web`: see web_server.py."""
    return partial(open_server, database.dsn)
