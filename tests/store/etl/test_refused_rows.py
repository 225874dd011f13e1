"""Of a batch that the database refuses only the poisonous rows are left out, found in few tries (E10)."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from etl_loads import STAGE, open_load

from dataloader.jobs.errors import StoreUnavailable
from dataloader.store.etl import refused_rows
from dataloader.store.etl.refused_rows import RefusedSearch
from dataloader.store.etl.staging import Lines
from dataloader.store.etl.target_table import quote
from dataloader.store.queue.transaction import Transactions

pytestmark = pytest.mark.requirement("E10")
NEVER = 1_000_000
SUBTRANSACTIONS = 64
"""Of a transaction, that a server keeps in memory for all sessions (PGPROC_MAX_CACHED_SUBXIDS)."""


@pytest.fixture
async def transactions(store):
    transactions = Transactions(store)
    yield transactions
    transactions.close()


@pytest.fixture
def tries(monkeypatch):
    """How many rows each COPY had; no transaction has more of them than it may."""
    spans, transactions, stage = [], Counter(), refused_rows.aio_stage

    async def aio_stage(connection, segment, pieces):
        spans.append(len(pieces))
        transactions[await connection.fetchval("SELECT pg_current_xact_id()::text")] += 1
        return await stage(connection, segment, pieces)

    monkeypatch.setattr(refused_rows, "aio_stage", aio_stage)
    yield spans
    assert max(transactions.values()) <= refused_rows.MAX_TRIES < SUBTRANSACTIONS


@pytest.fixture
def apart(transactions, raw):
    """Stages rows with numbers from 0 on, of which those in `poison` are none; in pieces of two requests."""

    async def apart(number, poison, *, most_in_a_row=NEVER, definition="id int"):
        load = await open_load(transactions, raw, definition)
        cells = [f"{place}{'x' if place in poison else ''}" for place in range(number)]
        half = number // 3
        pieces = [
            (
                request,
                Lines(("id",), len(part), "".join(f"{place}\t{cell}\n" for place, cell in enumerate(part, 1)).encode()),
            )
            for request, part in enumerate((cells[:half], cells[half:]), 1)
            if part
        ]
        found = RefusedSearch(load.segment, pieces, most_in_a_row)
        while not found.is_over:
            found.staged += await transactions.run(found.aio_go_on)
        staged = await raw.fetchval(f"SELECT array_agg(id ORDER BY id) FROM {quote(STAGE)}")
        await raw.execute("DROP TABLE target")
        return found, staged or []

    return apart


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


@pytest.mark.parametrize("number", [100, 10_000])
async def test_a_batch_of_which_every_row_is_refused_is_given_up_after_few_tries(apart, tries, number):
    found, staged = await apart(number, set(range(number)), most_in_a_row=10)
    assert (found.is_given_up, len(found.refused), staged) == (True, 11, [])
    assert len(tries) <= 2 * 11 + math.log2(number)


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


@pytest.mark.parametrize("code", ["53100", "40P01", "40001", "57014", "57P01", "55P03", "53200"])
async def test_what_is_the_database_s_own_is_not_sought_in_the_rows(apart, raw, code):
    await raw.execute(REFUSES)
    with pytest.raises(StoreUnavailable):
        await apart(8, set(), definition=f"id int CHECK (refuse(id, '{code}'))")
    # Of the halves only the second one was looked at, and that once.
    assert await raw.fetchval("SELECT last_value FROM looks") == 1
    assert await raw.fetchval(f"SELECT count(*) FROM {quote(STAGE)}") == 0


async def test_what_a_check_of_the_table_raises_is_a_row_s_own(apart, raw):
    await raw.execute(REFUSES)
    found, staged = await apart(8, set(), definition="id int CHECK (refuse(id, 'P0001'))")
    assert [(row.place, row.error) for row in found.refused] == [(5, "it is about 5")]
    assert staged == [0, 1, 2, 3, 4, 6, 7]
