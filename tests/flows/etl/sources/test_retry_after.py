"""Pauses that a service requests in its headers, in all their formats."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from dataloader.flows.etl.sources.retry_after import MAX_HINT_S, rest_s, retry_after_s

pytestmark = pytest.mark.requirement("S7")

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
EPOCH = int(NOW.timestamp())


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120),
        (" 1.5 ", 1.5),
        ("0", 0),
        ("Sat, 21 Nov 2026 12:02:00 GMT", 120),
        ("Saturday, 21-Nov-26 12:02:00 GMT", 120),
        ("Sat, 21 Nov 2026 11:00:00 GMT", 0),
        ("999999999", MAX_HINT_S),
        ("Sat, 21 Nov 2099 12:00:00 GMT", MAX_HINT_S),
        ("soon", None),
        ("-5", None),
        ("nan", None),
        ("", None),
        ("Sat, 99 Nov 2026 12:02:00 GMT", None),
        ("1" * 500, None),
    ],
)
def test_retry_after_is_read_in_both_forms_and_bounded_to_a_day(value, seconds):
    assert retry_after_s({"retry-after": value}, now=NOW) == seconds


def test_a_date_counts_from_the_service_s_own_clock():
    headers = {"retry-after": "Sat, 21 Nov 2026 13:01:00 GMT", "date": "Sat, 21 Nov 2026 13:00:00 GMT"}
    assert retry_after_s(headers, now=NOW) == 60
    assert retry_after_s(headers, now=NOW.astimezone(timezone(timedelta(hours=3)))) == 60


def test_an_instant_of_a_reset_counts_from_the_service_s_own_clock():
    headers = {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(EPOCH + 45)}
    assert rest_s({**headers, "date": "Sat, 21 Nov 2026 12:00:30 GMT"}, now=NOW) == 15


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "30"}, 30),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(EPOCH + 45)}, 45),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": str((EPOCH + 45) * 1_000)}, 45),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "Sat, 21 Nov 2026 12:00:20 GMT"}, 20),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(EPOCH - 45)}, 0),
        ({"x-ratelimit-remaining": "0"}, 0),
        ({"x-ratelimit-remaining": "1", "x-ratelimit-reset": "30"}, 0),
        ({"x-ratelimit-remaining": "10", "x-ratelimit-reset": "30"}, 0),
        ({"ratelimit-remaining": "0", "ratelimit-reset": "7"}, 7),
        ({"x-rate-limit-remaining": "0", "x-rate-limit-reset": "8"}, 8),
        ({"ratelimit": '"default";r=0;t=9'}, 9),
        ({"ratelimit": '"default";r=50;t=9'}, 0),
        ({"ratelimit": '"a";r=5;t=900, "b";r=0;t=12, "c";r=0;t=3'}, 12),
        ({"ratelimit": "limit=100, remaining=0, reset=11"}, 11),
        ({"ratelimit": "limit=100, remaining=4, reset=11"}, 0),
        ({"retry-after": "5", "x-ratelimit-remaining": "0", "x-ratelimit-reset": "3"}, 5),
        ({"ratelimit": '"default";r=0;t=999999999'}, MAX_HINT_S),
    ],
)
def test_a_quota_that_is_used_up_asks_for_rest_until_it_is_filled(headers, seconds):
    assert rest_s(headers, now=NOW) == pytest.approx(seconds, abs=0.001)
