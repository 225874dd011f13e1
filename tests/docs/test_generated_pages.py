"""Pages that are generated from the code are current."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import attrs
import pytest

import dataloader
from dataloader.flows import etl

SITE = Path(__file__).parents[2] / "docs" / "site"


def generator(name):
    """Import a generator by its path."""
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["http_routes", "python_reference", "guards_page"])
def test_each_generated_page_is_what_its_script_makes(name):
    for path, text in generator(name).PAGES.items():
        assert path.read_text() == text(), "run `just reference`, and commit the page"


def test_the_reference_has_every_public_name_once():
    named = [name for names in generator("python_reference").SECTIONS.values() for name in names]
    assert sorted(named) == sorted(dataloader.__all__)


def test_the_reference_of_loads_has_every_public_name_and_every_argument():
    named = [name for names in generator("python_reference").LOADS.values() for name in names]
    # On another page; settings of a process, which programs do not create; a name for a mapping.
    assert sorted([*named, "RateLimit", "PipelineSettings", "Record"]) == sorted(etl.__all__)
    for name in named:
        kind, about = getattr(etl, name), inspect.getdoc(getattr(etl, name)) or ""
        if attrs.has(kind):
            described = set(re.findall(r"^ +(\w+): ", about, re.MULTILINE)) | set(re.findall(r"`(\w+)`", about))
            assert {field.name for field in attrs.fields(kind) if field.init} <= described, name
