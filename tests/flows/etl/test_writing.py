"""Effects of rows in their table: inserted, updated, unchanged, marked as gone; and of the cursor (E6)."""

from __future__ import annotations

import json
from datetime import UTC, date

import attrs
import pytest
import trio
from databases import raw_connection
from etl_tasks import item, items_load

from dataloader import Tasks
from dataloader.flows.etl import Csv, Detail, Files, History, Load, Request, Table, Windows, add_loads
from dataloader.testing import run_task

pytestmark = pytest.mark.requirement("E6")
DELETING = Table("item", key="id", delete_missing="deleted_at")


@pytest.fixture
async def deleting(items, raw):
    """Return a load by days that marks rows as gone."""
    await raw.execute("ALTER TABLE item ADD deleted_at timestamptz")
    return items_load(items.service.url, table=DELETING, page_size=2, total_path="total")


@pytest.fixture
async def deleting_all(items, deleting):
    """Return a load of everything that marks rows as gone."""
    return items_load(items.service.url, table=DELETING, windows=None, page_size=2)


@pytest.fixture
def gone(raw):
    """Return a function that reads the IDs of items that are marked as gone."""

    async def gone():
        return [row["id"] for row in await raw.fetch("SELECT id FROM item WHERE deleted_at IS NOT NULL ORDER BY 1")]

    return gone


@pytest.fixture
def cursor(raw):
    """Return a function that reads the load's cursor as a day."""

    async def cursor():
        upto = await raw.fetchval("SELECT (state ->> 'upto')::timestamptz FROM dl_load_state WHERE load = 'items'")
        return None if upto is None else f"{upto.astimezone(UTC):%d}"

    return cursor


@pytest.mark.slow
async def test_rows_are_inserted_updated_or_left_alone(items, counts_of, table):
    load = items_load(items.service.url, windows=None)
    items.records = [item(1), item(2)]
    assert (await counts_of(load))["inserted"] == 2
    items.records = [item(1, value="b"), item(2), item(3)]
    counts = await counts_of(load)
    assert (counts["inserted"], counts["updated"], counts["unchanged"]) == (1, 1, 1)
    assert await table("(id, value)") == ["(1,b)", "(2,a)", "(3,a)"]


@pytest.mark.slow
async def test_a_rerun_with_the_same_input_writes_no_row(items, counts_of, raw):
    load = items_load(items.service.url)
    items.records = [item(number, 1 + number % 3) for number in range(9)]
    args = {"from": "2026-01-01", "to": "2026-01-04"}
    await counts_of(load, **args)
    before = await raw.fetch("SELECT id, xmin::text FROM item ORDER BY id")
    counts = await counts_of(load, **args)
    assert counts["unchanged"] == 9
    assert not counts.keys() & {"inserted", "updated", "deleted"}
    assert await raw.fetch("SELECT id, xmin::text FROM item ORDER BY id") == before


@pytest.mark.slow
async def test_two_loads_of_one_table_that_run_concurrently_leave_one_of_each_row(items, database, table):
    items.records = [item(number, 1 + number // 50) for number in range(200)]
    tasks = Tasks()
    add_loads(tasks, *(items_load(items.service.url, name=name) for name in ("items", "others")))
    outcomes = []

    async def run(name):
        outcomes.append(await run_task(tasks, name, {"to": "2026-01-05"}, dsn=database.dsn))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, "items")
            nursery.start_soon(run, "others")
    assert [outcome.status for outcome in outcomes] == ["succeeded"] * 2
    assert await table("id") == sorted(map(str, range(200)))
    counts = [outcome.result["counts"] for outcome in outcomes]
    assert sum(count.get("inserted", 0) for count in counts) == 200
    assert items.service.most_at_once() == 1


async def test_a_load_that_only_inserts_leaves_rows_that_are_there(items, counts_of, table):
    load = items_load(items.service.url, windows=None, table=Table("item", key="id", mode="insert"))
    items.records = [item(1)]
    await counts_of(load)
    items.records = [item(1, value="b"), item(2)]
    counts = await counts_of(load)
    assert (counts["inserted"], counts["unchanged"]) == (1, 1)
    assert await table("(id, value)") == ["(1,a)", "(2,a)"]


@pytest.mark.slow
async def test_rows_of_a_day_that_begins_at_one_o_clock_are_marked_as_gone(items, counts_of, deleting, gone):
    windows = Windows(start=date(2024, 9, 7), segment="day", column="day", zone="America/Santiago")
    load = attrs.evolve(deleting, windows=windows)
    items.records = [{**item(number), "day": f"2024-09-0{number}"} for number in (7, 8, 9)]
    args = {"from": "2024-09-07", "to": "2024-09-10"}
    await counts_of(load, **args)
    items.records = []
    assert (await counts_of(load, **args))["deleted"] == 3
    assert await gone() == [7, 8, 9]


@pytest.mark.slow
async def test_rows_that_a_window_has_no_more_are_marked_as_gone_and_others_are_not(items, counts_of, deleting, gone):
    items.records = [item(1, 1), item(2, 1), item(3, 2), item(4, 3)]
    await counts_of(deleting, to="2026-01-04")
    items.records = [item(2, 1)]
    counts = await counts_of(deleting, **{"from": "2026-01-01", "to": "2026-01-03"})
    assert (counts["deleted"], counts["unchanged"]) == (2, 1)
    # The fourth is after the windows.
    assert await gone() == [1, 3]


@pytest.mark.slow
async def test_a_row_that_comes_back_loses_its_mark(items, counts_of, deleting_all, gone):
    items.records = [item(1), item(2)]
    await counts_of(deleting_all)
    items.records = [item(2)]
    assert (await counts_of(deleting_all))["deleted"] == 1
    assert await gone() == [1]
    assert (await counts_of(deleting_all)).get("deleted") is None
    items.records = [item(1), item(2)]
    counts = await counts_of(deleting_all)
    assert (counts["updated"], counts["unchanged"]) == (1, 1)
    assert await gone() == []


async def test_an_answer_without_any_record_marks_nothing_in_the_whole_table(items, counts_of, deleting_all, gone):
    items.records = [item(1), item(2)]
    await counts_of(deleting_all)
    items.records = []
    assert (await counts_of(deleting_all)).get("deleted") is None
    assert await gone() == []


@pytest.mark.slow
async def test_a_segment_that_lacks_a_page_marks_nothing_and_moves_no_cursor(
    items, counts_of, counts_of_failed, deleting, gone, cursor, table, soon
):
    items.records = [item(number, 1 + number // 5) for number in range(15)]
    await counts_of(deleting, to="2026-01-04")
    assert await cursor() == "04"
    items.records = [item(number, 1 + number // 5) for number in range(15, 30)]
    items.service.misbehave("from=2026-01-05.*page=2", times=None, status=500)
    counts = await counts_of_failed(deleting, to="2026-01-07")
    assert (counts["requests_failed"], counts["inserted"], counts["segments"], counts["segments_failed"]) == (
        1,
        13,
        2,
        1,
    )
    # A complete day after an incomplete one does not move the cursor past the incomplete one.
    assert await cursor() == "05"
    assert len(await table("id")) == 28

    items.service.behave()
    counts = await counts_of(deleting, to="2026-01-07")
    assert items.asked()[-6:-3] == ["2026-01-05/1", "2026-01-05/2", "2026-01-05/3"]
    assert (counts["inserted"], counts["unchanged"], counts.get("deleted")) == (2, 8, None)
    assert await cursor() == "07"

    items.records = [item(27, 6)]
    items.service.misbehave("page=1", times=None, status=500)
    await counts_of_failed(deleting, **{"from": "2026-01-05", "to": "2026-01-07"})
    assert await gone() == []


async def test_a_record_that_failed_is_not_taken_for_gone(items, counts_of, counts_of_failed, deleting_all, gone):
    items.records = [item(1), item(2), item(3)]
    await counts_of(deleting_all)
    items.records = [item(1), {**item(2), "id": None}]
    counts = await counts_of_failed(deleting_all)
    assert (counts["records_failed"], counts.get("deleted")) == (1, None)
    # The second may be the record that could not be read.
    assert await gone() == []


@pytest.mark.slow
async def test_a_row_that_was_refused_is_not_taken_for_gone(items, counts_of, counts_of_failed, deleting, gone, cursor):
    items.records = [item(1, 1), item(2, 1)]
    await counts_of(deleting, to="2026-01-02")
    items.records = [{**item(1, 1), "day": "2026-01-01x"}]
    counts = await counts_of_failed(deleting, **{"from": "2026-01-01", "to": "2026-01-02"})
    assert counts["rows_failed"] == 1
    assert (await gone(), await cursor()) == ([], "02")
    items.records = [{**item(3, 2), "day": "2026-01-02x"}]
    assert (await counts_of_failed(deleting, to="2026-01-03"))["rows_failed"] == 1
    # The failure is recorded. The cursor passes it, since otherwise a permanent fault would stop the load at this day.
    assert (await gone(), await cursor()) == ([], "03")


@pytest.mark.slow
@pytest.mark.requirement("E6", "E7")
async def test_a_status_that_means_no_data_moves_the_cursor_and_is_no_failed_detail(items, counts_of, cursor, raw):
    await raw.execute("CREATE TABLE detail (id int PRIMARY KEY)")
    items.records = [item(number, number) for number in (1, 3)]
    items.service.misbehave("from=2026-01-02", times=None, status=404)
    items.service.misbehave("detail=1", times=None, status=404)
    detail = Detail(
        id=lambda record: record["id"],
        request=lambda number: Request(endpoint="/items", params={"detail": number}),
        source=items_load(items.service.url, statuses={404: "empty"}).source,
        table=Table("detail", key="id"),
        transform=lambda number, _record: {"id": number},
    )
    counts = await counts_of(items_load(items.service.url, statuses={404: "empty"}, detail=detail), to="2026-01-04")
    assert (counts["segments"], counts["details"], counts.get("details_failed")) == (3, 2, None)
    assert await raw.fetchval("SELECT array_agg(id) FROM detail") == [3]
    assert await cursor() == "04"


@pytest.mark.slow
async def test_a_run_begins_where_the_last_one_has_come_to(items, counts_of, cursor):
    load = items_load(items.service.url)
    await counts_of(load, to="2026-01-03")
    await counts_of(load, to="2026-01-05")
    assert items.asked() == ["2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04"]
    assert await cursor() == "05"
    assert (await counts_of(load, to="2026-01-05")) == {}
    assert len(items.service.requests) == 4


@pytest.mark.slow
async def test_a_run_over_days_long_past_does_not_move_the_cursor_back(items, counts_of, cursor):
    load = items_load(items.service.url)
    await counts_of(load, to="2026-01-05")
    await counts_of(load, **{"from": "2026-01-02", "to": "2026-01-03"})
    assert await cursor() == "05"


@pytest.mark.slow
async def test_a_run_over_days_to_come_does_not_move_the_cursor_over_those_in_between(items, counts_of, cursor):
    load = items_load(items.service.url)
    await counts_of(load, **{"from": "2026-01-07", "to": "2026-01-09"})
    assert await cursor() is None
    await counts_of(load, to="2026-01-03")
    await counts_of(load, **{"from": "2026-01-05", "to": "2026-01-06"})
    assert await cursor() == "03"
    # A run that begins before the cursor and ends behind it leaves nothing out.
    await counts_of(load, **{"from": "2026-01-02", "to": "2026-01-05"})
    assert await cursor() == "05"


async def test_a_run_s_segments_and_its_cursor_are_on_record(items, counts_of, raw):
    items.records = [item(1, 1), item(2, 2), item(3, 2)]
    await counts_of(items_load(items.service.url), to="2026-01-03")
    run = await raw.fetchrow("SELECT run_id, name, kind, status, finished_at IS NOT NULL, summary FROM dl_etl_runs")
    assert tuple(run)[1:5] == ("items", "load", "succeeded", True)
    segments = await raw.fetch("SELECT segment, counts->>'inserted' AS rows FROM dl_etl_segments ORDER BY segment")
    assert [tuple(row) for row in segments] == [
        ("2026-01-01T00:00:00+0000 to 2026-01-02T00:00:00+0000", "1"),
        ("2026-01-02T00:00:00+0000 to 2026-01-03T00:00:00+0000", "2"),
    ]
    state = await raw.fetchrow("SELECT load, state, run_id FROM dl_load_state")
    assert (state["load"], state["run_id"]) == ("items", run["run_id"])
    assert json.loads(state["state"]) == {"kind": "window", "upto": "2026-01-03T00:00:00+00:00"}
    task = await raw.fetchrow("SELECT task, status, started_at <= finished_at FROM dl_etl_tasks")
    assert tuple(task) == ("items", "succeeded", True)


@pytest.mark.slow
@pytest.mark.requirement("E6")
async def test_without_a_key_only_whole_segments_are_taken_in(
    items, counts_of, counts_of_failed, outcome_of, raw, soon
):
    await raw.execute("CREATE TABLE event (id int, day date, value text)")
    items.records = [item(1), item(2), item(3)]
    load = items_load(items.service.url, page_size=1, table=Table("event", mode="insert"))
    items.service.misbehave("page=2", times=3, status=500)
    counts = await counts_of_failed(load, to="2026-01-02")
    assert (counts["requests_failed"], counts.get("inserted", 0)) == (1, 0)
    assert (await outcome_of(load, failures="all")).status == "failed"
    assert (await counts_of(load, to="2026-01-02"))["inserted"] == 3
    assert await raw.fetchval("SELECT count(*) FROM event") == 3


@pytest.mark.requirement("E6")
async def test_of_a_day_that_is_loaded_in_part_no_row_is_taken_for_gone(items, counts_of, deleting, gone):
    items.records = [item(1), item(2, 2)]
    await counts_of(deleting, to="2026-01-03")
    items.records = []
    await counts_of(deleting, **{"from": "2026-01-01T10:00:00+00:00", "to": "2026-01-02"})
    assert await gone() == []


@pytest.mark.requirement("E6")
async def test_a_number_that_the_table_gives_need_not_be_brought(items, counts_of, raw):
    await raw.execute(
        "CREATE TABLE numbered (n int GENERATED BY DEFAULT AS IDENTITY, id int PRIMARY KEY, day date, value text)"
    )
    items.records = [item(7), item(8)]
    await counts_of(items_load(items.service.url, windows=None, table=Table("numbered", key="id")))
    assert [tuple(row) for row in await raw.fetch("SELECT n, id FROM numbered ORDER BY n")] == [(1, 7), (2, 8)]


@pytest.mark.slow
@pytest.mark.requirement("E6")
async def test_a_staging_table_that_another_session_reads_delays_no_load(items, counts_of, database, raw):
    left = f"dl_stage_{'0' * 32}_1_1"
    await raw.execute(f"CREATE TABLE {left} (n int)")
    items.records = [item(1)]
    async with raw_connection(database.dsn) as dump:
        await dump.execute("BEGIN")
        await dump.execute(f"SELECT FROM {left}")
        await counts_of(items_load(items.service.url, windows=None))
        await dump.execute("ROLLBACK")
    await counts_of(items_load(items.service.url, windows=None))
    assert await raw.fetchval(f"SELECT to_regclass('{left}')") is None


@pytest.mark.slow
@pytest.mark.requirement("E6", "E8")
async def test_snapshots_in_files_are_merged_once_and_one_that_comes_late_is_woven_in(outcome_of, raw, tmp_path):
    await raw.execute("""
        CREATE TABLE versioned (id int, value text, valid_from date, valid_to date, is_current boolean NOT NULL,
          PRIMARY KEY (id, valid_from))""")
    history = History(tracked=("value",), as_of=lambda segment: date.fromisoformat(segment.name[-14:-4]))
    load = Load(
        "snapshots",
        Files(str(tmp_path / "*.csv"), format=Csv(), record_source=False),
        Table("versioned", key="id", history=history),
    )

    async def run_with(*days):
        for day in days:
            (tmp_path / f"2026-01-0{day}.csv").write_text(f"id,value\n1,of {day}\n")
        outcome = await outcome_of(load)
        versions = await raw.fetch("SELECT value FROM versioned ORDER BY valid_from")
        return outcome.result, [row["value"] for row in versions], outcome.log

    result, versions, _ = await run_with(1, 3)
    assert (result["counts"]["segments"], versions) == (2, ["of 1", "of 3"])
    result, versions, log = await run_with(4)
    assert (result["status"], result["counts"]["segments"], versions) == ("succeeded", 2, ["of 1", "of 3", "of 4"])
    assert result["counts"]["unchanged"] == 1
    assert [line.fields["segments"] for line in log if "skipping older snapshots" in line.message] == [1]
    # Another snapshot of the same time corrects the first.
    (tmp_path / "late 2026-01-01.csv").write_text("id,value\n1,late\n")
    result, versions, _ = await run_with()
    assert (result["counts"]["woven"], versions) == (1, ["late", "of 3", "of 4"])
    result, versions, _ = await run_with(2)
    assert (result["counts"]["woven"], versions) == (1, ["late", "of 2", "of 3", "of 4"])


@pytest.mark.requirement("E6")
async def test_details_of_a_window_take_none_of_another_window_for_gone(items, outcome_of, raw):
    await raw.execute("CREATE TABLE detail (id int PRIMARY KEY, deleted_at timestamptz)")
    await raw.execute("INSERT INTO detail VALUES (99)")
    items.records = [item(1), item(2, 2)]
    detail = Detail(
        id=lambda record: record["id"],
        request=lambda _number: Request(endpoint="/items"),
        source=items_load(items.service.url).source,
        table=Table("detail", key="id", delete_missing="deleted_at"),
        transform=lambda number, _record: {"id": int(number)},
    )
    outcome = await outcome_of(items_load(items.service.url, detail=detail), to="2026-01-03")
    assert "a window needs a column" in outcome.error
    assert await raw.fetchval("SELECT count(*) FROM detail WHERE deleted_at IS NOT NULL") == 0
