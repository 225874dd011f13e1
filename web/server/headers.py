"""The headers that every answer carries, whoever makes it."""

from __future__ import annotations

from typing import Final

HEADERS: Final = (
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
)
NO_PAGE: Final = ("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
"""For answers that are not pages: they may load nothing. A page has a policy of its own."""
REQUEST_ID: Final = "X-Request-ID"
