"""Reader's preferences for all pages: time zone, colors, shortcuts; kept in a cookie of the browser."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, tzinfo
from functools import lru_cache
from typing import Final, Literal, Self
from zoneinfo import ZoneInfo, available_timezones

import attrs

Theme = Literal["system", "light", "dark"]
THEMES: Final[tuple[Theme, ...]] = ("system", "light", "dark")
LASTS_S: Final = 400 * 86_400
"""Longest time for which browsers keep a cookie."""


@attrs.frozen
class Preferences:
    """Preferences of one reader. `zone`: a name of the IANA database."""

    zone: str = "UTC"
    theme: Theme = "system"
    shortcuts: bool = True

    @classmethod
    def of(cls, cookie: str | None) -> Self:
        """Return the preferences of a cookie, with defaults for missing or unknown values."""
        zone, _, rest = (cookie or "").partition("|")
        theme, _, shortcuts = rest.partition("|")
        return cls(
            zone if zone in zones() else "UTC",
            theme if theme in THEMES else "system",
            shortcuts != "off",
        )

    @property
    def cookie(self) -> str:
        """Cookie with these preferences."""
        return f"{self.zone}|{self.theme}|{'on' if self.shortcuts else 'off'}"

    @property
    def tz(self) -> tzinfo:
        """Zone in which times are shown."""
        return UTC if self.zone == "UTC" else ZoneInfo(self.zone)


@lru_cache(maxsize=1)
def zones() -> Mapping[str, None]:
    """Return the names of all zones, in order. They are those of the package tzdata, the same on every machine."""
    return dict.fromkeys(sorted(name for name in available_timezones() if not name.startswith(("posix", "right"))))
