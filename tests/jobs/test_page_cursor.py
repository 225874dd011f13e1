from __future__ import annotations

import re
from datetime import UTC, datetime
from uuid import UUID

import pytest

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.page_cursor import BY_INSTANT, BY_NAME, BY_NUMBER, MAX_CURSOR

INSTANTS = datetime(2020, 1, 1, tzinfo=UTC), datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC)
KEYS = [
    *((BY_NUMBER, key) for key in (0, 17, 2**63 - 1)),
    *((BY_NAME, key) for key in ("", "load.cbr", "17", "𝕳ö/ ?&\t" * 25)),
    *((BY_INSTANT, (instant, UUID(int=2**128 - 1))) for instant in INSTANTS),
]


@pytest.mark.parametrize(("cursor", "key"), KEYS)
def test_a_cursor_survives_its_text_which_needs_no_escapes_in_an_address(cursor, key):
    text = cursor.text(key)
    assert re.fullmatch(r"[A-Za-z0-9_-]*", text)
    assert len(text) <= MAX_CURSOR
    assert cursor.key(text) == key


@pytest.mark.parametrize("number", [17, "17"])
def test_where_rows_are_numbered_a_number_is_a_place_too(number):
    assert BY_NUMBER.key(number) == 17


GARBAGE = ["?", "A", "f" + "_" * 31, "A" * 31 + "é", "A" * 3000, "٣", "\x00", "-1", -1]
FORGED = {
    BY_NUMBER: ["", "9" * 30, "9" * 5000, 2**63, *(BY_NUMBER.text(key) for key in (-1, 2**63, 1.5, True, None, [1]))],
    BY_NAME: ["", "17", *(BY_NAME.text(key) for key in ("a\x00", None, ["a"], 1, "a" * (MAX_CURSOR + 1)))],
    BY_INSTANT: [
        *("", "17", "AAAA", BY_NUMBER.text(17), BY_NAME.text("a")),
        *(BY_INSTANT.text(key) for key in (["0001-01-01T00:00:00+14:00", UUID(int=0)], ["2020-01-01T00:00:00Z"], {})),
        BY_INSTANT.text([datetime(2020, 1, 1), UUID(int=0)]),  # noqa: DTZ001
    ],
}


@pytest.mark.parametrize("cursor", FORGED)
def test_a_foreign_cursor_is_refused_with_its_field_and_the_allowed_form(cursor):
    for forged in GARBAGE + FORGED[cursor]:
        with pytest.raises(BadRequest) as refused:
            cursor.key(forged)
        assert refused.value.field == "after"
        assert refused.value.message.startswith("must be the `next` of the previous page, not ")
        assert len(refused.value.message) < 120
