"""Names that say that their value is a secret: `password`, `X-Api-Key`, `session_id`.

Names are split into words, so that camelCase, snake_case, dashes and dots are alike, and `key` is distinguished from
`monkey`. The last word decides, with the one before it. Three principles keep the logs of loads readable:

* A plural with a number is a count (`max_tokens: 4096`).
* Only keys that open something are secret (`api_key`, but not `customer_key`); others if their value looks random.
* A word that describes a secret is not a secret (`password_file`).
"""

from __future__ import annotations

import enum
import functools
import re
from itertools import pairwise
from typing import Final

import attrs

MAX_NAME: Final = 200
"""Number of characters of a name, at its end, that are read."""

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*")
_ALWAYS: Final = frozenset(
    {"pwd", "pswd", "passcode", "passcodes", "passphrase", "secret", "secrets", "credential", "credentials"}
)
_AT_THE_END: Final = frozenset(
    {"auth", "authorization", "cookie", "cookies", "dsn", "dsns", "sig", "signature", "jwt", "jwts"}
    | {"pw", "bearer", "csrf", "xsrf", "otp", "otps", "totp", "pin", "pins", "cvv", "cvc", "verifier"}
    | {"accesskey", "accountkey", "authkey", "encryptionkey", "masterkey", "privatekey", "secretkey", "sharedkey"}
    | {"signingkey", "sshkey"}
)
_ENDINGS: Final = ("apikey", "apikeys", "sessionid", "sessid")
_NO_PASSWORDS: Final = frozenset({"bypass", "compass", "encompass", "overpass", "surpass", "trespass", "underpass"})
_CARRIERS: Final = frozenset(
    {"value", "values", "hash", "header", "pem", "base64", "b64", "hex", "text", "raw", "data", "material", "plaintext"}
)
# Descriptions of a secret are not secret: password_changed_at, secret_name, credentials_file. A secret_id is, in Vault.
_DESCRIBES: Final = frozenset(
    {"age", "arn", "at", "attempts", "backend", "changed", "column", "columns", "count", "date", "dir", "disabled"}
    | {
        "enabled",
        "env",
        "error",
        "errors",
        "expired",
        "expires",
        "expiry",
        "file",
        "format",
        "in",
        "length",
        "location",
    }
    | {"manager", "max", "min", "name", "names", "path", "policy", "provider", "required", "rotation", "size", "status"}
    | {"store", "strength", "ttl", "type", "updated", "uri", "url", "version"}
)
_SECRET_KEYS: Final = frozenset(
    {"access", "account", "admin", "aes", "api", "app", "application", "auth", "authentication", "authorization", "aws"}
    | {"azure", "cipher", "client", "consumer", "crypto", "decryption", "deploy", "developer", "encryption", "fernet"}
    | {"functions", "gpg", "hmac", "host", "ingest", "insert", "jwt", "license", "master", "openai", "pgp", "private"}
    | {"rsa", "secret", "server", "service", "session", "shared", "signature", "signing", "ssh", "ssl", "storage"}
    | {"stripe", "subscription", "symmetric", "tls", "unseal", "vapid", "webhook", "wrapping", "write"}
)
_HARMLESS_KEYS: Final = frozenset(
    {"lock", "partition", "idempotency", "primary", "foreign", "unique", "natural", "surrogate", "business", "public"}
    | {"sort", "order", "group", "join", "merge", "range", "hash", "dedup", "cache", "routing", "message", "object"}
    | {"s3", "row", "column", "index", "dict", "json", "parent", "candidate", "composite", "distribution", "on"}
)
_HARMLESS_TOKENS: Final = frozenset(
    {"bos", "cancellation", "continuation", "end", "eos", "fencing", "max", "min", "next", "pad", "page", "pagination"}
    | {"resume", "skip", "start", "stop", "sync", "unexpected", "unk"}
)
_COUNTABLE: Final = frozenset({"cookies", "credentials", "keys", "apikeys", "passwords", "secrets", "tokens"})
# Not `security`: in markets that is a share, and its code is no secret.
_SECRET_CODES: Final = frozenset(
    {"access", "activation", "auth", "authorization", "backup", "confirmation", "fa", "login", "mfa", "oauth", "otp"}
    | {"pin", "recovery", "reset", "sms", "tfa", "totp", "verification"}
)
_SECRET_IF_OF: Final = {
    "key": _SECRET_KEYS,
    "keys": _SECRET_KEYS,
    "code": _SECRET_CODES,
    "codes": _SECRET_CODES,
    "id": frozenset({"session"}),
    "ids": frozenset({"session"}),
    "assertion": frozenset({"client", "jwt", "saml", "user"}),
    "response": frozenset({"saml"}),
}
_LABELS: Final = frozenset(
    {"attribute", "env", "field", "header", "label", "name", "option", "param", "parameter", "property"}
    | {"setting", "var", "variable"}
)
_VALUES: Final = frozenset({"content", "val", "value", "values"})
_COUNT: Final = re.compile(r"\s*\d[\d_,.]{0,14}\s*[kKmM]?\s*")
RANDOM: Final = re.compile(r"(?<![A-Za-z0-9])(?=(?:[A-Za-z]*+\d++[A-Za-z]++){2})[A-Za-z0-9]{20}")
"""Pattern of random text: twenty letters and digits that change more than once from one to the other."""


class Secrecy(enum.Enum):
    """Secrecy of the value under a name: never, always, unless it is a number, or only if it looks random."""

    NONE = enum.auto()
    ALWAYS = enum.auto()
    UNLESS_COUNT = enum.auto()
    IF_RANDOM = enum.auto()


@attrs.frozen
class NameMeaning:
    """Meaning of a name for the value under it.

    Args:
        secrecy: whether the value must not be shown.
        label: the value may itself be a name, of the value beside it: `name`, `headerName`, `key`.
        value: the value may belong to a name beside it: `value`, `stringValue`.
    """

    secrecy: Secrecy
    label: bool
    value: bool

    @property
    def secret(self) -> bool:
        """Return whether the name by itself is that of a secret."""
        return self.secrecy is Secrecy.ALWAYS or self.secrecy is Secrecy.UNLESS_COUNT

    def hides(self, value: str) -> bool:
        """Return whether this value must not be shown under the name."""
        match self.secrecy:
            case Secrecy.ALWAYS:
                return True
            case Secrecy.UNLESS_COUNT:
                return not _COUNT.fullmatch(value)
            case Secrecy.IF_RANDOM:
                return RANDOM.search(value) is not None
            case Secrecy.NONE:
                return False


NOTHING: Final = NameMeaning(Secrecy.NONE, label=False, value=False)
"""Meaning of most names."""


def names_a_secret(name: str) -> bool:
    """Return whether the value under this name must not be shown; camelCase, snake_case, dashes and dots alike."""
    return meaning_of(name).secret


def meaning_of(name: str) -> NameMeaning:
    """Return the meaning of a name for its value, by the last 200 characters of the name."""
    return _meaning_of(name[-MAX_NAME:])


@functools.lru_cache(maxsize=4096)
def _meaning_of(name: str) -> NameMeaning:
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return NOTHING
    label, value = words == ["key"] or words[-1] in _LABELS, words[-1] in _VALUES
    # The summary of tests: PASS=12 WARN=0.
    secrecy = Secrecy.UNLESS_COUNT if name == "PASS" else _secrecy(words)
    return NOTHING if secrecy is Secrecy.NONE and not label and not value else NameMeaning(secrecy, label, value)


def _secrecy(words: list[str]) -> Secrecy:
    while len(words) > 1 and words[-1] in _CARRIERS:
        words = words[:-1]
    before, last = words[-2] if len(words) > 1 else "", words[-1].rstrip("0123456789")
    if _is_in_a_secret(words):
        secret, unless_count = last not in _DESCRIBES, last in _COUNTABLE
    else:
        secret, unless_count = _is_secret(before, last), last in _COUNTABLE
    if secret:
        return Secrecy.UNLESS_COUNT if unless_count else Secrecy.ALWAYS
    is_a_key = last == "key" or (last == "keys" and bool(before))
    return Secrecy.IF_RANDOM if is_a_key and before not in _HARMLESS_KEYS else Secrecy.NONE


def _is_in_a_secret(words: list[str]) -> bool:
    """Return whether one of the words by itself names a secret, wherever it is in the name."""
    return ("account", "key") in pairwise(words) or any(  # fs.azure.account.key.HOST
        ("passw" in word and not word.startswith("passwordless"))
        or word.rstrip("0123456789") in _ALWAYS
        or word.endswith("secret")
        for word in words
    )


def _is_secret(before: str, last: str) -> bool:
    if last in _SECRET_IF_OF:
        return before in _SECRET_IF_OF[last] or (last in {"key", "keys"} and before.endswith("api"))
    if last.endswith(("token", "tokens")):
        word = last.rstrip("s").removesuffix("token")
        return (word or before) not in _HARMLESS_TOKENS
    if last.endswith("pass"):
        return last not in _NO_PASSWORDS
    return last in _AT_THE_END or last.endswith(_ENDINGS)
