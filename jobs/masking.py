"""Takes secrets out of what people and machines get to read: log lines, error texts, settings, a job's args (Q16).

The logs call `mask` on every line, the settings `mask_text` on a DSN; the web room may use both. Two rules: the value
under a name like `password` or `access_key` becomes `***`, and inside texts URLs lose their user and password and
`name=value` pairs their value. When in doubt a value is hidden; names that ETL uses for harmless things (`lock_key`,
`primary_key`, `token_count`) stay readable.

Never raises, whatever it is given, and needs time linear in the text: each pattern starts only where a word does or at
a fixed mark, and consumes without backtracking. Rejected: one big pattern with the secret names in it; it can't tell
`key` from `monkey` and backtracks on hostile texts.
"""

import datetime as dt
import decimal
import functools
import pathlib
import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Final

MASKED: Final = "***"
_MAX_DEPTH: Final = 16
_MAX_NAME: Final = 200
_MAX_INT_BITS: Final = 63

_WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*")
_ALWAYS: Final = frozenset({"pwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey", "apikeys"})
_AT_THE_END: Final = frozenset(
    {"token", "tokens", "auth", "authorization", "cookie", "cookies", "dsn", "dsns", "sig", "signature"}
    | {"accesskey", "privatekey", "secretkey", "signingkey", "encryptionkey", "jwt", "jwts"}
)
_NO_PASSWORDS: Final = frozenset({"bypass", "compass", "encompass", "overpass", "surpass", "trespass", "underpass"})
_CARRIERS: Final = frozenset({"value", "values", "hash", "header", "pem", "base64", "hex", "text", "raw"})
_HARMLESS_KEYS: Final = frozenset(
    {"lock", "partition", "idempotency", "primary", "foreign", "unique", "natural", "surrogate", "business", "public"}
    | {"sort", "order", "group", "join", "merge", "range", "hash", "dedup", "cache", "routing", "message", "object"}
    | {"s3", "row", "column", "index", "dict", "json", "parent", "candidate", "composite", "distribution", "on"}
)

# A text without any of these has nothing to hide; most log lines end here. Not a pattern: that takes 20 times as long.
_HINTS: Final = (
    frozenset({"://", "pass", "pwd", "token", "secret", "key", "dsn", "auth"})
    | {"cookie", "credential", "sig", "bearer", "basic", "begin", "jwt"}
)  # fmt: skip
_USERINFO = re.compile(
    r"""://(?:[^\s/?#"'<>]*@"""
    # A password with a raw / ? or # in it is no valid URL, but people write them; host:port/path@x is not one.
    r"""|[^\s/?#:@"'<>]{0,100}:(?!\d{1,5}(?:[/?#,]|$))[^\s"<>]{0,100}?@)"""
)
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----)(?:[^-]|-(?!----))*+")
_SCHEME = re.compile(
    r"\b(bearer[ \t]+)(?!tokens?\b|auth)[\w.~+/=*-]{3,}+"
    r"|\b(basic[ \t]+)(?=(?-i:[A-Za-z0-9+/][a-z+/]{0,100}[A-Z0-9=]))[A-Za-z0-9+/]{6,}+={0,2}",
    re.IGNORECASE,
)
_NAME = re.compile(
    r"""(?<![\w.-])(--?)?([A-Za-z_][\w.-]*+)(?:\\*+["']?[ \t]*+(=>|[:=])[ \t]*+|\)=(?=\()"""
    # A command's option, in a line of a shell and in a list of arguments.
    r"""|(?(1)(?:[ \t]++|["'],[ \t]*+)(?!["']?(?:--|\s))|(?!)))"""
)
_OPTION = re.compile(r"--?[A-Za-z_][\w.-]*+")
_OPENING_QUOTE = re.compile(r"""(?:[\w.]{0,40}+\()?[brufBRUF]{0,2}(\\{0,8})(["'])""")
_REST_OF_STRING = {'"': re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL), "'": re.compile(r"(?:[^'\\]|\\.)*+", re.DOTALL)}
_HEADER = re.compile(r"""[^\r\n"']*+""")
_BARE = re.compile(r"""(?:[^\s&"'<>,;\\]|\\(?!["'])|["'](?=\w)|[,;](?!\s|$|["']?[\w.-]*+["']?\s*+[=:]))*+""")
_BRACKET = re.compile(r""""(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|[\[\]{}()]""", re.DOTALL)
_HARMLESS_VALUES: Final = frozenset({"", "null", "none", "true", "false", MASKED})


@functools.lru_cache(maxsize=4096)
def _names_a_secret(name: str) -> bool:
    words = [word.lower() for word in _WORD.findall(name)]
    while len(words) > 1 and words[-1] in _CARRIERS:
        words.pop()
    if not words:
        return False
    if any("passw" in word or word.rstrip("0123456789") in _ALWAYS or word.endswith("secret") for word in words):
        return True
    last = words[-1].rstrip("0123456789")
    if last == "key":
        return len(words) == 1 or words[-2] not in _HARMLESS_KEYS
    if last == "keys":
        return len(words) > 1 and words[-2] not in _HARMLESS_KEYS
    if last.endswith("pass"):
        return last not in _NO_PASSWORDS
    return last in _AT_THE_END or last.endswith("token")


def names_a_secret(name: str) -> bool:
    """Tell whether the value under this name must not be shown; camelCase, snake_case, dashes and dots alike (Q16)."""
    return _names_a_secret(name[-_MAX_NAME:])


def mask_text(text: str) -> str:
    """Return the text with the secrets in it replaced by `***`: URLs, headers, `name=value`, JSON, private keys (Q16).

    Takes time linear in the length. What is masked once stays as it is when masked again.
    """
    lowered = text.lower()
    if not any(hint in lowered for hint in _HINTS):
        return text
    text = _USERINFO.sub(f"://{MASKED}@", text)
    text = _PRIVATE_KEY.sub(rf"\1{MASKED}", text)
    text = _SCHEME.sub(lambda match: (match[1] or match[2]) + MASKED, text)
    return _mask_pairs(text)


def mask(value: object) -> object:
    """Return a copy made of dict, list, str, numbers, bool and None only, with the secrets in it masked (Q16).

    Bytes become text, dates ISO text, every other object its masked `repr`. What lies deeper than 16 levels becomes
    `…`. `None`, `True` and `False` are shown even under a secret name: they say whether there is a secret.
    """
    return _mask(value, 0)


def _mask(value: object, depth: int) -> object:
    if type(value) is str:
        return mask_text(value)
    if value is None or value is True or value is False:
        return value
    # Subclasses (enums, numpy's, a str with a repr of its own) go to plain values, so that any encoder takes them.
    if isinstance(value, (int, float)):
        return _plain_number(value)
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        try:
            return "…" if depth >= _MAX_DEPTH else _mask_container(value, depth + 1)
        except Exception as error:  # noqa: BLE001 - a foreign container whose iteration fails must not fail a log line
            return f"<unreadable {type(value).__name__}: {type(error).__name__}>"
    return mask_text(_text(value))


def _plain_number(value: float) -> float | str:
    if not isinstance(value, int):
        return float.__float__(value)
    # Longer ones are no numbers to most readers of JSON, and Python refuses to print the longest.
    return int.__int__(value) if value.bit_length() <= _MAX_INT_BITS else _text(value)


def _mask_container(value: Mapping[object, object] | Iterable[object], depth: int) -> object:
    if isinstance(value, Mapping):
        masked: dict[str, object] = {}
        for key, item in list(value.items()):
            name = _text(key)
            hidden = item is not None and not isinstance(item, bool) and names_a_secret(name)
            masked[mask_text(name)] = MASKED if hidden else _mask(item, depth)
        return masked
    items: list[object] = []
    option = False
    for item in value:
        text = item if isinstance(item, str) else ""
        items.append(MASKED if option and text and not text.startswith("--") else _mask(item, depth))
        option = _OPTION.fullmatch(text) is not None and names_a_secret(text)
    return items


def _text(value: object) -> str:
    """Return any object as text; never raises."""
    try:
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return bytes(value).decode("utf-8", "backslashreplace")
        if isinstance(value, (dt.date, dt.time)):
            return value.isoformat()
        if isinstance(value, (uuid.UUID, decimal.Decimal, pathlib.PurePath)):
            return str(value)
        return repr(value)
    except Exception as error:  # noqa: BLE001 - a broken __repr__ must not fail a log line
        return f"<unprintable {type(value).__name__}: {type(error).__name__}>"


def _mask_pairs(text: str) -> str:
    """Mask the values of all `name=value`, `name: value`, `"name": "value"` and `(name)=(value)` with a secret name."""
    parts: list[str] = []
    done = 0
    found = _NAME.search(text)
    while found:
        following = found.end()
        if names_a_secret(found[2]):
            start, end = _value_span(text, following, header=found[3] == ":" and _is_header(found[2]))
            if text[start:end].lower() not in _HARMLESS_VALUES:
                parts += (text[done:start], MASKED)
                done = following = end
        found = _NAME.search(text, following)
    return "".join([*parts, text[done:]]) if parts else text


def _value_span(text: str, start: int, *, header: bool) -> tuple[int, int]:
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
    found = (_HEADER if header else _BARE).match(text, start)
    end = found.end() if found else start
    while end > start and text[end - 1] in ")]}.,;:":
        end -= 1
    return start, end


def _is_header(name: str) -> bool:
    """Tell whether the value of this name, after a colon, is all the rest of the line."""
    return name.lower().endswith(("authorization", "cookie", "cookies"))


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
