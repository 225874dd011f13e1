"""Only the invalid rows of a batch that the database refuses are left out; few tries find them (E10)."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from etl_loads import STAGE, open_load

from dataloader.jobs.errors import StoreUnavailable
from dataloader.store.etl.refused_rows import MAX_TRIES, RefusedSearch
from dataloader.store.etl.staging import StagedLines
from dataloader.store.etl.target_table import quote

pytestmark = pytest.mark.requirement("E10")
NEVER = 1_000_000
SUBTRANSACTIONS = 64
"""Number of subtransactions that a server keeps in memory for all sessions (PGPROC_MAX_CACHED_SUBXIDS)."""


class Noting:
    """Connection that records the number of rows of each COPY, and its transaction."""

    def __init__(self, connection, tries):
        self._connection = connection
        self._tries = tries

    async def copy_to_table(self, *args, source, **options):
        transaction = await self._connection.fetchval("SELECT pg_current_xact_id()::text")
        self._tries.append((transaction, bytes(source).count(b"\n")))
        return await self._connection.copy_to_table(*args, source=source, **options)

    def __getattr__(self, name):
        return getattr(self._connection, name)


@pytest.fixture
def tries():
    """Return each COPY of a search, as its transaction and its rows; check the limit for each transaction."""
    tries = []
    yield tries
    assert max(Counter(transaction for transaction, _ in tries).values(), default=0) <= MAX_TRIES < SUBTRANSACTIONS


@pytest.fixture
def apart(transactions, raw, tries):
    """Return a function that stages rows with numbers from 0 on, in pieces of two requests.

    The rows in `poison` are invalid.
    """

    async def apart(number, poison, *, most_in_a_row=NEVER, definition="id int"):
        load = await open_load(transactions, raw, definition)
        cells = [f"{place}{'x' if place in poison else ''}" for place in range(number)]
        half = number // 3
        pieces = [
            (
                request,
                StagedLines(
                    ("id",), len(part), "".join(f"{place}\t{cell}\n" for place, cell in enumerate(part, 1)).encode()
                ),
            )
            for request, part in enumerate((cells[:half], cells[half:]), 1)
            if part
        ]
        found = RefusedSearch(load.segment, pieces, most_in_a_row)
        while not found.is_over:
            found.staged += await transactions.run(lambda connection: found.aio_go_on(Noting(connection, tries)))
        staged = await raw.fetchval(f"SELECT array_agg(id ORDER BY id) FROM {quote(STAGE)}")
        await raw.execute("DROP TABLE target")
        return found, staged or []

    return apart


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3, 7, 100, 257])
async def test_a_row_is_found_wherever_it_is_in_twice_the_logarithm_of_the_batch(apart, tries, number):
    bound = max(1, math.floor(2 * math.log2(number)))
    for place in {0, 1, number // 3, number // 2, number - 2, number - 1} & set(range(number)):
        tries.clear()
        found, staged = await apart(number, {place})
        assert staged == [other for other in range(number) if other != place]
        [row] = found.refused
        assert (row.place, row.piece, found.staged) == (place, int(place >= number // 3 > 0), number - 1)
        assert row.error.startswith("column id: invalid input syntax for type integer: ")
        assert len(tries) <= bound, (place, tries)


@pytest.mark.slow
async def test_of_any_rows_that_are_refused_all_are_found_and_the_others_are_staged(apart, tries):
    chance = random.Random(5)
    for share in (0.02, 0.1, 0.5, 0.9):
        tries.clear()
        poison = {place for place in range(200) if chance.random() < share}
        found, staged = await apart(200, poison)
        assert [row.place for row in found.refused] == sorted(poison)
        assert staged == [place for place in range(200) if place not in poison]
        assert len(tries) <= min(2 * math.log2(200) * len(poison), 2 * 200)


@pytest.mark.slow
@pytest.mark.parametrize("number", [100, 10_000])
async def test_a_batch_of_which_every_row_is_refused_takes_few_tries(apart, tries, number):
    found, staged = await apart(number, set(range(number)), most_in_a_row=10)
    assert staged == []
    assert found.settled == number
    assert len(found.refused) + len(found.unsearched) <= 10 + 2 * math.log2(number)
    assert len(tries) <= 2 * 10 + 2 * math.log2(number)


@pytest.mark.slow
async def test_good_rows_behind_many_refused_ones_are_staged(apart):
    found, staged = await apart(64, set(range(32)), most_in_a_row=4)
    assert staged == list(range(32, 64))
    assert (len(found.refused), sum(one.rows for one in found.unsearched)) == (4, 28)
    assert found.settled == 64


REFUSES = """
CREATE SEQUENCE looks;
CREATE FUNCTION refuse(id int, code text) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
  IF id = 5 THEN
    PERFORM nextval('looks');
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = 'it is about ' || id;
  END IF;
  RETURN true;
END $$
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", ["53100", "40P01", "40001", "57014", "57P01", "55P03", "53200"])
async def test_rows_are_not_searched_for_an_error_of_the_database(apart, raw, code):
    await raw.execute(REFUSES)
    with pytest.raises(StoreUnavailable):
        await apart(8, set(), definition=f"id int CHECK (refuse(id, '{code}'))")
    # Only the second of the halves was checked, and only once.
    assert await raw.fetchval("SELECT last_value FROM looks") == 1
    assert await raw.fetchval(f"SELECT count(*) FROM {quote(STAGE)}") == 0


async def test_an_error_of_a_table_check_belongs_to_its_row(apart, raw):
    await raw.execute(REFUSES)
    found, staged = await apart(8, set(), definition="id int CHECK (refuse(id, 'P0001'))")
    assert [(row.place, row.error) for row in found.refused] == [(5, "it is about 5")]
    assert staged == [0, 1, 2, 3, 4, 6, 7]
