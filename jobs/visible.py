"""Makes invisible characters visible, so that no outside text can control a reader's terminal.

Escape sequences move the cursor and change colors; U+202E reverses the rest of a line; U+2028 breaks it. Every
character that Unicode calls control, format or line separator, or has not assigned, becomes an escape. Spaces of all
widths stay.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_UNUSUAL: Final = re.compile(r"[^ -~]")
_UNUSUAL_IN_LINES: Final = re.compile(r"[^ -~\t\n]")


def visible(text: str, *, lines: bool = False) -> str:
    r"""Return `text` with invisible characters as escapes: `\x1b`, `\u202e`. With `lines` line breaks and tabs stay."""
    return text if text.isprintable() else (_UNUSUAL_IN_LINES if lines else _UNUSUAL).sub(_shown_character, text)


def visible_json(text: str) -> str:
    r"""Return JSON on one line with invisible characters in its strings as JSON escapes: the value does not change."""
    return text if text.isprintable() else _UNUSUAL.sub(_shown_in_json, text)


def _is_seen(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _shown_character(found: re.Match[str]) -> str:
    character = found[0]
    return character if _is_seen(character) else character.encode("unicode_escape").decode()


def _shown_in_json(found: re.Match[str]) -> str:
    character = found[0]
    if _is_seen(character):
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
