"""Begin and end of a value in a text, after a name and a sign, in any language that has both."""

from __future__ import annotations

import re
from typing import Final

Span = tuple[int, int]

_OPENING_QUOTE: Final = re.compile(r"""(?:[\w.]{0,40}+\()?[bruefBRUEF]{0,2}(\\{0,8})(["'])""")
# A quote within is escaped, or doubled as in SQL; `""` may end a text within a text.
_REST_OF_STRING: Final = {
    '"': re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL),
    "'": re.compile(r"[^'\\]*+(?:(?:\\.|'')[^'\\]*+)*+", re.DOTALL),
}
_HEADER: Final = re.compile(r"""[^\r\n"']*+(?:(?<==)(?:"[^"\r\n]*+"|'[^'\r\n]*+')[^\r\n"']*+)*+""")
_BARE: Final = re.compile(
    r"""[^\s&"'<>,;\\]*+(?:(?:\\(?!["'])|["'](?=\w)|[,;](?!\s|$|["']?[\w.-]*+["']?\s*+[=:]))[^\s&"'<>,;\\]*+)*+"""
)
_SCHEME: Final = re.compile(
    r"(?:(?:bearer|basic|digest|negotiate|ntlm|token|api-?key|sharedkey(?:lite)?)[ \t]+(?=[\w+/=.~-]))?", re.IGNORECASE
)
_ASSIGNED: Final = re.compile(r"""[ \t]*+=[ \t]*+(?=[bru]?["'])""")
_BLOCK: Final = re.compile(r"[|>][+-]?\d?[ \t]*+\r?\n([ \t]++)[^\n]*+(?:(?:\n[ \t]*+(?=\n))*+\n\1[^\n]*+)*+")
_BRACKET: Final = re.compile(
    r"""\(\)|\[\]|\{\}|"[^"\\]*+(?:\\.[^"\\]*+)*+"?|'[^'\\]*+(?:\\.[^'\\]*+)*+'?|[\[({]++|[\])}]++""", re.DOTALL
)


def end_of(pattern: re.Pattern[str], text: str, start: int, limit: int) -> int:
    """Return where the match of a pattern ends that also matches the empty text."""
    found = pattern.match(text, start, limit)
    return found.end() if found else start


def is_header_name(name: str) -> bool:
    """Return whether the value of this name, after a colon, is all the rest of the line."""
    return name.lower().endswith(("authorization", "cookie", "cookies"))


def value_span(text: str, start: int, *, sign: str | None = None, is_header: bool = False) -> Span:
    """Return where the value that begins at `start` begins without its quotes, and where it ends."""
    if quoted := _OPENING_QUOTE.match(text, start):
        escape, quote = quoted.groups()
        if escape:  # JSON inside a JSON string: it ends at the next quote with the same escape
            end = text.find(escape + quote, quoted.end())
            return quoted.end(), len(text) if end < 0 else end
        return quoted.end(), end_of(_REST_OF_STRING[quote], text, quoted.end(), len(text))
    if text.startswith(("[", "{", "("), start):
        return start, end_of_bracket(text, start)
    if sign == ":" and (block := _BLOCK.match(text, start)):
        return block.end(1), block.end()
    end = end_of(
        _HEADER if is_header and sign == ":" else _BARE, text, end_of(_SCHEME, text, start, len(text)), len(text)
    )
    while end > start and text[end - 1] in ")]}.,;:":
        end -= 1
    if sign == ":" and (assigned := _ASSIGNED.match(text, end)):  # a line of Python: password: str = "s3cr3t"
        return start, value_span(text, assigned.end())[1]
    return start, end


def end_of_bracket(text: str, start: int) -> int:
    """Return where the bracket ends that begins at `start`; quotes within are read as quotes."""
    depth = 0
    for found in _BRACKET.finditer(text, start):
        sign = found[0]
        if sign[0] in "[{(" and sign not in {"()", "[]", "{}"}:
            depth += len(sign)
        elif sign[0] in "]})":
            if depth <= len(sign):
                return found.start() + depth
            depth -= len(sign)
    return len(text)
