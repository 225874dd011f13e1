"""Time zones whose clocks are changed in unusual ways, and the days of the changes."""

from __future__ import annotations

from datetime import UTC, datetime

ODD_ZONES = [
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",  # half an hour
    "Asia/Tehran",  # at midnight
    "America/Sao_Paulo",  # also at midnight
    "America/St_Johns",  # at 00:01 until 2011: the repeated hour has two dates
    "America/Havana",
    "Pacific/Apia",  # 30 December 2011 was skipped
    "Africa/Casablanca",  # twice a year for a month
    "Asia/Kathmandu",
    "Antarctica/Troll",  # two hours
    "UTC",
]
CHANGES = [
    datetime(2011, 12, 30, tzinfo=UTC),
    datetime(2010, 3, 14, tzinfo=UTC),
    datetime(2010, 11, 7, tzinfo=UTC),
    datetime(2016, 3, 21, tzinfo=UTC),
    datetime(2016, 9, 20, tzinfo=UTC),
    datetime(2017, 2, 19, tzinfo=UTC),
    datetime(2017, 10, 15, tzinfo=UTC),
    datetime(2024, 3, 31, tzinfo=UTC),
    datetime(2024, 10, 27, tzinfo=UTC),
    datetime(2024, 11, 3, tzinfo=UTC),
    datetime(2026, 3, 22, tzinfo=UTC),
    datetime(2026, 4, 5, tzinfo=UTC),
    datetime(2026, 10, 4, tzinfo=UTC),
]
