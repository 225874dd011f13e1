"""Search for the secrets in a text: where each begins and ends. masking.py puts `***` there.

Nearly all secrets are next to a word that names them, and nearly no text has such a word. So a search for parts of such
words (`token`, `pass`) excludes most texts. In the others only the text around these words is read: a sign and a value
after the word, and the tag, label, list or columns that contain it. Addresses, private keys and tokens of a known
format are searched separately. A text is read as it is, and decoded (`password%3D…`, `&lt;token&gt;…`, JSON within
JSON), twice.

Takes time linear in the text: a word is read once, and text beside it is bounded, or is hidden and not read again.
Rejected: one pattern of all that may hide a secret, tried at each character; it took ten times as long.
"""

from __future__ import annotations

import base64
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import attrs

from dataloader.jobs.secrets.decoded_text import decodings
from dataloader.jobs.secrets.secret_names import NOTHING, RANDOM, NameMeaning, Secrecy, meaning_of
from dataloader.jobs.secrets.token_formats import LEAST, TOKEN
from dataloader.jobs.secrets.values_in_text import Span, end_of, end_of_bracket, is_header_name, value_span

MASKED: Final = "***"
"""Replacement of a secret."""

_NEAR: Final = 200
_HARMLESS_VALUES: Final = frozenset(
    {"", "null", "none", "true", "false", "bearer", "basic", "str", "bytes", MASKED}
    | {"missing", "expired", "invalid", "valid", "unset", "required", "absent", "redacted", "scram-sha-256"}
)
# `password: is missing` describes a password; `password: hunter` contains one.
_PROSE: Final = frozenset(
    {"a", "an", "and", "are", "at", "can", "cannot", "can't", "does", "expired", "for", "from", "has", "in", "invalid"}
    | {"is", "leads", "may", "missing", "must", "needs", "no", "not", "of", "only", "required", "send", "should"}
    | {"the", "to", "unknown", "was", "who", "with", "wrong"}
)
_SQL_NAMES: Final = ("password", "passwd", "pwd", "passphrase", "secret")
_SHORT_CODE: Final = re.compile(r"[A-Za-z0-9]{1,5}")

# Each name of a secret, and each word that a secret may follow, contains one of these.
_HINTS: Final = (
    *("pass", "pwd", "pswd", "token", "secret", "key", "auth", "cookie", "credential", "dsn", "sig", "jwt", "bearer"),
    *("csrf", "xsrf", "sess", "otp", "pin", "cvv", "cvc", "verifier", "assertion", "saml", "code"),
    *("basic", "identified", "netloc", "thin", "curl", "mysql", "docker", "podman", "pw"),
)
_NAME: Final = re.compile(r"[\w.-]*+")
_BARE_NAMES: Final = frozenset({"key", "keys", "token", "tokens", "code", "codes"})
_COUNT: Final = re.compile(r"""\\*+["']?\d[\d_,.]{0,14}[ ]?[kKmM]?(?!\w)""")
_RANDOM: Final = re.compile(rf"""\\*+["']?[\w+/=.~-]{{0,100}}?{RANDOM.pattern}""")
_OBJECT: Final = re.compile(r"[^{}<>]*+")
_SIGN: Final = re.compile(r"""\\*+["']?\]?[ \t]*+(=>|:=|={1,3}|:(?!//))[ \t]*+""")
_AS_OPTION: Final = re.compile(r"""(?:[ \t]++|["'],[ \t]*+)(?!["']?(?:--|\s))""")
_AS_SQL: Final = re.compile(r"[ \t]++(?=[Ee]?')")
_IDENTIFIED: Final = re.compile(r"""[ \t]+(?:with[ \t]+[\w"']{1,60}[ \t]+)?(?:by|as)[ \t]+(?=["'])""", re.IGNORECASE)
_AS_ATTRIBUTES: Final = re.compile(r"(?:\s[^<>]*+)?+(?<!/)>")
_AS_ENTRY: Final = re.compile(r"""\\*+["']\s*+,\s*+(?![\[{(])""")
_AS_NAMING_ELEMENT: Final = re.compile(r"</[\w.:-]{1,80}>\s{0,80}+<[\w.:-]{1,80}(?:\s[^<>]{0,200})?(?<!/)>")
_AS_NAMING_ATTRIBUTE: Final = re.compile(r"""["'][^<>]{0,200}+(?<!/)>""")
_SCHEMES: Final = {
    "bearer": re.compile(r"[ \t]+(?!tokens?\b|auth|realm=)(?=[\w.~+/=*-]{3})", re.IGNORECASE),
    "auth": re.compile(r"[ \t]+(?:plain|login)[ \t]+(?=[A-Za-z0-9+/]{8})", re.IGNORECASE),
}
_BASIC: Final = re.compile(r"[ \t]+([A-Za-z0-9+/]{6,1000}+)")
_ARGUMENT: Final = re.compile(r"""[^\s"']*+""")
# Options of commands whose names do not say that a password follows.
_COMMANDS: Final = {
    "curl": re.compile(r"""\s(?:-u|--user|--proxy-user)[ =]?["']?([^\s"']+)"""),
    "mysql": re.compile(r"""\s-p["']?([^\s"'-][^\s"']*)"""),
    "sshpass": re.compile(r"""\s-p[ ]?["']?([^\s"']+)"""),
}
_COMMANDS["mysqldump"] = _COMMANDS["mysql"]
_LOGIN: Final = re.compile(r"""[ \t]+login\b[^\n|;&]{0,200}?\s-p[ =]?["']?([^\s"']+)""")
# A line of .netrc; the host or the user is before the password.
_AS_NETRC: Final = re.compile(r"(?:\s|\\[nrt])++(?=\S)")
_NETRC_BEHIND: Final = re.compile(r"(?:\s|[nrt]\\){1,20}+[^\s\\]{1,200}+(?:\s|[nrt]\\){1,20}+(?:nigol|enihcam)(?!\w)")
_CREDENTIALS: Final = re.compile(r"[\w.~+/=*-]++")
_THIN: Final = re.compile(r""":([^\s/@"'<>]{1,100}+/[^\s"'<>@]{1,100}+)@""")
_NETLOC: Final = re.compile(r"""=["']([^"'@\s]{0,200}+)@""")
# These match backwards, on the reversed text: the text before a word.
_WORD_BEHIND: Final = re.compile(r"[ \t]([A-Za-z0-9]{1,40}+)")
_TAG_BEHIND: Final = re.compile(r"(?::[\w.-]{1,80}+)?+<")
_ENTRY_BEHIND: Final = re.compile(r"""["']\\*+[ubUB]?\s*+[\[(]""")
_LABEL_BEHIND: Final = re.compile(
    r"""(?:[\w. -]{1,60}+(?=["']))?+(["']?)\\*+[ubUB]?[ \t]*+(?:>=|=:|[=:])[ \t]*+["']?\\*+([\w.-]{1,200}+)"""
)
_NAMING_TAG_BEHIND: Final = re.compile(r"(?:[\w. -]{1,60}+(?=>))?+>([\w.-]{1,80}+)(?::[\w.-]{1,80}+)?<")
_END_OF_LABEL: Final = re.compile(r"""\\*+["'\s,;&)}\]<]|\Z""")
_NAME_AND_SIGN: Final = re.compile(r"""(?<![\w.-])([A-Za-z_][\w.-]{0,60}+)\\*+["']?\s*+(?:=>|[=:])\s*+""")

_CLOSING: Final = re.compile(r"</([A-Za-z_][\w.:-]*+)")
_UNCLOSED: Final = re.compile(r"[^<\s]++\Z")
_END_OF_ENTRY: Final = re.compile(r"""\\*+["']?\s*+(?:[\])]|\Z)""")

# A password with a raw / ? or # in it is no valid URL, but people write them; host:port/path@x is not one.
_ADDRESS: Final = re.compile(
    r"""://(?=[^\s"'<>@]{0,1000}+@)(?:([^\s/?#"'<>]*)@
        |([^\s/?#:@"'<>]{0,100}+:(?!\d{1,5}(?:[/?#,]|$))[^\s"<>@]{0,100}+)@)""",
    re.VERBOSE,
)
_PRIVATE_KEY: Final = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----([^-]*+(?:-(?!----)[^-]*+)*+)")
_PUTTY_KEY: Final = re.compile(r"Private-Lines:[ \t]*+\d{1,4}((?:(?!Private-MAC)[A-Za-z0-9+/=\s\\])*+)")
# A line of .pgpass: host:port:database:user:password. The ports are those of PostgreSQL and its poolers, because a key
# such as ecb:2024:eur:day:1 also has this form.
_PGPASS: Final = re.compile(
    r"""(?<=[\w.*\]]):(?:54\d\d|64\d\d|65\d\d|\*):[^\s:"']{1,63}+:[^\s:"']{1,63}+:((?:\\[:\\]|[^\s\\"'])++)"""
)
_NOT_ASCII: Final = re.compile(r"[^\x00-\x7f]")


def secrets_in(text: str) -> list[Span]:
    """Return the spans of a text's secrets: start, end; in order, none touching another."""
    found = _found_in(text)
    for decoded, original in decodings(text):
        found += [(original(start), original(end)) for start, end in _found_in(decoded)]
    if len(found) < 2:
        return found
    whole: list[Span] = []
    for start, end in sorted(found):
        if whole and start <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(end, whole[-1][1])
        else:
            whole.append((start, end))
    return whole


def _found_in(text: str) -> list[Span]:
    found: list[Span] = []
    lowered = _lowered(text)
    if hints := tuple([hint for hint in _HINTS if hint in lowered]):
        found += _Words(text, lowered).secrets(_any_of(hints))
    if "://" in text and "@" in text:
        users = [address.span(address.lastindex or 0) for address in _ADDRESS.finditer(text)]
        found += [span for span in users if _is_worth_hiding(text, *span)]
    if "-----BEGIN " in text:
        keys = [key.span(1) for key in _PRIVATE_KEY.finditer(text)]
        found += [span for span in keys if _is_worth_hiding(text, *span)]
    if "Private-Lines:" in text:
        keys = [key.span(1) for key in _PUTTY_KEY.finditer(text)]
        found += [span for span in keys if _is_worth_hiding(text, *span)]
    if text.count(":") >= 4:
        passwords = [line.span(1) for line in _PGPASS.finditer(text)]
        found += [span for span in passwords if _is_worth_hiding(text, *span)]
    # A search for tokens reads each character; most words are too short to be one.
    long = " ".join([word for word in text.split() if len(word) >= LEAST])
    if long and TOKEN.search(long):
        found += [token.span() for token in TOKEN.finditer(text)]
    return found


def _lowered(text: str) -> str:
    """Return the text in lower case, each character at its place."""
    lowered = text.lower()
    return lowered if len(lowered) == len(text) else _NOT_ASCII.sub("?", text).lower()


@lru_cache(maxsize=256)
def _any_of(hints: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"(?:{'|'.join(hints)})[\w.-]*+")


def _is_worth_hiding(text: str, start: int, end: int) -> bool:
    return end - start > 100 or text[start:end].lower().strip("…. `") not in _HARMLESS_VALUES


@attrs.define
class _Words:
    """Reader of a text's words that contain a hint, from left to right, and of the text around each.

    A method returns the end of the secret that it has hidden, or 0 if there is none of its kind.
    """

    text: str
    lowered: str
    hidden: list[Span] = attrs.field(factory=list)
    backwards: str = attrs.field(init=False)
    closings: dict[str, list[int]] | None = None
    looked_behind: int = 0
    readers: list[Callable[[int, int, str], int]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Reverse the text, because patterns match forwards only, and select the readers that it needs."""
        text, lowered = self.text, self.lowered
        self.backwards = text[::-1]
        has_tags = "<" in text
        readers = (
            (self._element, has_tags),
            (self._label, has_tags or _has_value(lowered, 0, len(text))),
            (self._entry, "[" in text or "(" in text),
            (self._row, ")=(" in text),
            (self._sql, "'" in text),
            (self._netrc, "login" in lowered or "machine" in lowered),
        )
        self.readers = [read for read, is_needed in readers if is_needed]

    def secrets(self, hint: re.Pattern[str]) -> list[Span]:
        """Return the spans to hide, in the order in which they were found."""
        text, lowered, position = self.text, self.lowered, 0
        while found := hint.search(lowered, position):
            start, end = found.span()
            if start > position and (text[start - 1].isalnum() or text[start - 1] in "_.-"):
                start = self._beginning(start, position)
            word = text[start:end].lstrip("-.")
            meaning = self._meaning(start, word) if lowered[start:end] in _BARE_NAMES else meaning_of(word)
            position = max(end, self._after(start, end, word, meaning))
        return self.hidden

    def _beginning(self, place: int, least: int) -> int:
        """Return where the word begins that ends at this place."""
        size = len(self.text)
        return size - end_of(_NAME, self.backwards, size - place, size - least)

    def _meaning(self, start: int, word: str) -> NameMeaning:
        """Return the meaning of a word with the one before it: access key, unexpected token, verification code."""
        before = self._behind(_WORD_BEHIND, start)
        return meaning_of(f"{before[1][::-1]}_{word}" if before else word)

    def _after(self, start: int, end: int, word: str, meaning: NameMeaning) -> int:  # noqa: PLR0911 - one for each way
        """Hide the secret that the word at this place names."""
        if meaning is NOTHING or word == "sshpass":
            return self._special(start, end, word.lower())
        if meaning.secrecy is Secrecy.NONE:
            return 0
        if sign := _SIGN.match(self.text, end):
            return self._pair(word, meaning, sign)
        if self.text.startswith("-", start) and (option := _AS_OPTION.match(self.text, end)):
            return self._option(meaning, option.end())
        if not meaning.secret:
            return 0
        scheme = _SCHEMES.get(word.lower())
        if scheme and (found := scheme.match(self.text, end)):
            return self._hide(found.end(), end_of(_CREDENTIALS, self.text, found.end(), len(self.text)))
        return next((after for read in self.readers if (after := read(start, end, word))), 0)

    def _hide(self, start: int, end: int) -> int:
        if not _is_worth_hiding(self.text, start, end):
            return 0
        self.hidden.append((start, end))
        return end

    def _pair(self, word: str, meaning: NameMeaning, sign: re.Match[str]) -> int:
        if not self._hides(meaning, sign.end()):
            return 0
        text = self.text
        start, end = value_span(text, sign.end(), sign=sign[1], is_header=is_header_name(word))
        if sign[1] == ":" and text[end : end + 1] == " " and text[start:end].lower() in _PROSE:
            return 0
        if word in {"PWD", "OLDPWD"} and text.startswith("/", start):  # the working directory of a process
            return 0
        return self._hide(start, end)

    def _hides(self, meaning: NameMeaning, start: int) -> bool:
        """Return whether the value that begins here is a secret under such a name, by its beginning alone."""
        match meaning.secrecy:
            case Secrecy.UNLESS_COUNT:
                return not _COUNT.match(self.text, start)
            case Secrecy.IF_RANDOM:
                return _RANDOM.match(self.text, start) is not None
            case _:
                return True

    def _option(self, meaning: NameMeaning, start: int) -> int:
        """Hide the value in `--password s3cr3t`, also in a list of arguments."""
        return self._hide(*value_span(self.text, start)) if self._hides(meaning, start) else 0

    def _special(self, start: int, end: int, word: str) -> int:  # noqa: PLR0911 - one branch for each word
        """Hide the text after a word that names no secret."""
        text = self.text
        match word:
            case "code" if text.startswith("=", end) and text[start - 1 : start] in {"?", "&", "#", ";"}:
                # A short code is that of a currency or a status.
                span = value_span(text, end + 1)
                return 0 if _SHORT_CODE.fullmatch(text, *span) else self._hide(*span)
            case "basic" if (basic := _BASIC.match(text, end)) and _has_a_password(basic[1]):
                return self._hide(basic.start(1), end_of(_CREDENTIALS, text, basic.start(1), len(text)))
            case "identified" if identified := _IDENTIFIED.match(text, end):
                return self._hide(*value_span(text, identified.end()))
            case "netloc" if netloc := _NETLOC.match(text, end):
                return self._hide(*netloc.span(1))
            case "curl" | "mysql" | "mysqldump" | "sshpass":
                return self._command(word, end)
            case "docker" | "podman" if login := _LOGIN.match(text, end):
                return self._hide(login.start(1), end_of(_ARGUMENT, text, login.start(1), len(text)))
            case "thin" if thin := _THIN.match(text, end):
                return self._hide(*thin.span(1))
        return 0

    def _command(self, word: str, end: int) -> int:
        """Hide the password in `curl -u bob:s3cr3t`."""
        dash = self.text.find(" -", end, end + _NEAR)
        option = None if dash < 0 else _COMMANDS[word].search(self.text, dash, end + _NEAR)
        return (
            self._hide(option.start(1), end_of(_ARGUMENT, self.text, option.start(1), len(self.text))) if option else 0
        )

    def _behind(self, pattern: re.Pattern[str], start: int) -> re.Match[str] | None:
        """Match the text before a place, backwards."""
        return pattern.match(self.backwards, len(self.text) - start)

    def _element(self, start: int, end: int, _: str) -> int:
        """Hide the value of `<password>s3cr3t</password>`, or `<key>password</key><string>s3cr3t</string>`."""
        if not self.text.startswith(("<", ":", ">", " "), max(start - 1, 0)):
            return 0
        if (tag := self._behind(_TAG_BEHIND, start)) and (rest := _AS_ATTRIBUTES.match(self.text, end)):
            return self._hide(rest.end(), self._closing(self.text[start - len(tag[0]) + 1 : end], rest.end()))
        if (naming := self._behind(_NAMING_TAG_BEHIND, start)) and meaning_of(naming[1][::-1]).label:
            following = _AS_NAMING_ELEMENT.match(self.text, end)
            return self._hide(following.end(), self._next_tag(following.end())) if following else 0
        return 0

    def _next_tag(self, start: int) -> int:
        end = self.text.find("<", start)
        return len(self.text) if end < 0 else end

    def _closing(self, tag: str, start: int) -> int:
        """Return where the element `tag` ends that begins at `start`."""
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

    def _label(self, start: int, end: int, _: str) -> int:
        """Hide the value of a name that is itself a value, in an object or element: `name=DB_PASSWORD value=s3cr3t`."""
        label = self._behind(_LABEL_BEHIND, start)
        if label is None or not meaning_of(label[2][::-1]).label or not _END_OF_LABEL.match(self.text, end):
            return 0
        first = start - len(label[0])
        value = self._value_ahead(end) or self._value_behind(first)
        if value is not None:
            span = value_span(self.text, value)
            hidden = self._hide(span[0], min(span[1], first) if value < first else span[1])
            return hidden if value > end else 0
        is_in_a_tag = self.text.rfind("<", max(0, first - _NEAR), first) > self.text.rfind(">", 0, first)
        content = _AS_NAMING_ATTRIBUTE.match(self.text, end) if is_in_a_tag else None
        return self._hide(content.end(), self._next_tag(content.end())) if content else 0

    def _value_ahead(self, end: int) -> int | None:
        """Return where the value of the label that ends here begins, in the same object or element."""
        limit = end_of(_OBJECT, self.text, end, end + _NEAR)
        if not _has_value(self.lowered, end, limit):
            return None
        for found in _NAME_AND_SIGN.finditer(self.text, end, limit):
            meaning = meaning_of(found[1])
            if meaning.value:
                return found.end()
            if meaning.label:
                break
        return None

    def _value_behind(self, end: int) -> int | None:
        """Return the same for a value that is before its label and belongs to no earlier label."""
        size = len(self.text)
        first = size - end_of(_OBJECT, self.backwards, size - end, size - max(0, end - _NEAR, self.looked_behind))
        self.looked_behind = end
        value, is_named = None, False
        if _has_value(self.lowered, first, end):
            for found in _NAME_AND_SIGN.finditer(self.text, first, end):
                meaning = meaning_of(found[1])
                if meaning.value:
                    value, is_named = None if is_named else found.end(), False
                elif meaning.label:
                    value, is_named = None, True
        return value

    def _entry(self, start: int, end: int, _: str) -> int:
        """Hide the value in `["X-Api-Key", "s3cr3t"]`; a longer list, as `("token", "amount", "day")`, has columns."""
        if (entry := _AS_ENTRY.match(self.text, end)) and self._behind(_ENTRY_BEHIND, start):
            first, last = value_span(self.text, entry.end())
            return self._hide(first, last) if _END_OF_ENTRY.match(self.text, last) else 0
        return 0

    def _row(self, _: int, end: int, __: str) -> int:
        """Hide the values in PostgreSQL's `Key (id, token)=(1, s3cr3t) already exists`."""
        close = self.text.find(")", end, end + _NEAR)
        if close < 0 or not self.text.startswith(")=(", close):
            return 0
        return self._hide(close + 2, end_of_bracket(self.text, close + 2))

    def _sql(self, _: int, end: int, word: str) -> int:
        """Hide the value in `PASSWORD 's3cr3t'` or `SECRET_ACCESS_KEY 's3cr3t'`, not in prose such as `token 'x'`."""
        if "_" not in word and not word.lower().endswith(_SQL_NAMES):
            return 0
        quoted = _AS_SQL.match(self.text, end)
        return self._hide(*value_span(self.text, quoted.end())) if quoted else 0

    def _netrc(self, start: int, end: int, word: str) -> int:
        """Hide the password in `machine h login bob password s3cr3t`, a line of .netrc."""
        following = _AS_NETRC.match(self.text, end) if word.lower() == "password" else None
        if following is None or not self._behind(_NETRC_BEHIND, start):
            return 0
        return self._hide(*value_span(self.text, following.end()))


def _has_value(lowered: str, start: int, end: int) -> bool:
    return lowered.find("val", start, end) >= 0 or lowered.find("content", start, end) >= 0


def _has_a_password(encoded: str) -> bool:
    """Return whether this is Base64 of `user:password`, or of a part of it."""
    return b":" in base64.b64decode(encoded[: len(encoded) // 4 * 4])
