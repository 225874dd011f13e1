"""Runs for a span of the past: loads with versions weave it in, and no run silently leaves data out."""

from __future__ import annotations

import re
from datetime import date, timedelta

import attrs
import pytest
from etl_tasks import item, items_load

from dataloader import BadRequest, Tasks
from dataloader.flows.etl import (
    Csv,
    Detail,
    Dimension,
    Dimensions,
    Files,
    Flow,
    History,
    Load,
    Request,
    Table,
    Windows,
    add_dimensions,
    add_flows,
)

pytestmark = pytest.mark.requirement("E6", "E8")
VERSIONED = """
CREATE TABLE versioned (id int, value text, valid_from date, valid_to date, is_current boolean NOT NULL,
  PRIMARY KEY (id, valid_from), CHECK (valid_from < valid_to), CHECK (is_current = (valid_to IS NULL)));
CREATE UNIQUE INDEX ON versioned (id) WHERE is_current"""
FIELDS = "id, value, extract(day FROM valid_from), extract(day FROM valid_to)"


def versions_load(url, *, complete=True, **fields):
    history = History(tracked=("value",), complete=complete)
    table = Table("versioned", key="id", history=history)
    return items_load(url, table=table, transform=lambda r: {"id": r["id"], "value": r["value"]}, **fields)


@pytest.fixture
async def versions(raw, table):
    await raw.execute(VERSIONED)

    async def versions():
        return await table(FIELDS, "versioned")

    return versions


@pytest.mark.slow
@pytest.mark.parametrize("complete", [True, False])
async def test_a_backfill_weaves_older_windows_into_the_history(items, counts_of, versions, raw, complete):
    load = versions_load(items.service.url, complete=complete)
    items.records = [
        item(1, 1, "a"),
        item(2, 1, "a"),
        item(1, 2, "a"),
        item(1, 3, "b"),
        item(1, 4, "b"),
        item(2, 4, "a"),
    ]
    await counts_of(load, to="2026-01-05")
    # The source has corrected the second day, and has one more day at the beginning of the backfill.
    items.records += [item(1, 2, "c"), item(2, 3, "d")]
    items.service.requests.clear()
    counts = await counts_of(load, **{"from": "2026-01-02", "to": "2026-01-04"})
    assert (items.asked(), counts["woven"]) == (["2026-01-02", "2026-01-03"], 2)
    found = await versions()
    counts = await counts_of(load, **{"from": "2026-01-02", "to": "2026-01-04"})
    assert (await versions(), counts.get("woven", 0), counts.get("closed", 0)) == (found, 0, 0)
    await raw.execute("TRUNCATE versioned, dl_load_history, dl_load_state CASCADE")
    await counts_of(load, to="2026-01-05")
    assert await versions() == found


async def test_a_history_that_began_late_is_extended_to_the_past(items, counts_of, versions):
    load = versions_load(items.service.url, complete=False)
    items.records = [item(1, 1, "a"), item(2, 2, "a"), item(1, 4, "b"), item(2, 5, "a")]
    await counts_of(load, **{"from": "2026-01-04", "to": "2026-01-06"})
    assert await versions() == ["(1,b,4,)", "(2,a,5,)"]
    await counts_of(load, **{"from": "2026-01-01", "to": "2026-01-04"})
    assert await versions() == ["(1,a,1,4)", "(1,b,4,)", "(2,a,2,)"]


async def test_a_look_back_corrects_the_history(items, counts_of, versions):
    windows = Windows(start=date(2026, 1, 1), segment="day", look_back=timedelta(days=2))
    load = versions_load(items.service.url, windows=windows)
    items.records = [item(1, 1, "a"), item(1, 2, "a"), item(1, 3, "a")]
    await counts_of(load, to="2026-01-04")
    items.records += [item(1, 2, "b"), item(1, 4, "a")]
    await counts_of(load, to="2026-01-05")
    assert await versions() == ["(1,a,1,2)", "(1,a,3,)", "(1,b,2,3)"]


@pytest.mark.slow
async def test_windows_after_a_failed_one_are_merged_and_its_repair_is_woven_in(
    items, counts_of, counts_of_failed, versions, soon
):
    load = versions_load(items.service.url)
    items.records = [item(1, number, f"of {number}") for number in (1, 2, 3)]
    items.service.misbehave("from=2026-01-02", times=3, status=500)
    await counts_of_failed(load, to="2026-01-04")
    assert await versions() == ['(1,"of 1",1,3)', '(1,"of 3",3,)']
    await counts_of(load, to="2026-01-04")
    assert await versions() == ['(1,"of 1",1,2)', '(1,"of 2",2,3)', '(1,"of 3",3,)']


async def test_a_span_is_refused_for_a_load_without_windows(items, outcome_of):
    load = items_load(items.service.url, windows=None)
    for name in ("from", "to"):
        outcome = await outcome_of(load, **{name: "2026-01-01"})
        told = "must be omitted, not 2026-01-01: items has no windows, so each run loads everything"
        assert (outcome.status, outcome.error) == ("failed", f"{name}: {told}")
    assert items.service.requests == []


async def test_a_span_is_refused_beside_failures(items, outcome_of):
    with pytest.raises(BadRequest, match=r"^args\.from: cannot be combined with failures"):
        await outcome_of(items_load(items.service.url), failures="all", **{"from": "2026-01-01"})


async def test_a_run_that_sends_no_request_says_why(items, outcome_of, tmp_path):
    load = items_load(items.service.url)
    await outcome_of(load, to="2026-01-03")
    outcome = await outcome_of(load, to="2026-01-02")
    assert outcome.result["status"] == "succeeded"
    assert outcome.result["reason"] == (
        "there is nothing to load before 2026-01-02: data before 2026-01-03T00:00:00+00:00 is loaded;"
        " set `from` to load a period again"
    )
    assert [line.fields["why"] for line in outcome.log if "no request" in line.message] == [outcome.result["reason"]]
    files = Files(f"{tmp_path}/*.csv", format=Csv(), window_of=r"(?P<year>\d{4})")
    load = Load(
        "files",
        files,
        Table("item", key="id"),
        windows=Windows(start=date(2025, 1, 1), segment="year", column="day"),
    )
    outcome = await outcome_of(load, **{"from": "2025-01-01", "to": "2026-01-01"})
    assert outcome.result["reason"] == (
        "the source of files has nothing to request for 2025-01-01T00:00:00+0000 to 2026-01-01T00:00:00+0000"
    )


async def test_a_span_that_ends_in_the_future_says_where_the_run_ended(items, outcome_of):
    windows = Windows(start=date(2026, 1, 1), segment="year", column="day")
    outcome = await outcome_of(items_load(items.service.url, windows=windows), to="2100-01-01")
    assert outcome.result["status"] == "succeeded"
    assert re.fullmatch(
        r"nothing after 20\d\d-.* is loaded, because `to` .2100-01-01. is in the future", outcome.result["reason"]
    )


async def test_a_version_that_facts_refer_to_is_not_removed(items, outcome_of, counts_of, raw, table):
    await raw.execute(
        "CREATE TABLE versioned (v serial PRIMARY KEY, id int, value text, valid_from date, valid_to date,"
        " is_current boolean NOT NULL); CREATE TABLE fact (v int REFERENCES versioned)"
    )
    load = versions_load(items.service.url)
    items.records = [item(1, 1, "a"), item(1, 2, "b"), item(1, 3, "a")]
    await counts_of(load, to="2026-01-04")
    await raw.execute("INSERT INTO fact SELECT v FROM versioned")
    items.records[1] = item(1, 2, "a")
    outcome = await outcome_of(load, **{"from": "2026-01-02", "to": "2026-01-03"})
    assert [failure["phase"] for failure in outcome.result["failures"]] == ["segment"]
    assert "foreign key" in outcome.result["failures"][0]["error"]
    assert await table(FIELDS, "versioned") == ["(1,a,1,2)", "(1,a,3,)", "(1,b,2,3)"]


async def test_a_load_without_windows_in_a_flow_of_a_span_says_that_it_loads_everything(items, outcome_of):
    load = items_load(items.service.url, windows=None)
    tasks = Tasks()
    add_flows(tasks, Flow(name="nightly", layers={"ods": [load]}))
    outcome = await outcome_of(tasks, **{"from": "2026-01-01"})
    assert outcome.result["tasks"]["items"]["reason"] == (
        "items has no windows and loads everything; from and to do not apply to it"
    )


async def test_files_that_a_span_does_not_choose_are_loaded_with_a_reason(outcome_of, items, tmp_path):
    (tmp_path / "now.csv").write_text("id,day,value\n1,2026-01-01,a\n")
    load = Load(
        "files",
        Files(f"{tmp_path}/*.csv", format=Csv(), record_source=False),
        Table("item", key="id"),
        windows=Windows(start=date(2026, 1, 1), segment="day", column="day"),
    )
    assert "reason" not in (await outcome_of(load)).result
    outcome = await outcome_of(load, **{"from": "2026-01-01", "to": "2026-01-03"})
    assert outcome.result["reason"] == "files without a separate window are loaded; from and to do not apply to them"


@pytest.mark.slow
async def test_a_snapshot_without_any_record_closes_nothing_and_says_so(items, outcome_of, versions):
    items.records = [item(1, 1), item(1, 3)]
    outcome = await outcome_of(versions_load(items.service.url), to="2026-01-05")
    assert await versions() == ["(1,a,1,)"]
    assert outcome.result["reason"] == "the source has no records, so no rows are closed or marked as deleted (2 times)"
    outcome = await outcome_of(
        versions_load(items.service.url, complete=False), **{"from": "2026-01-01", "to": "2026-01-05"}
    )
    assert "reason" not in outcome.result


@pytest.mark.slow
@pytest.mark.parametrize("complete", [True, False])
async def test_snapshots_of_an_earlier_release_are_known_by_their_segments(items, counts_of, versions, raw, complete):
    """The backfill continues to the end, since unchanged rows were not recorded."""
    load = versions_load(items.service.url, complete=complete)
    items.records = [item(1, number, "a") for number in (1, 2, 3, 4)]
    await counts_of(load, to="2026-01-05")
    await raw.execute("DELETE FROM dl_etl_observed")
    items.records[1] = item(1, 2, "b")
    await counts_of(load, **{"from": "2026-01-02", "to": "2026-01-03" if complete else "2026-01-05"})
    assert await versions() == ["(1,a,1,2)", "(1,a,3,)", "(1,b,2,3)"]


async def test_a_file_of_today_does_not_become_a_snapshot_of_the_past(outcome_of, counts_of, versions, tmp_path):
    (tmp_path / "now.csv").write_text("id,value\n1,a\n")
    load = Load(
        "files",
        Files(f"{tmp_path}/*.csv", format=Csv(), record_source=False),
        Table("versioned", key="id", history=History(tracked=("value",))),
        windows=Windows(start=date(2026, 1, 1), segment="day"),
    )
    await counts_of(load, to="2026-01-06")
    (tmp_path / "now.csv").write_text("id,value\n1,b\n")
    outcome = await outcome_of(load, **{"from": "2026-01-01", "to": "2026-01-03"})
    assert outcome.status == "failed"
    assert "to: must be after 2026-01-05T00:00:00+00:00, not 2026-01-03T00:00:00+00:00" in outcome.error
    assert "declare window_of or as_of" in outcome.error
    assert await versions() == ["(1,a,5,)"]


async def test_files_of_a_span_are_loaded_again_and_others_once(outcome_of, versions, tmp_path):
    load = Load(
        "files",
        Files(
            f"{tmp_path}/*.csv",
            format=Csv(),
            record_source=False,
            window_of=r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)",
        ),
        Table("versioned", key="id", history=History(tracked=("value",))),
        windows=Windows(start=date(2026, 1, 1), segment="day"),
    )
    for number in (1, 2, 3):
        (tmp_path / f"2026-01-0{number}.csv").write_text(f"id,value\n1,of {number}\n")
    await outcome_of(load, to="2026-02-01")
    (tmp_path / "2026-01-01.csv").write_text("id,value\n1,of 2\n")
    outcome = await outcome_of(load, to="2026-02-01")
    assert (outcome.result["counts"]["requests"], len(await versions())) == (1, 3)
    outcome = await outcome_of(load, **{"from": "2026-01-01", "to": "2026-01-02"})
    assert outcome.result["counts"]["requests"] == 1
    assert await versions() == ['(1,"of 2",1,3)', '(1,"of 3",3,)']


@pytest.mark.slow
@pytest.mark.parametrize(("since", "until"), [("2026-01-02", "2026-01-03"), ("2026-01-02", None)])
async def test_a_history_whose_unchanged_rows_were_not_recorded_is_loaded_to_its_end(
    items, outcome_of, versions, raw, since, until
):
    """An earlier release has merged it."""
    load = versions_load(items.service.url, complete=False)
    items.records = [item(1, 1, "a"), item(1, 3, "a")]
    await outcome_of(load, to="2026-01-04")
    await raw.execute("DELETE FROM dl_etl_observed")
    items.records.append(item(1, 2, "b"))
    items.service.requests.clear()
    outcome = await outcome_of(load, **{"from": since, "to": until or "2026-01-05"})
    if until is not None:
        assert "to: must be after 2026-01-03T00:00:00+00:00" in outcome.error
        assert (outcome.status, items.service.requests) == ("failed", [])
    else:
        assert await versions() == ["(1,a,1,2)", "(1,a,3,)", "(1,b,2,3)"]


@pytest.mark.slow
@pytest.mark.parametrize("takes_date", [True, False])
async def test_dimensions_of_an_earlier_date_need_a_query_by_date(outcome_of, versions, raw, takes_date):
    await raw.execute("CREATE TABLE fact (id int, value text, day date)")
    await raw.execute("INSERT INTO fact VALUES (1, 'a', '2026-01-01'), (1, 'b', '2026-01-03')")
    by_date = "WHERE day <= $1" if takes_date else ""
    query = f"SELECT DISTINCT ON (id) id, value FROM fact {by_date} ORDER BY id, day DESC"
    dimension = Dimension(table="versioned", query=query, key=("id",), history=History(tracked=("value",)))
    tasks = Tasks()
    add_dimensions(tasks, Dimensions(name="stars", tables=(dimension,)))
    await outcome_of(tasks, as_of="2026-01-05")
    outcome = await outcome_of(tasks, as_of="2026-01-02")
    if takes_date:
        assert await versions() == ["(1,a,2,5)", "(1,b,5,)"]
    else:
        assert outcome.status == "failed"
        assert "as_of 2026-01-02 is before the newest snapshot" in outcome.error
        assert await versions() == ["(1,b,5,)"]


def test_a_history_of_details_needs_an_instant(items):
    history = History(tracked=("about",))
    with pytest.raises(ValueError, match="windows: is required; history of table detail"):
        attrs.evolve(
            items_load(items.service.url, windows=None),
            detail=_detail(items, Table("detail", key="id", history=history)),
        )


def _detail(items, table):
    return Detail(
        id=lambda record: record["id"],
        request=lambda _number: Request(endpoint="/items"),
        source=items_load(items.service.url).source,
        table=table,
        transform=lambda _number, record: record,
    )
