"""Several workers process responses, one writes rows in batches, and a full queue delays the next request (E2, E3)."""

from __future__ import annotations

import threading
import time
import unicodedata
from decimal import Decimal

import pytest
import trio
from conditions import when_ended
from etl_tasks import item, items_load
from logged import capture_logs
from staging_watch import StagingWatch

from dataloader import Tasks
from dataloader.flows.etl import Flow, Table, add_flows
from dataloader.flows.etl.parse.transform import HASH_VERSION, content_hash
from dataloader.flows.etl.run.pipeline_state import Backpressure
from dataloader.store.etl.run_logs import LinesWanted, read_lines
from dataloader.store.etl.run_views import get_run_view

WATCHDOG_S = 20


@pytest.fixture
def staged(database):
    """Return a function that returns the number of rows of each batch that the writer has sent to the database."""
    return StagingWatch(database).rows


@pytest.mark.requirement("E2")
async def test_as_many_workers_as_are_set_process_at_the_same_time(items, counts_of):
    items.records = [item(number, number) for number in range(1, 4)]
    together = threading.Barrier(3)

    def transform(record):
        together.wait(WATCHDOG_S)
        return record

    counts = await counts_of(
        items_load(items.service.url, transform=transform, pipeline={"workers": 3}), to="2026-01-04"
    )
    assert counts["inserted"] == 3


@pytest.mark.requirement("E2")
async def test_never_more_workers_process_than_are_set(items, counts_of):
    items.records = [item(number, 1 + number // 4) for number in range(40)]
    lock, at_work, most = threading.Lock(), [], []

    def transform(record):
        with lock:
            at_work.append(record)
            most.append(len(at_work))
        threading.Event().wait(0.005)
        with lock:
            at_work.remove(record)
        return record

    counts = await counts_of(items_load(items.service.url, transform=transform), to="2026-01-11")
    assert counts["inserted"] == 40
    assert max(most) <= 2


@pytest.mark.slow
@pytest.mark.requirement("E2", "E9")
async def test_a_place_in_the_queue_is_taken_before_a_request_is_sent(items, outcome_of, soon):
    items.records = [item(number, number) for number in range(1, 6)]
    sent = []

    with capture_logs() as lines:

        def transform(record):
            if not sent:
                # One response is here, one is in the queue: there is no place for the third request.
                assert _wait_for(lambda: [line for line in lines if "queue is full" in line["event"]])
                threading.Event().wait(0.2)
                sent.append(len(items.service.requests))
            return record

        pipeline = {"workers": 1, "queue_size": 1}
        outcome = await outcome_of(
            items_load(items.service.url, transform=transform, pipeline=pipeline), to="2026-01-06"
        )
    assert sent == [2]
    assert outcome.result["counts"]["inserted"] == len(items.service.requests) == 5
    [warning, *_] = [line for line in lines if "queue is full" in line["event"]]
    assert (warning["log_level"], warning["load"], warning["queue_size"]) == ("warning", "items", 1)
    assert any("queue is full" in line.message and line.level == "warning" for line in outcome.log)
    full = {"for": "a place in the processing queue"}
    assert any(progress.get("waiting") == full and progress["queued"] == 1 for progress in outcome.progress)


def _wait_for(condition):
    ended = threading.Event()
    for _ in range(WATCHDOG_S * 100):
        if condition():
            return True
        ended.wait(0.01)
    return False


@pytest.mark.requirement("E3", "E9")
async def test_no_request_is_sent_while_too_many_bytes_wait_to_be_written(items, outcome_of, soon, staged, limits):
    items.records = [item(number, number, "x" * 1_000) for number in range(1, 6)]
    limits.set(most_bytes=500)
    written = []
    # One answer fills it: the next request comes when it is written, although there is room in the batch.
    items.before = lambda _seen: written.append(len(staged()))
    outcome = await outcome_of(items_load(items.service.url, pipeline={"batch_timeout": 3_600}), to="2026-01-06")
    assert (outcome.result["counts"]["inserted"], written, staged()) == (5, [0, 1, 2, 3, 4], [1] * 5)
    assert any("queue is full" in line.message and line.fields["held_bytes"] > 500 for line in outcome.log)


@pytest.mark.requirement("E9")
async def test_fields_without_a_column_are_reported_once(items, outcome_of, table):
    items.records = [item(number, number) for number in (1, 2)]
    load = items_load(items.service.url, transform=lambda record: {**record, "valeu": 1})
    outcome = await outcome_of(load, to="2026-01-03")
    assert outcome.result["counts"]["inserted"] == 2
    [line] = [line for line in outcome.log if line.message.startswith("ignoring fields")]
    assert (line.fields["table"], line.fields["fields"]) == ("item", ["valeu"])


@pytest.mark.requirement("E2", "E6")
async def test_of_two_rows_of_one_key_the_later_request_s_counts_whichever_worker_is_first(
    items, counts_of, table, staged
):
    items.records = [item(1, value="old"), item(1, value="new")]

    def transform(record):
        deadline = time.monotonic() + WATCHDOG_S
        while record["value"] == "old" and not staged() and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        return record

    load = items_load(items.service.url, windows=None, page_size=1, transform=transform, pipeline={"batch_size": 1})
    assert (await counts_of(load))["inserted"] == 1
    assert staged() == [1, 1]
    assert await table("(id, value)") == ["(1,new)"]


@pytest.mark.slow
@pytest.mark.requirement("E3", "E9")
async def test_a_lagging_writer_is_reported_once_and_again_when_it_has_caught_up(items, counts_of, database, raw):
    items.records = [item(number, number) for number in range(1, 31)]
    # No row is staged before the first log line about the lag; then the writer continues to lag for some of the
    # answers.
    StagingWatch(database, "PERFORM pg_advisory_xact_lock_shared(4711); PERFORM pg_sleep(0.05);")
    await raw.execute("SELECT pg_advisory_lock(4711)")
    with capture_logs() as lines:

        def told(*events):
            events = events or ("the writer is slower than the parsers", "the writer has caught up")
            return [line for line in lines if line["event"] in events]

        async def let_go():
            with trio.fail_after(WATCHDOG_S):
                while not told():  # noqa: ASYNC110 - a line of a log is no event
                    await trio.sleep(0.01)
            await raw.execute("SELECT pg_advisory_unlock(4711)")

        def before(seen):
            if seen.query["from"] == "2026-01-20":
                assert _wait_for(lambda: len(told("committed")) == 19)

        items.before = before
        async with trio.open_nursery() as nursery:
            nursery.start_soon(let_go)
            load = items_load(items.service.url, pipeline={"queue_size": 3, "batch_size": 1})
            counts = await counts_of(load, to="2026-01-31")
    assert counts["inserted"] == 30
    assert told()[0]["log_level"] == "warning"
    assert told()[0]["responses"] > 6
    assert [line["log_level"] for line in told()] == (["warning", "info"] * 30)[: len(told())]
    assert len(told("the writer has caught up")) > 0


def _waits_for_place():
    """Return whether a task waits for a place in a processing queue, by its stack."""
    tasks = [trio.lowlevel.current_root_task()]
    for task in tasks:
        tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    waiting = Backpressure.take_place.__code__
    return any(getattr(frame, "f_code", None) is waiting for task in tasks for frame, _ in task.iter_await_frames())


@pytest.mark.slow
@pytest.mark.requirement("E9")
async def test_a_queue_that_stays_full_is_warned_of_once(items, counts_of, soon):
    items.records = [item(number, number) for number in range(1, 11)]
    with capture_logs() as lines:

        def transform(record):
            # Until the request behind the next one waits for its place, so that the queue is full each time.
            assert record["id"] > 8 or _wait_for(lambda: trio.from_thread.run_sync(_waits_for_place))
            return record

        load = items_load(items.service.url, transform=transform, pipeline={"workers": 1, "queue_size": 1})
        assert (await counts_of(load, to="2026-01-11"))["inserted"] == 10
    full = [line for line in lines if "queue is full" in line["event"]]
    assert len(full) == 1


@pytest.mark.slow
@pytest.mark.requirement("E11")
async def test_u4_log_lines_are_limited_for_each_task_of_a_flow_and_the_rest_counted(items, supervised, raw):
    items.records = [item(number, number) for number in range(1, 11)]
    loads = [items_load(items.service.url, name=name) for name in ("items", "others")]
    tasks = Tasks()
    add_flows(tasks, Flow(name="nightly", layers={"ods": loads}))
    async with supervised(tasks, log_lines_per_job=5) as supervisor:
        job = await supervisor.jobs.enqueue("nightly", {"to": "2026-01-11"}, queue="q")
        assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
        view = await get_run_view(supervisor.database, job.job_id)
        # And two for each: that there were more, and the number.
        assert [(task.task, task.lines, task.warnings) for task in view.tasks] == [("items", 7, 2), ("others", 7, 2)]
        for task in view.tasks:
            wanted = LinesWanted(task=task.ordinal)
            lines = (await read_lines(supervisor.database, job.job_id, wanted, after=0, limit=100)).lines
            assert [line.fields["load"] for line in lines] == [task.task] * 7
            assert lines[-1].event_id == task.last_event
            assert lines[5].message == "more than 5 lines; the rest is not stored"
            lost = lines[6].fields["not_kept"]
            assert lines[6].message == f"{lost} lines were not stored"
            assert lost > 10
        own = await read_lines(supervisor.database, job.job_id, LinesWanted(tasks=[]), after=0, limit=100)
        assert [line.kind for line in own.lines] == ["picked", "done"]
    kept = "SELECT count(*) FROM dl_job_events WHERE kind = 'log' AND payload->'fields'->>'load' = $1"
    assert [await raw.fetchval(kept, load.name) for load in loads] == [7, 7]


@pytest.mark.requirement("E3")
async def test_rows_are_written_in_batches_across_responses_and_at_the_segments_end(items, counts_of, staged):
    items.records = [item(number) for number in range(25)] + [item(25, 2)]
    load = items_load(items.service.url, page_size=4, pipeline={"batch_size": 10})
    assert (await counts_of(load, to="2026-01-03"))["inserted"] == 26
    # As soon as there are ten, including all rows of the response that completed them.
    assert staged() == [12, 12, 1, 1]


@pytest.mark.requirement("E3")
async def test_a_response_with_very_many_rows_is_written_in_several_batches(items, counts_of, staged, limits):
    limits.set(most_rows=20)
    items.records = [item(number) for number in range(45)]
    load = items_load(items.service.url, pipeline={"batch_size": 10})
    assert (await counts_of(load, to="2026-01-02"))["inserted"] == 45
    assert staged() == [20, 20, 5]


@pytest.mark.requirement("E3")
async def test_a_batch_that_is_not_full_is_written_after_its_timeout(items, counts_of, staged):
    items.records = [item(number) for number in range(5)]
    # The second page arrives only when the rows of the first, too few for a batch, are written.
    items.before = lambda seen: seen.query["page"] == "2" and _wait_for(staged)
    load = items_load(items.service.url, page_size=3, pipeline={"batch_timeout": 0.05})
    assert (await counts_of(load, to="2026-01-02"))["inserted"] == 5
    assert staged() == [3, 2]


@pytest.mark.slow
@pytest.mark.requirement("E3")
async def test_one_writes_at_a_time_however_many_process(items, counts_of, database, raw):
    items.records = [item(number, 1 + number // 4) for number in range(40)]
    # The second sequence counts transactions that write while another one does.
    write = "IF NOT pg_try_advisory_xact_lock(4711) THEN PERFORM nextval('beside'); END IF; PERFORM pg_sleep(0.01);"
    await raw.execute(f"""
        CREATE SEQUENCE commits;
        CREATE SEQUENCE beside;
        CREATE FUNCTION commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
          PERFORM nextval('commits');
          {write}
          RETURN NULL;
        END $$;
        CREATE TRIGGER commit BEFORE INSERT ON item FOR EACH STATEMENT EXECUTE FUNCTION commit();
    """)
    staging = StagingWatch(database, write)
    load = items_load(items.service.url, pipeline={"workers": 4, "batch_size": 3})
    assert (await counts_of(load, to="2026-01-11"))["inserted"] == 40
    assert staging.tries() == await raw.fetchval("SELECT last_value FROM commits") == 10
    assert not await raw.fetchval("SELECT is_called FROM beside")


@pytest.mark.slow
@pytest.mark.requirement("E3")
async def test_a_run_ends_when_all_that_was_asked_for_is_processed_and_written(items, counts_of, raw):
    items.records = [item(number, 1 + number % 3) for number in range(30)]

    def transform(record):
        threading.Event().wait(0.01)
        return record

    counts = await counts_of(items_load(items.service.url, transform=transform), to="2026-01-04")
    assert counts["inserted"] == await raw.fetchval("SELECT count(*) FROM item") == 30
    # The stage is dropped with the run.
    assert await raw.fetchval("SELECT count(*) FROM pg_class WHERE relname LIKE 'dl_stage%'") == 0


@pytest.mark.slow
@pytest.mark.requirement("E6")
async def test_unknown_fields_go_into_the_payload_where_there_is_one(items, counts_of, raw, table):
    items.records = [{**item(1), "z": [1, 2.5], "ä": {"b": None}}, item(2)]
    assert (await counts_of(items_load(items.service.url, windows=None)))["inserted"] == 2
    assert await table() == ["(1,2026-01-01,a)", "(2,2026-01-01,a)"]
    await raw.execute("ALTER TABLE item ADD payload jsonb")
    assert (await counts_of(items_load(items.service.url, windows=None)))["updated"] == 1
    assert await table("payload") == ['{"z": [1, 2.5], "ä": {"b": null}}', None]


@pytest.mark.slow
@pytest.mark.requirement("E6")
async def test_the_metadata_columns_say_where_a_row_came_from_and_change_nothing(items, counts_of, raw):
    await raw.execute("ALTER TABLE item ADD source_file text, ADD source_endpoint text, ADD fetched_at timestamptz")
    items.records = [item(1)]
    await counts_of(items_load(items.service.url), to="2026-01-02")
    [row] = await raw.fetch("SELECT source_file, source_endpoint, fetched_at, now() - fetched_at AS ago FROM item")
    assert row["source_file"] is None
    assert row["source_endpoint"] == f"{items.service.url}/items?from=2026-01-01&to=2026-01-02"
    assert 0 <= row["ago"].total_seconds() < 60
    counts = await counts_of(items_load(items.service.url), **{"from": "2026-01-01", "to": "2026-01-02"})
    assert (counts["unchanged"], counts.get("updated")) == (1, None)
    assert await raw.fetchval("SELECT fetched_at FROM item") == row["fetched_at"]


@pytest.mark.slow
@pytest.mark.requirement("E6")
async def test_a_column_that_a_load_does_not_bring_keeps_its_default_and_what_others_wrote(
    items, counts_of, raw, table
):
    await raw.execute("ALTER TABLE item ADD note text DEFAULT 'none yet'")
    items.records = [item(1)]
    await counts_of(items_load(items.service.url, windows=None))
    await raw.execute("UPDATE item SET note = 'mine'")
    items.records = [item(1, value="b"), item(2)]
    assert (await counts_of(items_load(items.service.url, windows=None)))["updated"] == 1
    assert await table() == ["(1,2026-01-01,b,mine)", '(2,2026-01-01,a,"none yet")']


@pytest.mark.slow
@pytest.mark.each_server
@pytest.mark.requirement("E6")
@pytest.mark.parametrize("batch_size", [2, 100])
async def test_of_a_keys_rows_the_last_counts_whichever_columns_the_others_bring(
    items, counts_of, raw, table, batch_size
):
    await raw.execute("ALTER TABLE item ADD note text, ADD price numeric")
    items.records = [
        item(1, value="first"),
        {**item(1, value="second"), "note": "noted"},
        {**item(2), "price": 1},
        item(1, value="last"),
        {**item(3), "price": 3},
    ]
    load = items_load(items.service.url, windows=None, pipeline={"batch_size": batch_size})
    assert (await counts_of(load))["duplicates"] == 2
    assert await table("(id, value, price)") == ["(1,last,)", "(2,a,1)", "(3,a,3)"]


@pytest.mark.slow
@pytest.mark.requirement("E6")
async def test_rows_are_unchanged_by_their_hash_whatever_the_columns_say(items, counts_of, raw, table):
    await raw.execute("ALTER TABLE item ADD content_hash text, ADD price numeric")
    declared = Table("item", key="id", hash_without="value")
    load = items_load(items.service.url, windows=None, table=declared)
    items.records = [{**item(1), "price": 1.10}, {**item(2), "price": 2}]
    assert (await counts_of(load))["inserted"] == 2
    assert await table("left(content_hash, 2)") == [f"{HASH_VERSION}:"] * 2
    # A changed value that is left out is no change, nor is another notation of a number.
    items.records = [{"price": 1.1, **item(1, value="b")}, {**item(2), "price": 3}]
    counts = await counts_of(load)
    assert (counts["updated"], counts["unchanged"]) == (1, 1)
    assert await table("(id, value, price)") == ["(1,a,1.1)", "(2,a,3)"]


@pytest.mark.requirement("E6")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}),
        ({"a": Decimal("1.10")}, {"a": Decimal("1.1")}),
        ({"a": 10}, {"a": Decimal("10.0")}),
        ({"a": 10}, {"a": 10.0}),
        ({"a": 0.1}, {"a": Decimal("0.10")}),
        ({"a": [-0.0, 1e300]}, {"a": [0, Decimal("1E+300")]}),
        ({"a": [Decimal(100), Decimal("-0.0")]}, {"a": (Decimal("1E+2"), Decimal(0))}),
        ({"a": "Ångström"}, {"a": unicodedata.normalize("NFD", "Ångström")}),
        ({"é": 1, "f": 2}, {unicodedata.normalize("NFD", "é"): 1, "f": 2}),
        ({"a": {"é": 1, "f": 2}}, {"a": {unicodedata.normalize("NFD", "é"): 1, "f": 2}}),
        ({"a": 1, "fetched": 1}, {"a": 1, "fetched": 2}),
    ],
)
def test_a_hash_is_the_same_for_the_same_contents(one, other):
    without = frozenset({"fetched"})
    assert content_hash(one, without) == content_hash(other, without)
    assert content_hash(one, without).startswith(f"{HASH_VERSION}:")


@pytest.mark.requirement("E6")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": Decimal("1.1")}, {"a": Decimal("1.11")}),
        ({"a": None}, {}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": "1", "b": "2"}, {"a": "2", "b": "1"}),
        ({"a": Decimal(10)}, {"a": Decimal(1)}),
        ({"a": 1}, {"a": True}),
        ({"a": 10}, {"a": "10"}),
        ({"a": "a"}, {"a": "A"}),
    ],
)
def test_a_hash_differs_for_other_contents(one, other):
    assert content_hash(one) != content_hash(other)
