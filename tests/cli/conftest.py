"""Fixtures for tests of the command line."""

from __future__ import annotations

import pytest


@pytest.fixture
def add(on_database):
    """Triggers a job in the test's database; its id comes back."""

    def add(*arguments: object) -> str:
        result = on_database("trigger", *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout.split()[0]

    return add
