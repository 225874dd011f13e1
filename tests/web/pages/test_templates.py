"""Jinja removes the newline after a block tag at the end of a line, so the words before and after it must not touch."""

from __future__ import annotations

import re

import pytest

from dataloader.web.pages import templates_environment
from dataloader.web.pages.templates_environment import TEMPLATES

pytestmark = pytest.mark.requirement("E11")

TOUCHING = re.compile(r"[\w.,;:!?)…}]((?:\{%(?:(?!%\}).)*%\})+)\n(?=[\w(…]|\{\{ (?!ui\.))")
"""A text or a value, block tags, the end of the line, and a text or a value: `a{% endif %}` and `b` are `ab`.

Macros return elements.
"""


def touching(source):
    """Return the numbers of a template's lines whose ends touch the following text."""
    return [source[: found.start()].count("\n") + 1 for found in TOUCHING.finditer(source)]


@pytest.mark.parametrize("name", TEMPLATES.list_templates(extensions=["html"]))
def test_no_text_touches_that_of_the_next_line(name):
    source, _, _ = TEMPLATES.loader.get_source(TEMPLATES, name)
    assert touching(source) == []


def test_texts_that_touch_are_found():
    found = touching("a{% if x %} b{% endif %}\nc\n<p>{% if x %}\nd{% endif %}</p>\n{{ e }}{% endif %}\n{{ f }}")
    assert found == [1, 5]
    assert templates_environment.TEMPLATES.from_string("a{% if true %} b{% endif %}\nc").render() == "a bc"
