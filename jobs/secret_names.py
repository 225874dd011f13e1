"""Which names say that the value under them is a secret: `password`, `X-Api-Key`, `session_id` (Q16).

Names are taken apart into words, so that camelCase, snake_case, dashes and dots are alike and `key` is told from
`monkey`. When in doubt a value is hidden; names that loads use for harmless things (`lock_key`, `primary_key`,
`token_count`, `status_code`) are not secrets.
"""

from __future__ import annotations

import functools
import re
from typing import Final

import attrs

MAX_NAME: Final = 200
"""Characters of a name that are looked at: its end."""

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*")
_ALWAYS: Final = frozenset(
    {"pwd", "pswd", "passcode", "passcodes", "passphrase", "secret", "secrets", "credential", "credentials"}
    | {"apikey", "apikeys"}
)
_AT_THE_END: Final = frozenset(
    {"token", "tokens", "auth", "authorization", "cookie", "cookies", "dsn", "dsns", "sig", "signature", "jwt", "jwts"}
    | {"bearer", "csrf", "xsrf", "otp", "otps", "totp", "pin", "pins", "cvv", "cvc", "verifier", "assertion"}
    | {"accesskey", "accountkey", "authkey", "encryptionkey", "masterkey", "privatekey", "secretkey", "sharedkey"}
    | {"signingkey", "sshkey"}
)
_ENDINGS: Final = ("token", "sessionid", "sessid")
_NO_PASSWORDS: Final = frozenset({"bypass", "compass", "encompass", "overpass", "surpass", "trespass", "underpass"})
_CARRIERS: Final = frozenset({"value", "values", "hash", "header", "pem", "base64", "hex", "text", "raw"})
_HARMLESS_KEYS: Final = frozenset(
    {"lock", "partition", "idempotency", "primary", "foreign", "unique", "natural", "surrogate", "business", "public"}
    | {"sort", "order", "group", "join", "merge", "range", "hash", "dedup", "cache", "routing", "message", "object"}
    | {"s3", "row", "column", "index", "dict", "json", "parent", "candidate", "composite", "distribution", "on"}
)
# Not `security`: to markets that is a share, and its code is no secret.
_SECRET_CODES: Final = frozenset(
    {"access", "activation", "auth", "authorization", "backup", "confirmation", "fa", "login", "mfa", "oauth", "otp"}
    | {"pin", "recovery", "reset", "sms", "tfa", "totp", "verification"}
)
_LABELS: Final = frozenset(
    {"attribute", "env", "field", "header", "label", "name", "option", "param", "parameter", "property"}
    | {"setting", "var", "variable"}
)
_VALUES: Final = frozenset({"content", "val", "value", "values"})


@attrs.frozen
class Meaning:
    """What a name says of the value under it.

    Args:
        secret: it must not be shown.
        label: it may be a name itself, that of the value beside it: `name`, `headerName`, `key`.
        value: it may be the value of a name beside it: `value`, `stringValue`.
    """

    secret: bool
    label: bool
    value: bool


NOTHING: Final = Meaning(secret=False, label=False, value=False)
"""What most names say."""


def names_a_secret(name: str) -> bool:
    """Tell whether the value under this name must not be shown; camelCase, snake_case, dashes and dots alike (Q16)."""
    return meaning_of(name).secret


def meaning_of(name: str) -> Meaning:
    """Return what a name says of its value; by the last 200 characters of the name."""
    return _meaning_of(name[-MAX_NAME:])


@functools.lru_cache(maxsize=4096)
def _meaning_of(name: str) -> Meaning:
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return NOTHING
    label, value = words == ["key"] or words[-1] in _LABELS, words[-1] in _VALUES
    secret = _is_secret(words)
    return Meaning(secret, label, value) if secret or label or value else NOTHING


def _is_secret(words: list[str]) -> bool:
    while len(words) > 1 and words[-1] in _CARRIERS:
        words = words[:-1]
    if any("passw" in word or word.rstrip("0123456789") in _ALWAYS or word.endswith("secret") for word in words):
        return True
    before, last = words[-2] if len(words) > 1 else "", words[-1].rstrip("0123456789")
    match last:
        case "key":
            secret = before not in _HARMLESS_KEYS
        case "keys":
            secret = bool(before) and before not in _HARMLESS_KEYS
        case "code" | "codes":
            secret = before in _SECRET_CODES
        case "id" | "ids":
            secret = before == "session"
        case _ if last.endswith("pass"):
            secret = last not in _NO_PASSWORDS
        case _:
            secret = last in _AT_THE_END or last.endswith(_ENDINGS)
    return secret
