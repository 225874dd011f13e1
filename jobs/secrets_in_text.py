"""Finds the secrets in a text: where each begins and ends (Q16). masking.py puts `***` there.

One walk from left to right: a search stops at the next mark of any kind (an address, a private key, a token of a known
format, an element, a name with its value), the kind's method says what is hidden there, and where to go on. A text is
read as it stands, and as it stands decoded (`password%3D…`, `&lt;token&gt;…`, JSON within JSON), twice.

Takes time linear in the text: a mark starts only where a word does or at a fixed sign, is read without backtracking,
and what a method reads ahead is bounded, or is hidden and not read again. Rejected: one pattern with the names of all
secrets in it; it can't tell `key` from `monkey` and backtracks on hostile texts.
"""

from __future__ import annotations

import html
import re
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import attrs

from dataloader.jobs.secret_names import NOTHING, meaning_of, names_a_secret
from dataloader.jobs.token_formats import TOKEN

MASKED: Final = "***"
"""What stands in the place of a secret."""

_LEVELS: Final = 2
_NEAR: Final = 200
_HARMLESS_VALUES: Final = frozenset({"", "null", "none", "true", "false", "bearer", "basic", MASKED})
# `password: is missing` says something of it; `password: hunter` is one.
_PROSE: Final = frozenset(
    {
        "a",
        "an",
        "and",
        "are",
        "at",
        "can",
        "cannot",
        "can't",
        "does",
        "expired",
        "for",
        "from",
        "has",
        "in",
        "invalid",
        "is",
    }
    | {"leads", "may", "missing", "must", "needs", "no", "not", "of", "only", "required", "send", "should", "the", "to"}
    | {"unknown", "was", "who", "with", "wrong"}
)
_SQL_NAMES: Final = ("password", "passwd", "pwd", "passphrase", "secret")
_SHORT_CODE: Final = re.compile(r"[A-Za-z0-9]{1,5}")

# A text without any of these has no secret but for tokens. Not one pattern: that takes 20 times as long.
_HINTS: Final = (
    *("://", ":\\/", "%3a", "pass", "pwd", "pswd", "token", "secret", "key", "dsn", "auth", "cookie", "credential"),
    *("signature", "bearer", "basic", "begin", "jwt", "sess", "otp", "cvv", "cvc", "csrf", "xsrf", "verifier"),
    *("assertion", "identified"),
)
# These stand in many a harmless word.
_DOUBTFUL_HINTS: Final = {
    "pin": re.compile(r"pins?\d{0,9}(?![a-z])"),
    "sig": re.compile(r"sig(?![a-z])"),
    "code": re.compile(
        r"[?&#;]code=|(?:2fa|access|login|mfa|set|sms|tion|up|very)[_-]?codes?(?![a-z])|%3fcode|%26code"
    ),
}
_SIGN: Final = re.compile(r"[=:<%&\"'\s\\)]")
# The signs and words with which marks begin stand before the groups: what is none is passed over by a single look.
_MARK: Final = re.compile(
    rf"""
    # A password with a raw / ? or # in it is no valid URL, but people write them; host:port/path@x is not one.
    :(?P<address>//(?:[^\s/?#"'<>]*@
        |[^\s/?#:@"'<>]{{0,100}}:(?!\d{{1,5}}(?:[/?#,]|$))[^\s"<>]{{0,100}}?@))
    |-(?P<private_key>----BEGIN[ ][A-Z0-9 ]{{0,40}}PRIVATE[ ]KEY(?:[ ]BLOCK)?-----)
    |<(?P<element>(?P<tag>[A-Za-z_][\w.:-]*+)(?P<attributes>(?:\s[^<>]*+)?+)(?<!/)>)
    |\((?P<row>(?P<columns>[\w",\ .-]{{1,300}}+)\)=(?=\())
    |[\[(](?P<entry>\s*+[bu]?\\*+["'](?P<item>[A-Za-z_][\w.-]{{0,199}})\\*+["']\s*+,\s*+)
    |(?P<token>{TOKEN.pattern})
    |(?<!\w)(?=[BbIi])(?:
        (?P<scheme>(?i:bearer[ \t]+(?!tokens?\b|auth|realm=)(?=[\w.~+/=*-]{{3}})
            |basic[ \t]+(?=(?-i:[A-Za-z0-9+/][a-z+/]{{0,100}}[A-Z0-9=]))(?=[A-Z0-9+/]{{6}})))
        |(?P<identified>(?i:identified[ \t]+by)[ \t]+(?=')))
    |(?<![\w.-])(?=[\w-])(?P<pair>(?P<dashes>--?)?(?P<name>\w[\w.-]*+)(?:
        \\*+["']?\]?[ \t]*+(?P<sign>=>|:=|={{1,3}}|:(?!//))[ \t]*+
        # A command's option, in a line of a shell and in a list of arguments.
        |(?(dashes)(?:[ \t]++|["'],[ \t]*+)(?!["']?(?:--|\s))|(?!))
        |(?P<sql>[ \t]++(?='))))
    """,
    re.VERBOSE,
)
_PEM = re.compile(r"(?:[^-]|-(?!----))*+")
_CREDENTIALS = re.compile(r"[\w.~+/=*-]++")
_CLOSING = re.compile(r"</([A-Za-z_][\w.:-]*+)")
_UNCLOSED = re.compile(r"[^<\s]++\Z")
_NAMING_ATTRIBUTE = re.compile(r"""(?<![\w.-])(?:name|key)\s*+=\s*+["']([^"'<>]{1,200})["']""")
_NAMING_ELEMENT = re.compile(r"([^<>]{1,200})</[\w.:-]{1,80}>\s{0,80}+<[\w.:-]{1,80}(?:\s[^<>]{0,200})?(?<!/)>")
_LABELLED = re.compile(r"""[bu]?\\{0,8}(["']?)([A-Za-z_][\w.-]{0,199}|(?<=["'])[A-Za-z_][\w. -]{0,199})""")
_THEN_A_VALUE = re.compile(
    r"""\\{0,8}["']?[\s,;]{0,40}+\\{0,8}["']?(?:\w{0,40}[_-])?value["'\\]{0,9}\s*+[=:]""", re.IGNORECASE
)
_OPENING_QUOTE = re.compile(r"""(?:[\w.]{0,40}+\()?[brufBRUF]{0,2}(\\{0,8})(["'])""")
_REST_OF_STRING = {'"': re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL), "'": re.compile(r"(?:[^'\\]|\\.)*+", re.DOTALL)}
_HEADER = re.compile(r"""[^\r\n"']*+""")
_BARE = re.compile(r"""(?:[^\s&"'<>,;\\]|\\(?!["'])|["'](?=\w)|[,;](?!\s|$|["']?[\w.-]*+["']?\s*+[=:]))*+""")
_SCHEME = re.compile(r"(?:bearer|basic|digest|negotiate|token)[ \t]+(?=[\w+/=.~-])", re.IGNORECASE)
_ASSIGNED = re.compile(r"""[ \t]*+=[ \t]*+(?=[bru]?["'])""")
_END_OF_ENTRY = re.compile(r"""\\*+["']?\s*+[\])]""")
_BRACKET = re.compile(r""""(?:[^"\\]|\\.)*+"?|'(?:[^'\\]|\\.)*+'?|[\[\]{}()]""", re.DOTALL)
_ENCODED = re.compile(
    r"%(?:[2-7][0-9A-Fa-f]|0[9AaDd])|\\(?:u00|x)[2-7][0-9A-Fa-f]|\\[nrt/]"
    r"|&(?:quot|amp|lt|gt|apos|#\d{2,3}|#[xX][0-9A-Fa-f]{2});"
)
_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t", "/": "/"}


def may_hold_secrets(text: str) -> bool:
    """Tell whether a text is worth a search for secrets: most texts end here, within a microsecond."""
    if _SIGN.search(text):
        lowered = text.lower()
        for hint in _HINTS:
            if hint in lowered:
                return True
        for hint, pattern in _DOUBTFUL_HINTS.items():
            if hint in lowered and pattern.search(lowered):
                return True
    return TOKEN.search(text) is not None or _ENCODED.search(text) is not None


def secrets_in(text: str) -> list[tuple[int, int]]:
    """Return where the secrets of a text are: from, to; in order, none touching another."""
    found = _Walk(text).secrets()
    for decoded, positions in _decodings(text):
        found += [(positions[start], positions[end]) for start, end in _Walk(decoded).secrets()]
    whole: list[tuple[int, int]] = []
    for start, end in sorted(found):
        if whole and start <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(end, whole[-1][1])
        else:
            whole.append((start, end))
    return whole


def _decodings(text: str) -> Iterator[tuple[str, array[int]]]:
    """The text with its encoded characters decoded, and once more; each with the positions that it had in `text`."""
    positions = array("L")
    for level in range(_LEVELS):
        parts: list[str] = []
        where, done = array("L"), 0
        for found in _ENCODED.finditer(text):
            start, end = found.span()
            parts += text[done:start], _character(found[0])
            if level:
                where += positions[done : start + 1]
            else:
                where.extend(range(done, start + 1))
            done = end
        if not done:
            return
        parts.append(text[done:])
        if level:
            where += positions[done:]
        else:
            where.extend(range(done, len(text) + 1))
        text, positions = "".join(parts), where
        yield text, positions


def _character(encoded: str) -> str:
    if encoded[0] == "&":
        return html.unescape(encoded)
    return _ESCAPED[encoded[1]] if encoded[1] in _ESCAPED else chr(int(encoded[-2:], 16))


@attrs.define
class _Walk:
    """One walk through a text; what it remembers is the last name and the last value that may belong together."""

    text: str
    hidden: list[tuple[int, int]] = attrs.field(factory=list)
    label: tuple[int, bool] | None = None
    value: int | None = None
    closings: dict[str, list[int]] | None = None

    def secrets(self) -> list[tuple[int, int]]:
        """Return what is to be hidden, in the order in which it was found."""
        position = 0
        while found := _MARK.search(self.text, position):
            position = getattr(self, f"_{found.lastgroup}")(found)
        return self.hidden

    def _hide(self, start: int, end: int) -> bool:
        if self.text[start:end].lower().strip("…. `") in _HARMLESS_VALUES:
            return False
        self.hidden.append((start, end))
        return True

    def _address(self, found: re.Match[str]) -> int:
        self._hide(found.start() + len("://"), found.end() - 1)
        return found.end()

    def _private_key(self, found: re.Match[str]) -> int:
        return self._hide_match(_PEM, found.end())

    def _token(self, found: re.Match[str]) -> int:
        self._hide(*found.span())
        return found.end()

    def _scheme(self, found: re.Match[str]) -> int:
        return self._hide_match(_CREDENTIALS, found.end())

    def _hide_match(self, pattern: re.Pattern[str], start: int) -> int:
        found = pattern.match(self.text, start)
        end = found.end() if found else start
        self._hide(start, end)
        return end

    def _identified(self, found: re.Match[str]) -> int:
        start, end = _value_span(self.text, found.end())
        self._hide(start, end)
        return end

    def _row(self, found: re.Match[str]) -> int:
        """PostgreSQL's `Key (id, token)=(1, s3cr3t) already exists`."""
        if not any(names_a_secret(column) for column in found["columns"].split(",")):
            return found.start("columns")
        end = _end_of_bracket(self.text, found.end())
        self._hide(found.end(), end)
        return end

    def _entry(self, found: re.Match[str]) -> int:
        """`["X-Api-Key", "s3cr3t"]`, and no more in it; `("token", "amount", "day")` is a list of columns."""
        name, after = found["item"], found.end()
        if names_a_secret(name) and name.lower() != "key" and self.text[after : after + 1] not in {"[", "{", "("}:
            start, end = _value_span(self.text, after)
            if _END_OF_ENTRY.match(self.text, end) and self._hide(start, end):
                return end
        return found.start("item")

    def _element(self, found: re.Match[str]) -> int:
        """An element with a secret's name, as tag or as attribute; or whose text is the name of the next one's."""
        name, start = found["tag"].rpartition(":")[2], found.end()
        meaning = meaning_of(name)
        if meaning.label and (naming := _NAMING_ELEMENT.match(self.text, start)):
            if not names_a_secret(naming[1]):
                return start
            start = naming.end()
        elif not meaning.secret:
            attribute = _NAMING_ATTRIBUTE.search(found["attributes"])
            if attribute is None or not names_a_secret(attribute[1]):
                return found.end("tag")
        first = found.start("attributes")
        self.hidden += [(first + here, first + there) for here, there in _Walk(found["attributes"]).secrets()]
        end = self._closing(found["tag"] if start == found.end() else "", start)
        return end if self._hide(start, end) else start

    def _closing(self, tag: str, start: int) -> int:
        """Where the element `tag` ends that begins at `start`; that of any name where the text's next tag is."""
        if not tag:
            end = self.text.find("<", start)
            return len(self.text) if end < 0 else end
        if self.closings is None:
            self.closings = defaultdict(list)
            for closing in _CLOSING.finditer(self.text):
                self.closings[closing[1]].append(closing.start())
        ends = self.closings.get(tag, [])
        index = bisect_left(ends, start)
        if index < len(ends):
            return ends[index]
        unclosed = _UNCLOSED.match(self.text, start)
        return unclosed.end() if unclosed else start

    def _pair(self, found: re.Match[str]) -> int:
        name, after = found["name"], found.end()
        meaning = meaning_of(name)
        if meaning is NOTHING:
            return self._hide_code(found) if name.lower() == "code" else after
        if meaning.label and self._names_the_value_beside(after, is_secret=meaning.secret):
            return after
        if meaning.value and self._belongs_to_a_secret_beside(after):
            start, end = _value_span(self.text, after)
        elif meaning.secret and (found["sql"] is None or name.lower().endswith(_SQL_NAMES)):
            start, end = _value_span(self.text, after, sign=found["sign"], is_header=_is_header(name))
            if found["sign"] == ":" and self.text[start:end].lower() in _PROSE and self.text[end : end + 1] == " ":
                return after
        else:
            return after
        return end if self._hide(start, end) else after

    def _hide_code(self, found: re.Match[str]) -> int:
        """Hide what stands behind `?code=`, unless it is as short as that of a currency or a status."""
        if self.text[found.start() - 1 : found.start()] not in {"?", "&", "#"}:
            return found.end()
        start, end = _value_span(self.text, found.end())
        return end if not _SHORT_CODE.fullmatch(self.text, start, end) and self._hide(start, end) else found.end()

    def _names_the_value_beside(self, start: int, *, is_secret: bool) -> bool:
        """Tell whether a pair such as `name=DB_PASSWORD` names another's value; the one before is hidden here."""
        labelled = _LABELLED.match(self.text, start)
        names_one = labelled is not None and names_a_secret(labelled[2])
        if is_secret and labelled and not names_one and not _THEN_A_VALUE.match(self.text, labelled.end()):
            return False  # it is the key itself: `key=…`
        if names_one and self.value is not None and self._is_beside(self.value, start):
            first, last = _value_span(self.text[self.value : start], 0)
            self._hide(self.value + first, self.value + last)
        self.value, self.label = None, (start, names_one)
        return True

    def _belongs_to_a_secret_beside(self, start: int) -> bool:
        """Tell whether a value such as `value=s3cr3t` is that of the name before; if none is there, one may follow."""
        if self.label is None or not self._is_beside(self.label[0], start):
            self.value = start
            return False
        is_secret, self.label = self.label[1], None
        return is_secret

    def _is_beside(self, first: int, second: int) -> bool:
        """Tell whether two places are near, in one object or element."""
        return second - first <= _NEAR and not any(sign in self.text[first:second] for sign in "{}<>")


def _is_header(name: str) -> bool:
    """Tell whether the value of this name, after a colon, is all the rest of the line."""
    return name.lower().endswith(("authorization", "cookie", "cookies"))


def _value_span(text: str, start: int, *, sign: str | None = None, is_header: bool = False) -> tuple[int, int]:
    """Return where the value that begins at `start` begins without its quotes, and where it ends."""
    if quoted := _OPENING_QUOTE.match(text, start):
        escape, quote = quoted.groups()
        if escape:  # JSON inside a JSON string: it ends at the next quote that is escaped as the first one
            end = text.find(escape + quote, quoted.end())
            return quoted.end(), len(text) if end < 0 else end
        rest = _REST_OF_STRING[quote].match(text, quoted.end())
        return quoted.end(), rest.end() if rest else len(text)
    if text[start : start + 1] in {"[", "{", "("}:
        return start, _end_of_bracket(text, start)
    scheme = _SCHEME.match(text, start)
    found = (_HEADER if is_header and sign == ":" else _BARE).match(text, scheme.end() if scheme else start)
    end = found.end() if found else start
    while end > start and text[end - 1] in ")]}.,;:":
        end -= 1
    if sign == ":" and (assigned := _ASSIGNED.match(text, end)):  # a line of Python: password: str = "s3cr3t"
        return start, _value_span(text, assigned.end())[1]
    return start, end


def _end_of_bracket(text: str, start: int) -> int:
    depth = 0
    for found in _BRACKET.finditer(text, start):
        if found[0] in "[{(":
            depth += 1
        elif found[0] in "]})":
            depth -= 1
            if depth == 0:
                return found.end()
    return len(text)
