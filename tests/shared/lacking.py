"""Programs that a test needs and a machine may lack."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip_without(reason: str) -> NoReturn:
    """Skip the test for a program that can be installed; in CI, where it must be installed, fail it."""
    if "CI" in os.environ:
        pytest.fail(reason)
    pytest.skip(reason)
