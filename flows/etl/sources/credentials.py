"""Credentials of a source, in one value that shows none of its secrets.

Secrets are given only here, so that the other parts of a request (its parameters, its address) can be stored and logged
unchanged. The declaration of the source reads them from a setting or a file.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

import attrs

from dataloader.jobs.secrets.known_secrets import KnownSecrets

_VALUE: Final = re.compile(r"[\x20-\x7e]+")


def _braced_names(values: Mapping[str, str]) -> str:
    return f"{{{', '.join(values)}}}"


def _check_values(_instance: Any, attribute: attrs.Attribute[Any], values: Mapping[str, str]) -> None:
    for name, value in values.items():
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            # Never show the value, which is a secret.
            raise ValueError(f"{attribute.name}.{name}: must be printable ASCII, at least one character, not ***")


@attrs.frozen(kw_only=True)
class Auth:
    """Secret headers and parameters of each request to a source. Their names may be shown.

    Args:
        headers: headers with secrets.
        params: parameters with secrets.

    Raises `ValueError` for a secret that is empty, for example because its setting is missing, or invalid in a header.
    """

    headers: Mapping[str, str] = attrs.field(factory=dict, repr=_braced_names, validator=_check_values)
    params: Mapping[str, str] = attrs.field(factory=dict, repr=_braced_names, validator=_check_values)

    @classmethod
    def bearer(cls, token: str) -> Auth:
        """Return credentials with a token in the header `Authorization: Bearer` (RFC 6750)."""
        return cls(headers={"Authorization": f"Bearer {_check_given('token', token)}"})

    @classmethod
    def basic(cls, user: str, password: str) -> Auth:
        """Return credentials with a user and a password (RFC 7617)."""
        both = f"{_check_given('user', user)}:{_check_given('password', password)}"
        return cls(headers={"Authorization": f"Basic {base64.b64encode(both.encode()).decode()}"})

    @classmethod
    def header(cls, name: str, value: str) -> Auth:
        """Return credentials with a key in a separate header, such as `X-API-Key`."""
        return cls(headers={name: value})

    @classmethod
    def param(cls, name: str, value: str) -> Auth:
        """Return credentials with a key in the query, such as `api_key`."""
        return cls(params={name: value})

    def hide(self, text: str) -> str:
        """Return the text with these secrets, and text that looks like a secret, masked."""
        return self._secrets.hide(text)

    @cached_property
    def _secrets(self) -> KnownSecrets:
        return KnownSecrets.of([*self.headers.values(), *self.params.values()])


def _check_given(name: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: must not be empty; check the setting that has its value")
    return value
