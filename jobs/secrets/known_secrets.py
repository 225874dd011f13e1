"""Secrets that the program knows, such as the credentials of a source, which are removed from texts from outside."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Final, Self
from urllib.parse import quote, quote_plus, unquote

import attrs

from dataloader.jobs.secrets.masking import MASKED, mask_text

SHORTEST: Final = 4
"""Minimum length of a replaced secret: shorter ones would be found everywhere."""


@attrs.frozen
class KnownSecrets:
    """Texts that must not be shown, the longest first."""

    texts: tuple[str, ...] = attrs.field(repr=False)

    @classmethod
    def of(cls, values: Iterable[str]) -> Self:
        """Return the secrets of some values: each value, its token after a scheme, and their usual encodings."""
        texts = {form for value in values for part in _parts_of_secret(value) for form in _forms(part)}
        return cls(tuple(sorted((text for text in texts if len(text) >= SHORTEST), key=len, reverse=True)))

    def hide(self, text: str) -> str:
        """Return the text without these secrets, one that its end cuts off, and anything that looks like a secret."""
        for secret in self.texts:
            text = text.replace(secret, MASKED)
        return mask_text(self._without_cut_end(text))

    def _without_cut_end(self, text: str) -> str:
        """Return a text that was cut to a length without the beginning of a secret at its end."""
        for secret in self.texts:
            beginning = secret[:SHORTEST]
            at = text.find(beginning, max(0, len(text) - len(secret) + 1))
            while at >= 0:
                if secret.startswith(text[at:]):
                    return text[:at] + MASKED
                at = text.find(beginning, at + 1)
        return text


def _parts_of_secret(value: str) -> set[str]:
    """Return a value, for a header like `Bearer TOKEN` also the token, and for `Basic` also the user's password."""
    scheme, _, token = value.rpartition(" ")
    parts = {value, token}
    if scheme.lower() == "basic":
        try:
            user_and_password = base64.b64decode(token, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return parts
        parts |= {user_and_password, user_and_password.partition(":")[2]}
    return parts


def _forms(value: str) -> set[str]:
    plain = value.encode()
    encoded = {base64.b64encode(plain).decode().rstrip("="), base64.urlsafe_b64encode(plain).decode().rstrip("=")}
    # Without its last character Base64 is the same whatever text follows the secret.
    return {value, quote(value, safe=""), quote_plus(value), unquote(value), *(text[:-1] for text in encoded)}
