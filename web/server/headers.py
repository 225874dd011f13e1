"""Headers that every answer has, whichever code creates it."""

from __future__ import annotations

from typing import Final

HEADERS: Final = (
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
)
NO_PAGE: Final = ("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
"""Header for answers that are not pages: they may load nothing. A page has its own policy."""
REQUEST_ID: Final = "X-Request-ID"
