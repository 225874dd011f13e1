"""Failures are recorded with names and numbers; the rest continues, unless too many occur in a row (E9, E10)."""

from __future__ import annotations

import json
from functools import partial

import attrs
import pytest
import trio
from conditions import until
from databases import raw_connection
from etl_tasks import BEARS_ALL, detailed_load, item, items_load
from staging_watch import StagingWatch

from dataloader import Tasks, open_client
from dataloader.flows.etl import (
    CancellationToken,
    Csv,
    Detail,
    Files,
    Flow,
    Load,
    Request,
    Table,
    add_flows,
    add_loads,
    run_load,
)
from dataloader.flows.etl.run.load_progress import PhaseTimes
from dataloader.flows.etl.sources.credentials import Auth
from dataloader.testing import run_task

pytestmark = pytest.mark.requirement("E10")

TOO_MANY = "11 consecutive failures (max_failures is 10); the last one was"
ENDED = ("status", "seconds", "counts", "phases")


@pytest.fixture
def failures(raw):
    """Return a function that reads the recorded failures: phase, key, error."""

    async def failures(columns="phase, key, error"):
        return [tuple(row) for row in await raw.fetch(f"SELECT {columns} FROM dl_etl_failures ORDER BY failure_id")]

    return failures


async def test_a_request_is_tried_three_times_and_the_rest_continues(items, counts_of_failed, failures, soon, table):
    items.records = [item(number, number) for number in range(1, 4)]
    items.service.misbehave("from=2026-01-02", times=None, status=503)
    counts = await counts_of_failed(items_load(items.service.url), to="2026-01-04")
    assert items.asked() == ["2026-01-01", *["2026-01-02"] * 3, "2026-01-03"]
    assert (counts["requests_failed"], counts["requests"], counts["inserted"]) == (1, 5, 2)
    [(phase, key, error, segment, sample, requests)] = await failures(
        "phase, key, error, left(segment, 10), sample, requests"
    )
    assert (phase, key, segment, sample) == ("request", "/items", "2026-01-02", None)
    assert "status 503" in error
    [request] = json.loads(requests)
    assert (request["of"], request["params"]["from"]) == ("list", "2026-01-02")
    assert await table("id") == ["1", "3"]


async def test_a_request_that_succeeds_at_its_third_try_is_no_failure(items, counts_of, failures, soon):
    items.records = [item(1)]
    items.service.misbehave(times=2, cut_at=5)
    counts = await counts_of(items_load(items.service.url, windows=None))
    assert (counts["requests"], counts["inserted"], len(items.service.requests)) == (3, 1, 3)
    assert await failures() == []


async def test_a_request_that_trying_again_can_not_help_is_sent_once(items, counts_of_failed, failures, soon):
    items.service.misbehave(times=None, status=404)
    assert (await counts_of_failed(items_load(items.service.url, windows=None)))["requests_failed"] == 1
    assert len(items.service.requests) == 1
    assert "status 404" in (await failures())[0][2]


@pytest.mark.slow
async def test_a_failed_page_is_skipped_and_the_walk_continues_after_it(
    items, counts_of, counts_of_failed, failures, soon, table
):
    items.records = [item(number) for number in range(7)]
    items.service.misbehave("page=2", times=None, status=500)
    load = items_load(items.service.url, windows=None, page_size=2, total_path="total")
    counts = await counts_of_failed(load)
    assert (counts["requests_failed"], counts["inserted"]) == (1, 5)
    assert await table("id") == ["0", "1", "4", "5", "6"]
    assert [phase for phase, _, _ in await failures()] == ["request"]
    items.service.behave()
    asked = len(items.service.requests)
    # Only the page: the scan has continued behind it.
    assert (await counts_of(load, failures="all"))["inserted"] == 2
    assert items.asked()[asked:] == ["2"]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "total_path"), [(1, "total"), (2, None)])
async def test_a_failed_last_known_page_ends_its_walk_and_the_next_segment_is_loaded(
    items, outcome_of, counts_of, failures, soon, table, page, total_path
):
    items.records = [item(number, 1 + number // 5) for number in range(10)]
    items.service.misbehave(f"page={page}.*from=2026-01-01|from=2026-01-01.*page={page}", times=None, status=500)
    load = items_load(items.service.url, page_size=2, total_path=total_path)
    outcome = await outcome_of(load, to="2026-01-03")
    assert outcome.error.startswith("1 of 2 segments could not be loaded")
    before = [f"2026-01-01/{number}" for number in range(1, page)]
    tried = [f"2026-01-01/{page}"] * 3
    assert items.asked() == [*before, *tried, *(f"2026-01-02/{number}" for number in (1, 2, 3))]
    assert await failures("phase") == [("request",)]
    items.service.behave()
    asked = len(items.service.requests)
    # From there on: no later page has been requested.
    await counts_of(load, failures="all")
    assert items.asked()[asked:] == [f"2026-01-01/{number}" for number in range(page, 4)]
    assert len(await table("id")) == 10


async def test_pages_that_repeat_for_ever_are_asked_for_no_further_and_not_tried_alone(
    items, outcome_of, counts_of, failures, table
):
    items.service.misbehave(times=None, body=json.dumps({"items": [item(1), item(2)]}).encode())
    load = items_load(items.service.url, page_size=2)
    outcome = await outcome_of(load, to="2026-01-03")
    # Each of the two days to its second page, which is the same.
    assert len(items.service.requests) == 4
    assert outcome.error.startswith("2 of 2 segments could not be loaded")
    assert "page 2 has the same records as page 1" in outcome.error
    # A retry of page 2 alone would leave out the pages behind it without any notice.
    assert [requests for (requests,) in await failures("requests")] == ["[]", "[]"]
    items.service.behave()
    items.records = [item(number) for number in range(5)]
    await counts_of(load, to="2026-01-03")
    assert await table("id") == ["0", "1", "2", "3", "4"]
    assert [resolved for (resolved,) in await failures("solved_at IS NOT NULL")] == [True, True]


async def test_an_answer_that_takes_too_long_is_a_failed_request(items, counts_of_failed, failures, soon):
    items.service.misbehave(times=None, delay_s=30)
    load = items_load(items.service.url, windows=None, pipeline={"request_timeout": 0.1, "attempts": 2})
    assert (await counts_of_failed(load))["requests_failed"] == 1
    assert len(items.service.requests) == 2
    assert "no complete answer within 0.1 s" in (await failures())[0][2]


async def test_an_answer_that_can_not_be_read_is_a_failed_request(items, counts_of_failed, failures, soon):
    items.service.misbehave(body=b'{"items": 7}')
    assert (await counts_of_failed(items_load(items.service.url, windows=None)))["requests_failed"] == 1
    assert (await failures())[0][:2] == ("request", "/items")


async def test_a_failed_record_is_named_and_others_of_its_response_are_loaded(items, outcome_of, failures, table):
    items.records = [item(1), item(2, value="password=sesame"), item(3)]

    def transform(record):
        if record["id"] == 2:
            raise ZeroDivisionError("no such value: 2")
        return record

    outcome = await outcome_of(items_load(items.service.url, windows=None, transform=transform))
    assert outcome.status == "failed"
    counts = {"inserted": 2, "records": 3, "records_failed": 1, "requests": 1, "segments": 1}
    assert outcome.result["counts"].items() >= counts.items()
    [(phase, key, error, sample)] = await failures("phase, key, error, sample")
    assert (phase, key, error) == ("record", "2", "ZeroDivisionError: no such value: 2")
    assert '"id":2' in sample
    assert "sesame" not in sample
    assert await table("id") == ["1", "3"]
    [listed] = outcome.result["failures"]
    assert listed == {"segment": "everything", "phase": "record", "item": "2", "error": error}


@pytest.mark.requirement("Q16")
async def test_a_credential_that_a_source_repeats_is_in_no_failure_and_no_log(items, outcome_of, failures):
    """In a record, in a row that the database refuses, and as a key."""
    secret = "Zq7-plainword-x"
    items.records = [item(1, value=secret), item(2), item(3)]

    def transform(record):
        if record["id"] == 1:
            raise ZeroDivisionError(f"no such value: {record['value']}")
        return record if record["id"] == 2 else {**record, "day": secret}

    load = items_load(items.service.url, windows=None, transform=transform, pipeline={"max_failed_share": 0.1})
    load = attrs.evolve(load, source=attrs.evolve(load.source, auth=Auth.header("X-Weird", secret)))
    outcome = await outcome_of(load)
    kept = await failures("phase, key, error, sample")
    assert [row[0] for row in kept] == ["record", "row"]
    shown = [str(kept), str(outcome.error), str(outcome.result), *(str(line) for line in outcome.log)]
    assert secret not in " ".join(shown)
    assert "no such value: ***" in kept[0][2]


async def test_a_row_refused_by_the_database_fails_alone_in_its_batch(items, outcome_of, counts_of, failures, table):
    items.records = [item(number) for number in range(5)]
    items.records[2]["day"] = "2026-01-01x"
    load = items_load(items.service.url, windows=None)
    outcome = await outcome_of(load)
    assert (outcome.result["counts"]["rows_failed"], outcome.result["counts"]["inserted"]) == (1, 4)
    assert outcome.error.startswith(
        "1 of 5 records failed (20.0%; max_failed_share is 0.01); the first failure was a row (2): "
    )
    [(phase, key, error, sample)] = await failures("phase, key, error, sample")
    assert (phase, key, sample) == ("row", "2", "id: 2, day: 2026-01-01x, value: a")
    assert error == 'column day: invalid input syntax for type date: "2026-01-01x"'
    assert await table("id") == ["0", "1", "3", "4"]
    [line] = [line for line in outcome.log if line.message == "skipping rejected rows"]
    assert (line.level, line.fields["rows"], line.fields["staged"]) == ("warning", 1, 4)
    # It can be retried separately.
    items.records[2]["day"] = "2026-01-01"
    assert (await counts_of(load, failures="all"))["inserted"] == 1
    assert await failures("solved_at IS NOT NULL") == [(True,)]


async def test_a_row_that_is_always_refused_does_not_hold_the_cursor(items, outcome_of, table, raw):
    items.records = [item(number, 1 + number // 200) for number in range(400)]
    items.records[7]["value"] = "x"
    await raw.execute("ALTER TABLE item ADD CHECK (value <> 'x')")
    outcome = await outcome_of(items_load(items.service.url), to="2026-01-03")
    assert (outcome.status, outcome.result["status"]) == ("succeeded", "succeeded_with_failures")
    assert outcome.result["counts"].items() >= {"rows_failed": 1, "inserted": 399, "segments": 2}.items()
    assert (
        await raw.fetchval(
            "SELECT to_char((state ->> 'upto')::timestamptz AT TIME ZONE 'UTC', 'DD') FROM dl_load_state"
        )
        == "03"
    )


async def test_a_refused_row_of_a_table_without_a_key_fails_alone_in_its_segment(items, outcome_of, raw):
    await raw.execute("CREATE TABLE event (id int, day date, value text)")
    items.records = [item(number) for number in range(200)]
    items.records[7]["day"] = "2026-01-01x"
    load = items_load(items.service.url, windows=None, table=Table("event", mode="insert"))
    outcome = await outcome_of(load)
    assert outcome.result["status"] == "succeeded_with_failures"
    assert await raw.fetchval("SELECT count(*) FROM event") == 199


@pytest.mark.slow
async def test_a_load_of_which_every_row_is_refused_takes_few_statements(items, outcome_of, database, failures, limits):
    staging = StagingWatch(database)
    limits.set(most_refused=10)
    items.records = [{**item(number), "day": "2026-01-01x"} for number in range(20_000)]
    outcome = await outcome_of(items_load(items.service.url, windows=None, pipeline={"batch_size": 5_000}))
    assert outcome.status == "failed"
    assert outcome.error.startswith("20,000 of 20,000 records failed (100.0%; max_failed_share is 0.01); the first ")
    kept = await failures()
    assert [key for _, key, _ in kept[:10]] == [str(number) for number in range(10)]
    assert kept[-1][1].endswith(" of their batch")
    assert outcome.result["counts"]["rows_failed"] == 20_000
    # For each of two batches: the whole, the search for its first row, two for each refused row, and the rest.
    assert len(kept) < 2 * (10 + 13)
    assert 2 * 10 < staging.tries() <= 2 * (1 + 13 + 2 * 10 + 13)


@pytest.mark.slow
async def test_rows_that_are_refused_together_do_not_end_a_run(items, outcome_of, failures, raw):
    items.records = [item(number) for number in range(4_000)]
    for number in range(1_000, 1_030):
        items.records[number]["day"] = "2026-01-01x"
    outcome = await outcome_of(items_load(items.service.url, windows=None))
    assert (outcome.status, outcome.result["status"]) == ("succeeded", "succeeded_with_failures")
    assert len(await failures()) == outcome.result["counts"]["rows_failed"] == 30
    assert await raw.fetchval("SELECT count(*) FROM item") == 3_970


@pytest.mark.slow
async def test_after_many_refused_rows_the_good_ones_behind_them_are_written(
    items, outcome_of, failures, limits, table
):
    limits.set(most_refused=5)
    items.records = [{**item(number), "day": f"2026-01-01{'x' * (number < 64)}"} for number in range(128)]
    outcome = await outcome_of(items_load(items.service.url, windows=None, pipeline=BEARS_ALL | {"batch_size": 128}))
    assert outcome.result["counts"]["rows_failed"] == 64
    assert await table("id") == sorted(str(number) for number in range(64, 128))
    kept = await failures()
    assert [key for _, key, _ in kept[:5]] == ["0", "1", "2", "3", "4"]
    assert all(key.endswith(" of their batch") for _, key, _ in kept[6:])


async def test_a_batch_that_can_not_be_written_at_all_is_not_taken_apart(items, outcome_of, failures, database):
    staging = StagingWatch(database, "RAISE SQLSTATE '57014' USING MESSAGE = 'it takes too long';")
    items.records = [item(number) for number in range(5)]
    outcome = await outcome_of(items_load(items.service.url, windows=None))
    assert "the database is not available now (QueryCanceledError" in outcome.error
    assert (staging.tries(), await failures()) == (1, [])


async def test_rows_staged_by_an_aborted_search_for_refused_rows_are_written(items, outcome_of, failures, raw, table):
    await raw.execute("""
        CREATE FUNCTION look(id int) RETURNS bool LANGUAGE plpgsql AS $$
        BEGIN
          IF id = 150 THEN RAISE EXCEPTION USING ERRCODE = 'feature_not_supported', MESSAGE = 'not this table'; END IF;
          RETURN id > 100 OR id % 2 = 0;
        END $$;
        ALTER TABLE item ADD CHECK (look(id))""")
    items.records = [item(number) for number in range(200)]
    pipeline = BEARS_ALL | {"batch_size": 200}
    outcome = await outcome_of(items_load(items.service.url, windows=None, pipeline=pipeline))
    counts = outcome.result["counts"]
    # Up to the last committed transaction of the search, in the order of the rows.
    written = int(counts["inserted"])
    assert 0 < written < 50
    assert sorted(map(int, await table("id"))) == [*range(0, 2 * written, 2)]
    assert counts["rows_failed"] == 200 - written
    [*rows, (phase, key, error)] = await failures()
    assert (len(rows), phase, key) == (50, "batch", f"{150 - written} rows of /items")
    assert "not this table" in error


async def test_a_row_may_lack_columns_that_others_have(items, counts_of, failures, raw, table):
    await raw.execute("ALTER TABLE item ADD note text")
    items.records = [item(1), {**item(2), "note": "x"}]
    assert (await counts_of(items_load(items.service.url, windows=None)))["inserted"] == 2
    assert await failures() == []
    assert await table() == ["(1,2026-01-01,a,)", "(2,2026-01-01,a,x)"]


LOOKS = """
CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF new.value = 'unknown' THEN INSERT INTO notes VALUES (1); END IF;
  RETURN new;
END $$;
CREATE {kind} look AFTER INSERT ON item {when} FOR EACH ROW EXECUTE FUNCTION look()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refusing", "said"),
    [
        ("ALTER TABLE item ADD FOREIGN KEY (value) REFERENCES known", "item_value_fkey"),
        ("ALTER TABLE item ADD FOREIGN KEY (value) REFERENCES known INITIALLY DEFERRED", "item_value_fkey"),
        (LOOKS.format(kind="TRIGGER", when=""), 'relation "notes" does not exist'),
        (LOOKS.format(kind="CONSTRAINT TRIGGER", when="INITIALLY DEFERRED"), 'relation "notes" does not exist'),
    ],
)
async def test_a_segment_refused_by_its_table_is_rolled_back_and_the_next_is_loaded(
    items, counts_of_failed, failures, raw, table, refusing, said
):
    await raw.execute("CREATE TABLE known (value text PRIMARY KEY); INSERT INTO known VALUES ('a')")
    await raw.execute(refusing)
    items.records = [item(1, 1), item(2, 2), item(3, 2, value="unknown"), item(4, 3)]
    counts = await counts_of_failed(items_load(items.service.url), to="2026-01-04")
    assert (counts["segments_failed"], counts["inserted"], counts["segments"]) == (1, 2, 2)
    assert await table("id") == ["1", "4"]
    [(phase, key, error)] = await failures()
    assert (phase, key[:10]) == ("segment", "2026-01-02")
    assert said in error
    assert "queue" not in error
    upto = await raw.fetchval(
        "SELECT to_char((state ->> 'upto')::timestamptz AT TIME ZONE 'UTC', 'DD') FROM dl_load_state"
    )
    assert upto == "02"


@pytest.mark.slow
async def test_failures_of_a_partial_window_are_solved_by_a_later_run_over_all_of_it(
    items, outcome_of, counts_of, failures, soon
):
    load = items_load(items.service.url)
    items.service.misbehave("from=2026-01-0[24]", times=None, status=404)
    await outcome_of(load, to="2026-01-02T12:00:00+00:00")
    await outcome_of(load, **{"from": "2026-01-04T06:00:00+00:00", "to": "2026-01-04T12:00:00+00:00"})
    items.service.behave()

    async def resolved():
        return [resolved for (resolved,) in await failures("solved_at IS NOT NULL")]

    # Only a part of the fourth day is loaded, not all of the failed data.
    await counts_of(load, to="2026-01-04T11:59:59+00:00")
    assert await resolved() == [True, False]
    await counts_of(load, **{"from": "2026-01-04", "to": "2026-01-05"})
    assert await resolved() == [True, True]


@pytest.mark.slow
async def test_records_that_fail_together_do_not_end_a_run(items, outcome_of, failures):
    items.records = [{**item(n), "id": None if 1_000 <= n < 1_050 else n} for n in range(11_975)]
    outcome = await outcome_of(items_load(items.service.url, windows=None))
    assert (outcome.status, outcome.result["status"]) == ("succeeded", "succeeded_with_failures")
    assert outcome.result["counts"]["records_failed"] == len(await failures()) == 50


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(10, "succeeded"), (11, "failed")])
async def test_a_run_survives_ten_answers_without_a_good_record_but_not_eleven(items, outcome_of, number, status):
    items.records = [{**item(n, 1 + n // 2), "id": None if n < 2 * number else n} for n in range(2 * number + 2)]
    share = {"max_failed_share": 0.95}
    load = items_load(items.service.url, pipeline=share | {"workers": 1, "queue_size": 1})
    outcome = await outcome_of(load, to="2026-01-15")
    assert outcome.status == status
    assert outcome.result["counts"]["records_failed"] == 2 * number
    if status == "failed":
        assert outcome.error.startswith(f"{TOO_MANY} a record (")


@pytest.mark.slow
async def test_answers_without_a_good_record_are_no_row_while_their_share_is_small(items, outcome_of):
    bad = [{**item(1_000 + n, 2 + n), "id": None} for n in range(20)]
    items.records = [item(n) for n in range(200)] + bad
    outcome = await outcome_of(items_load(items.service.url, pipeline={"max_failed_share": 0.1}), to="2026-01-25")
    assert (outcome.status, outcome.result["counts"]["records_failed"]) == ("succeeded", 20)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(10, "succeeded"), (11, "failed")])
async def test_a_run_survives_ten_consecutive_failed_requests_but_not_eleven(
    items, outcome_of, failures, raw, soon, number, status
):
    items.records = [item(99, 14)]
    items.service.misbehave(times=number, status=404)
    outcome = await outcome_of(items_load(items.service.url, page_size=2, pipeline=BEARS_ALL), to="2026-01-15")
    assert outcome.status == status
    assert len(await failures()) == outcome.result["counts"]["requests_failed"] == number
    if status == "failed":
        assert outcome.error.startswith(
            "11 consecutive failures (max_failures is 10); the last one was a request (/items): "
        )
        assert len(items.service.requests) == 11
        assert await raw.fetchval("SELECT status FROM dl_etl_runs") == "failed"
        assert await raw.fetchval("SELECT status FROM dl_etl_tasks") == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_failures_whose_commit_is_broken_off_by_the_run_s_end_are_on_record(
    items, outcome_of, failures, database, raw, soon, limits, is_cancelled
):
    limits.set(save_s=60)
    if is_cancelled:
        items.service.misbehave("from=2026-01-03", times=None, delay_s=3_600)
    items.service.misbehave(times=None, status=404)
    tasks, token, outcomes = Tasks(), CancellationToken(), []
    load = items_load(items.service.url, pipeline=BEARS_ALL | {"drain_timeout": 0.01})
    tasks.task(load.name)(partial(run_load, load, cancel=token))
    waiting = (
        "SELECT array_agg(DISTINCT pid) FROM pg_locks WHERE NOT granted AND relation = 'dl_etl_failures'::regclass"
    )

    async def run():
        outcomes.append(await outcome_of(tasks, to="2026-01-15"))

    async with raw_connection(database.dsn) as locking, trio.open_nursery() as nursery:
        await locking.execute("BEGIN; LOCK TABLE dl_etl_failures IN EXCLUSIVE MODE")
        nursery.start_soon(run)
        [first] = await until(lambda: raw.fetchval(waiting))
        if is_cancelled:
            await until(lambda: trio.to_thread.run_sync(items.asked), lambda asked: "2026-01-03" in asked)
            token.cancel()
        # The commit of the first day, with its failure, is ended by the eleventh, or when the time for writing is over.
        await until(lambda: raw.fetchval(waiting), lambda pids: pids and first not in pids)
        await locking.execute("COMMIT")
    [outcome] = outcomes
    assert outcome.status == ("canceled" if is_cancelled else "failed")
    assert len(await failures()) == outcome.result["counts"]["requests_failed"] == (2 if is_cancelled else 11)


@pytest.mark.slow
async def test_batches_that_can_not_be_taken_apart_make_one_row(items, outcome_of, failures, raw, limits):
    await raw.execute("""
        CREATE FUNCTION look(id int) RETURNS bool LANGUAGE plpgsql AS $$
        BEGIN
          IF id % 3 < 2 THEN RETURN id % 3 = 0; END IF;
          RAISE EXCEPTION USING ERRCODE = 'feature_not_supported', MESSAGE = 'not this table';
        END $$;
        ALTER TABLE item ADD CHECK (look(id))""")
    # One of each three rows is accepted, and is rolled back with the search, which is refused itself.
    items.records = [item(number) for number in range(36)]
    limits.set(most_rows=3)
    outcome = await outcome_of(items_load(items.service.url, windows=None, pipeline=BEARS_ALL | {"batch_size": 3}))
    assert outcome.error.startswith(
        "11 consecutive failures (max_failures is 10); the last one was a batch (2 rows of /items): "
    )
    assert [phase for phase, *_ in await failures()] == ["row", "batch"] * 11


@pytest.mark.slow
@pytest.mark.parametrize(("refused", "is_a_row"), [(9, False), (14, True)])
async def test_failures_of_all_kinds_make_one_row(items, outcome_of, failures, refused, is_a_row):
    # A page with a part that is not a record and six records that fail, then pages that are refused.
    page = json.dumps({"items": [1, *({**item(n), "id": None} for n in range(6))], "total": 700}).encode()
    items.service.misbehave(body=page)
    items.service.misbehave(times=refused, status=404)
    outcome = await outcome_of(items_load(items.service.url, windows=None, page_size=7, total_path="total"))
    assert ("consecutive failures" in outcome.error) is is_a_row
    phases = [phase for phase, _, _ in await failures()]
    assert phases.count("record") == 7
    # The page is one of them.
    assert phases.count("request") == (10 if is_a_row else refused)


async def test_a_success_in_between_begins_a_new_row(items, outcome_of, soon):
    items.records = [{**item(n), "id": None if n % 10 else n} for n in range(60)]
    outcome = await outcome_of(items_load(items.service.url, windows=None, pipeline=BEARS_ALL))
    assert (outcome.status, outcome.result["counts"]["records_failed"]) == ("succeeded", 54)


@pytest.mark.slow
async def test_a_request_that_is_answered_in_between_begins_a_new_row(items, outcome_of, soon):
    # Enough time to read the answer of the eleventh before ten more have failed.
    items.service.misbehave("from=2026-01-12", status=404, delay_s=2)
    items.service.misbehave("from=2026-01-(0|10|1[3-9]|2[01])", times=None, status=404)
    paused = BEARS_ALL | {"workers": 1, "rate_min": 0.02, "rate_max": 0.02}
    outcome = await outcome_of(items_load(items.service.url, pipeline=paused), to="2026-01-22")
    assert (outcome.status, outcome.result["counts"]["requests_failed"]) == ("succeeded", 20)


async def test_how_many_failures_end_a_run_can_be_set(items, outcome_of, soon):
    items.service.misbehave(times=None, status=404)
    outcome = await outcome_of(items_load(items.service.url, pipeline={"max_failures": 2}), to="2026-01-31")
    assert outcome.error.startswith("3 consecutive failures")
    assert len(items.service.requests) == 3


@pytest.mark.slow
@pytest.mark.requirement("S7")
async def test_a_file_that_can_not_be_read_to_its_end_is_left_out_whole(
    items, counts_of_failed, failures, table, tmp_path
):
    lines = "id,day,value\n" + "".join(f"{number},2026-01-01,a\n" for number in range(20_000))
    (tmp_path / "1.csv").write_bytes(lines.encode("utf-16") + b"\x00")
    (tmp_path / "2.csv").write_text("id,day,value\n1,2026-01-01,b\n", encoding="utf-16")
    load = Load(
        "files",
        Files(f"{tmp_path}/*.csv", format=Csv(encoding="utf-16"), record_source=False),
        Table("item", key="id"),
    )
    counts = await counts_of_failed(load)
    assert (counts["inserted"], counts["requests_failed"], counts["segments"]) == (1, 1, 1)
    [(phase, key, error)] = await failures()
    assert (phase, key) == ("request", f"{tmp_path}/1.csv")
    assert "the text is not utf-16" in error
    assert await table() == ["(1,2026-01-01,b)"]


@pytest.mark.requirement("E7")
async def test_a_detail_whose_request_cannot_be_built_fails_alone(items, counts_of_failed, failures, raw):
    items.records = [item(number) for number in (0, 1, 2)]
    await raw.execute("CREATE TABLE detail (id int PRIMARY KEY)")

    def request(number):
        return Request(endpoint="/items", params={"share": 1 // number})

    detail = Detail(
        id=lambda record: record["id"],
        request=request,
        source=items_load(items.service.url).source,
        table=Table("detail", key="id"),
        transform=lambda number, _record: {"id": number},
    )
    counts = await counts_of_failed(items_load(items.service.url, windows=None, detail=detail))
    assert (counts["details"], counts["details_failed"]) == (2, 1)
    told = "its request cannot be created: ZeroDivisionError: integer division or modulo by zero"
    assert await failures() == [("detail", "0", told)]


@pytest.mark.requirement("E7")
async def test_details_whose_ids_are_of_one_text_are_one(items, details, counts_of):
    items.records = [item(1, value=7), item(2, value="7"), item(3, value=8)]
    load = detailed_load(items.service.url, transform=lambda record: {**record, "value": None})
    load = attrs.evolve(load, detail=attrs.evolve(load.detail, id=lambda record: record["value"]))
    assert (await counts_of(load))["details"] == 2
    assert details() == [7, 8]


@pytest.mark.requirement("E9")
def test_a_phase_has_begun_when_its_first_work_began():
    times = PhaseTimes()
    times.add(2.0)
    assert times.began_at is not None
    assert times.ended_at is not None
    assert (times.ended_at - times.began_at).total_seconds() == 2
    began_at = times.began_at
    times.add(0.0)
    assert times.began_at == began_at


@pytest.mark.requirement("E9")
async def test_the_summary_has_each_phase_and_the_progress_has_the_queue_depths(items, outcome_of, soon, limits):
    limits.set(log_s=0)
    items.records = [item(n, 1 + n // 10) for n in range(20)]
    outcome = await outcome_of(items_load(items.service.url), to="2026-01-03")
    result = outcome.result
    assert (result["status"], result["failures"]) == ("succeeded", [])
    assert result["counts"].items() >= {"inserted": 20, "records": 20, "requests": 2, "segments": 2}.items()
    assert result["phases"].keys() == {"requests", "processing", "writing"}
    for phase in result["phases"].values():
        assert phase["began_at"] <= phase["ended_at"]
        assert 0 < phase["busy_s"] <= result["seconds"]
    first, last = outcome.progress[0], outcome.progress[-1]
    assert {"queued": 0, "active_workers": 0, "unwritten": 0}.items() <= first.items()
    assert (last["inserted"], last["requests"], last["queued"], last["unwritten"]) == (20, 2, 0, 0)
    assert last["segment"].startswith("2026-01-02")
    logged = {line.message: line.fields for line in outcome.log}
    assert logged["progress"].keys() >= {"queued", "active_workers", "unwritten", "segments_planned"}
    assert logged["ended"] == {"load": "items", "phase": "run", **{name: result[name] for name in ENDED}}


@pytest.mark.slow
@pytest.mark.requirement("E9")
async def test_counters_of_each_load_are_in_the_metrics(items, serve, add, row_when, client_of):
    items.records = [item(1), item(2), {**item(3), "id": None}]
    service = await serve(tasks="etl_tasks:tasks", environment={"ITEMS_URL": items.service.url})
    await row_when(await add("items", {"to": "2026-01-03"}), "failed")
    async with client_of(service) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    for count, number in (("requests", 2), ("records", 3), ("inserted", 2), ("records_failed", 1), ("segments", 2)):
        assert f'dataloader_etl_total{{count="{count}",load="items"}} {number:.1f}' in lines
    assert 'dataloader_etl_runs_total{load="items",status="failed"} 1.0' in lines


@pytest.mark.slow
async def test_failures_can_be_retried_alone(items, counts_of_failed, counts_of, failures, soon, table, limits):
    limits.set(most_retried=2)
    items.records = [item(number, number) for number in range(1, 6)]
    items.service.misbehave("from=2026-01-0[235]", times=None, status=500)
    load = items_load(items.service.url)
    await counts_of_failed(load, to="2026-01-06")
    items.service.behave()
    items.service.misbehave("from=2026-01-03", times=None, status=404)
    asked = len(items.service.requests)
    # Two per batch; repeated failures wait for another run.
    counts = await counts_of_failed(load, failures="all")
    assert items.asked()[asked:] == ["2026-01-02", "2026-01-03", "2026-01-05"]
    assert (counts["inserted"], counts["segments"], counts["segments_failed"]) == (2, 1, 1)
    assert await failures("left(segment, 13), solved_at IS NOT NULL") == [
        *((f"2026-01-0{number}T00", True) for number in (2, 3, 5)),
        # It keeps the segment in which it failed first.
        ("2026-01-03T00", False),
    ]
    await counts_of_failed(load, failures="all")
    items.service.behave()
    counts = await counts_of(load, failures="all")
    assert items.asked()[asked + 3 :] == ["2026-01-03", "2026-01-03"]
    assert (counts["inserted"], counts["segments"]) == (1, 1)
    assert await table("id") == ["1", "2", "3", "4", "5"]
    assert set(await failures("solved_at IS NOT NULL")) == {(True,)}
    assert (await counts_of(load, failures="all")) == {}


@pytest.mark.slow
async def test_a_failure_whose_retry_fails_is_solved_by_a_run_over_its_window(
    items, details, counts_of, outcome_of, failures, soon, raw, database
):
    # A page of a scan, a record, a row, a detail: each on a different day.
    items.records = [item(number, number) for number in range(1, 6)]
    items.records[1]["id"] = None
    items.records[2]["value"] = "x"
    await raw.execute("ALTER TABLE item ADD CHECK (value <> 'x')")
    items.service.misbehave("from=2026-01-01", times=None, status=404)
    items.service.misbehave("^/detail.*id=4", times=None, status=404)
    load = attrs.evolve(detailed_load(items.service.url, pipeline=BEARS_ALL), windows=items_load("http://h").windows)
    load = attrs.evolve(load, source=items_load(items.service.url, page_size=2).source)
    await outcome_of(load, to="2026-01-06")
    first = await failures("phase, segment")
    assert sorted(phase for phase, _ in first) == ["detail", "record", "request", "row"]
    assert len({segment for _, segment in first}) == 4
    await outcome_of(load, failures="all")
    assert sorted(await failures("phase, segment")) == sorted(first * 2)
    numbers = await failures("failure_id, run_id")
    async with open_client(database.dsn) as client:
        old = (await client.loads.failures_of_run(numbers[0][1])).failures
    assert sorted(failure.replaced_by for failure in old) == [number for number, _ in numbers[4:]]
    items.service.behave()
    items.records[1]["id"], items.records[2]["value"] = 2, "a"
    await counts_of(load, **{"from": "2026-01-01"}, to="2026-01-06")
    assert set(await failures("solved_at IS NOT NULL")) == {(True,)}
    async with open_client(database.dsn) as client:
        repeated = (await client.loads.failures_of_run(numbers[4][1])).failures
    assert [failure.replaced_by for failure in repeated] == [None] * 4


@pytest.mark.slow
async def test_failures_whose_rows_are_refused_when_they_are_tried_again_stay_open(
    items, counts_of, counts_of_failed, failures, raw, table
):
    await raw.execute("CREATE TABLE known (value text PRIMARY KEY); INSERT INTO known VALUES ('a')")
    await raw.execute("ALTER TABLE item ADD FOREIGN KEY (value) REFERENCES known")
    items.records = [item(number, 1) for number in range(3)]
    items.records[0]["id"] = items.records[1]["id"] = None
    load = items_load(items.service.url)
    await counts_of_failed(load, to="2026-01-02")
    items.records = [item(number, 1, "unknown") for number in range(2)]
    counts = await counts_of_failed(load, failures="all")
    assert (counts["segments_failed"], counts["requests"]) == (1, 1)
    # They name the missing data, and the requests that get it; the cursor is behind it.
    assert await failures("phase, solved_at") == [("record", None)] * 2
    await raw.execute("INSERT INTO known VALUES ('unknown')")
    await counts_of(load, failures="all")
    assert await table("id") == ["0", "1", "2"]
    assert None not in [resolved for (resolved,) in await failures("solved_at")]


async def test_a_load_whose_table_is_missing_fails_and_says_so(items, outcome_of, raw):
    await raw.execute("DROP TABLE item")
    outcome = await outcome_of(items_load(items.service.url, windows=None))
    assert outcome.status == "failed"
    assert "item" in outcome.error
    assert items.service.requests == []
    assert await raw.fetchval("SELECT status FROM dl_etl_runs") == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"until": "2026-01-01"}, "args.until: must be one of from, to, pipeline, failures"),
        ({"from": "yesterday"}, "args.from: must be a date or a timestamp, "),
        ({"pipeline": {"worker": 1}}, "'worker' is not a pipeline setting"),
        (
            {"pipeline": {"rate_min": 3, "rate_max": 2}},
            "pipeline.rate_min: must be a number of seconds not greater ",
        ),
        ({"failures": "some"}, 'args.failures: must be "all" or a list of failure numbers'),
        ({"failures": [*range(1_001)]}, 'args.failures: must have at most 1,000 numbers, or be "all", not 1,001'),
    ],
)
async def test_a_job_with_args_that_are_not_allowed_fails_and_says_so(items, database, args, said):
    tasks = Tasks()
    add_loads(tasks, items_load(items.service.url))
    # Like a job added by a program that does not know the load.
    tasks.check_args("items", dict)
    outcome = await run_task(tasks, "items", args, dsn=database.dsn)
    assert (outcome.status, said in outcome.error) == ("failed", True)
    assert items.service.requests == []


@pytest.mark.slow
@pytest.mark.parametrize("as_flow", [False, True])
async def test_a_run_checks_its_args_by_its_own_limits(items, outcome_of, limits, as_flow):
    limits.set(most_retried=2)
    load = items_load(items.service.url)
    tasks = Tasks()
    if as_flow:
        add_flows(tasks, Flow(name="daily", layers={"ods": [load]}))
    else:
        add_loads(tasks, load)
    outcome = await outcome_of(tasks, failures=[1, 2, 3])
    assert 'args.failures: must have at most 2 numbers, or be "all", not 3' in outcome.error


@pytest.mark.slow
async def test_a_failure_that_is_tried_again_alone_solves_no_other(items, counts_of_failed, counts_of, raw):
    def one_is_bad(record):
        if record["value"] == "bad":
            raise ValueError("bad")
        return record

    items.records = [item(1, 1, "bad"), item(2, 2, "bad")]
    # One worker: the failures have the order of the days.
    load = items_load(items.service.url, transform=one_is_bad, pipeline={"workers": 1})
    await counts_of_failed(load, to="2026-01-03")
    await counts_of_failed(load, failures="all")  # both fail again
    opened = "SELECT array_agg(failure_id ORDER BY failure_id) FROM dl_etl_failures WHERE solved_at IS NULL"
    first, second = await raw.fetchval(opened)
    items.records[0]["value"] = "good"
    await counts_of(load, failures=[first])
    assert await raw.fetchval(opened) == [second]


async def test_failures_are_on_record_though_the_pool_is_busy_for_long(items, counts_of_failed, failures, soon, limits):
    limits.set(save_s=0)
    items.records = [item(1), item(2, 2)]
    items.service.misbehave("from=2026-01-01", times=None, status=404)
    await counts_of_failed(items_load(items.service.url), to="2026-01-03")
    assert [phase for phase, *_ in await failures()] == ["request"]


@pytest.mark.slow
async def test_many_failed_records_are_partly_named_and_stored_page_by_page(items, outcome_of, failures, raw):
    def refuse(record):
        raise ValueError("bad")

    items.records = [item(number) for number in range(5_000)]
    pipeline = {"max_failures": 9_000, "workers": 1}
    load = items_load(items.service.url, windows=None, transform=refuse, page_size=3_000, pipeline=pipeline)
    outcome = await outcome_of(load)
    assert outcome.result["counts"]["records_failed"] == 5_000
    kept = await failures()
    assert (kept[1_000][1], kept[2_001][1], len(kept)) == ("2000 more records", "1000 more records", 2_002)
    # Those of each page separately, in one transaction.
    assert await raw.fetchval("SELECT count(DISTINCT failed_at) FROM dl_etl_failures") == 2


async def test_a_record_whose_id_is_no_text_or_number_fails_alone(items, counts_of_failed, failures, raw):
    await raw.execute("CREATE TABLE detail (id int PRIMARY KEY)")
    items.records = [item(1), item(2)]
    detail = Detail(
        id=lambda record: {"odd": 1} if record["id"] == 1 else record["id"],
        request=lambda _number: Request(endpoint="/items"),
        source=items_load(items.service.url).source,
        table=Table("detail", key="id"),
        transform=lambda number, _record: {"id": number},
    )
    counts = await counts_of_failed(items_load(items.service.url, windows=None, detail=detail))
    assert (counts["records_failed"], counts["details"]) == (1, 1)
    assert "must be a string or a number" in (await failures())[0][2]
