"""Color of an environment's label on the pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_KNOWN: Final[Mapping[str, tuple[str, ...]]] = {
    "production": ("production", "prod", "live"),
    "staging": ("staging", "stage", "preprod"),
    "test": ("test", "testing", "qa"),
    "development": ("development", "dev", "local"),
}
"""Environments with a color, and the names by which they are known."""


def env_color(environment: str | None) -> str:
    """Return the color's name in the style sheet; empty for an environment without one: `env_color("Prod")`."""
    name = (environment or "").strip().lower()
    return next((color for color, names in _KNOWN.items() if name in names), "")
