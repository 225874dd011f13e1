"""Jinja takes away the end of a line that ends with a block's tag: what stands on both sides of it must not touch."""

from __future__ import annotations

import re

import pytest

from dataloader.web.pages import templates_environment
from dataloader.web.pages.templates_environment import TEMPLATES

pytestmark = pytest.mark.requirement("E11")

TOUCHING = re.compile(r"[\w.,;:!?)…}]((?:\{%(?:(?!%\}).)*%\})+)\n(?=[\w(…]|\{\{ (?!ui\.))")
"""A text or a value, block tags, the end of the line, and a text or a value: `a{% endif %}` and `b` are `ab`.

What macros give are elements.
"""


def touching(source):
    """The lines of a template, as its loader gives it, whose ends touch what follows."""
    return [source[: found.start()].count("\n") + 1 for found in TOUCHING.finditer(source)]


@pytest.mark.parametrize("name", TEMPLATES.list_templates(extensions=["html"]))
def test_no_text_touches_that_of_the_next_line(name):
    source, _, _ = TEMPLATES.loader.get_source(TEMPLATES, name)
    assert touching(source) == []


def test_texts_that_touch_are_found():
    found = touching("a{% if x %} b{% endif %}\nc\n<p>{% if x %}\nd{% endif %}</p>\n{{ e }}{% endif %}\n{{ f }}")
    assert found == [1, 5]
    assert templates_environment.TEMPLATES.from_string("a{% if true %} b{% endif %}\nc").render() == "a bc"
