"""Makes characters that can't be seen visible, so that no text from outside writes on a reader's terminal (Q16).

Escape sequences move the cursor and change colours; U+202E turns the rest of a line around; U+2028 breaks it. Whatever
Unicode calls control, format or line separator, or has not assigned, becomes an escape; spaces of all widths stay.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_UNUSUAL: Final = re.compile(r"[^ -~]")
_UNUSUAL_IN_LINES: Final = re.compile(r"[^ -~\t\n]")


def visible(text: str, *, lines: bool = False) -> str:
    r"""Return `text` with all that can't be seen as an escape: `\x1b`, `\u202e`. `lines`: line breaks and tabs stay."""
    return text if text.isprintable() else (_UNUSUAL_IN_LINES if lines else _UNUSUAL).sub(_shown, text)


def visible_json(text: str) -> str:
    r"""Return JSON on one line with all in its strings that can't be seen as JSON's own escapes: the same value."""
    return text if text.isprintable() else _UNUSUAL.sub(_shown_in_json, text)


def _is_seen(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _shown(found: re.Match[str]) -> str:
    character = found[0]
    return character if _is_seen(character) else character.encode("unicode_escape").decode()


def _shown_in_json(found: re.Match[str]) -> str:
    character = found[0]
    if _is_seen(character):
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
