"""Secrets that can be told from all else: tests put them wherever a secret may stand, and look where they come out."""

from __future__ import annotations

import json
from typing import Any

CANARY = "Kn4ry"
"""How each of them begins; where it was put stands behind."""


def canaries(where: str) -> dict[str, Any]:
    """Secrets under the names and in the shapes that tell them from other values."""

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
