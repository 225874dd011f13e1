"""Only invisible characters are escaped before a text reaches a terminal (Q16)."""

from __future__ import annotations

import functools
import json
import sys
import unicodedata

import pytest

from dataloader.jobs.visible import visible, visible_json

pytestmark = pytest.mark.requirement("Q16")

BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@functools.cache
def unseen() -> list[str]:
    """Return all such characters. Computed on demand, since each process of the tests reads this file."""
    return [
        character
        for character in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}
    ]


def test_every_control_format_and_separator_character_of_unicode_is_escaped() -> None:
    assert {*BIDI, "\x1b", "\x9b", "\u2028", "\u2029", "\ufeff", "\u200b", "\U000e0041"} <= {*unseen()}
    for character in unseen():
        shown = visible(f"a{character}b")
        assert shown.isascii()
        assert shown.isprintable()
        assert shown.encode().decode("unicode_escape") == f"a{character}b"
        assert shown == visible(shown)


def test_in_json_the_value_stays_the_same() -> None:
    text = "".join(character for character in unseen() if unicodedata.category(character) != "Cs")
    for value in (text, {text: [text, "é\u3000字"]}):
        shown = visible_json(json.dumps(value, ensure_ascii=False))
        assert not {*shown} & {*unseen()}
        assert json.loads(shown) == value


@pytest.mark.parametrize("text", ["plain", "naïve 字\u3000\u00a0 Ünïcödé", "e\u0301", "🙂", ""])
def test_visible_characters_stay(text: str) -> None:
    assert visible(text) == visible(text, lines=True) == visible_json(text) == text


def test_lines_stay_where_lines_are_shown() -> None:
    assert visible("a\n\tb\r\x1b[2J", lines=True) == "a\n\tb\\r\\x1b[2J"
    assert visible("a\n\tb") == "a\\n\\tb"
