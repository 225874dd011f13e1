"""Recognizable secrets: tests put them wherever a secret may be, and check that no output has them."""

from __future__ import annotations

import json
from typing import Any

CANARY = "Kn4ry"
"""Beginning of each secret; its place follows."""


def canaries(where: str) -> dict[str, Any]:
    """Return secrets under the names and in the forms by which they are recognized."""

    def secret(what: str) -> str:
        return f"{CANARY}-{where.replace(' ', '-')}-{what}"

    return {
        "password": secret("password"),
        "client_secret": {"value": secret("below"), "more": [secret("further-below")]},
        "nested": [{"api_key": secret("key"), "accessToken": secret("token"), "DB_PASSWD": secret("passwd")}],
        "url": f"https://user:{secret('userinfo')}@host/path?token={secret('query')}&page=2",
        "dsn": f"postgresql://user:{secret('dsn')}@host/name",
        "headers": {"Authorization": f"Bearer {secret('bearer')}", "Cookie": f"session={secret('cookie')}"},
        "text": (
            f"password={secret('in-text')} and client_secret: '{secret('quoted')}', at"
            f" postgresql://user:{secret('in-address')}@host/name with Bearer {secret('in-words')}"
        ),
        "payload": json.dumps({"user": "u", "password": secret("in-json")}),
        "material": f"-----BEGIN PRIVATE KEY-----\n{secret('pem')}\n-----END PRIVATE KEY-----",
    }
