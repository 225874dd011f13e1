"""Pages that are generated from the code are current."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import dataloader

SITE = Path(__file__).parents[2] / "docs" / "site"


def generator(name):
    """Import a generator by its path."""
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["http_routes", "python_reference"])
def test_the_generated_page_is_what_its_script_makes(name):
    module = generator(name)
    assert module.PAGE.read_text() == module.page(), "run `just reference`, and commit the page"


def test_the_reference_has_every_public_name_once():
    named = [name for names in generator("python_reference").SECTIONS.values() for name in names]
    assert sorted(named) == sorted(dataloader.__all__)
