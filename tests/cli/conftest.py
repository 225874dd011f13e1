"""Fixtures for tests of the command line."""

from __future__ import annotations

import pytest


@pytest.fixture
def add(on_database):
    """Return a function that triggers a job in the test's database and returns its ID."""

    def add(*arguments: object) -> str:
        result = on_database("trigger", *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout.split()[0]

    return add
