"""A record that cannot be loaded is recorded with any content, and the run continues (E10)."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from datetime import date

import attrs
import pytest
from etl_tasks import AT_ONCE, BEARS_ALL, item, items_load
from source_app import Answer

from dataloader.flows.etl import (
    Csv,
    Detail,
    Dimension,
    Dimensions,
    Files,
    Flow,
    Http,
    JsonLines,
    Load,
    Request,
    Source,
    Table,
    Windows,
)
from dataloader.flows.etl.sources.source import Broken, Page, Response

pytestmark = pytest.mark.requirement("E10")

DAYS = range(1, 6)


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def days_load(url, read):
    """Return a load of five days, one request each."""
    return Load(
        "days",
        Http(url, endpoint="/days", params=lambda w: {"day": f"{w.start:%Y-%m-%d}"}, format=read),
        Table("item", key="id"),
        windows=Windows(start=date(2026, 1, 1), segment="day"),
        pipeline=AT_ONCE,
    )


def csv_body(day):
    rows = [f"{day * 100 + number},{date(2026, 1, day)},x" for number in range(99)]
    return "\n".join(["id,day,value", *rows, *([f"{day}99,\x00,y,extra"] if day == 2 else [])])


def lines_body(day):
    rows = [json.dumps(item(day * 100 + number, day)) for number in range(99)]
    return "\n".join([*rows, *(['{"id": "bro\x00\x00'] if day == 2 else [])]) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize(("read", "body"), [(Csv(), csv_body), (JsonLines(), lines_body)], ids=["csv", "jsonl"])
async def test_a_broken_record_with_a_nul_is_recorded_and_later_segments_are_loaded(items, outcome_of, raw, read, body):
    items.service.put("/days", lambda seen: Answer(body(int(seen.query["day"][-2:])).encode()))
    outcome = await outcome_of(days_load(items.service.url, read), to="2026-01-06")
    assert (outcome.status, outcome.result["status"]) == ("succeeded", "succeeded_with_failures"), outcome.error
    counts = outcome.result["counts"]
    assert (counts["segments"], counts["inserted"], counts["records_failed"]) == (5, 5 * 99, 1)
    [(phase, sample)] = await raw.fetch("SELECT phase, sample FROM dl_etl_failures")
    assert phase == "record"
    assert "\\u0000" in sample


@attrs.frozen
class OneAnswer(Source):
    """Custom source with a single, given page."""

    page: Page

    @asynccontextmanager
    async def open(self):
        yield self

    async def fetch(self, request, *, timeout_s):
        del timeout_s
        return Response(request=request, url="", status=200, headers={}, body=b"", took_s=0)

    async def requests(self, window):
        del window
        yield Request(endpoint="")

    def read(self, response):
        del response
        return self.page


def deep():
    value = "x"
    for _ in range(5_000):
        value = [value]
    return value


class Strange:
    def __repr__(self):
        raise RuntimeError("no repr")


def refuse(_record):
    raise UnspeakableError


HOSTILE = {
    "an object without a text": Strange,
    "a deep list": deep,
    "half a surrogate pair": lambda: "\ud800",
    "a NUL": lambda: "a\x00b",
    "not a number": lambda: float("nan"),
    "a huge number": lambda: 10**5_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("transform", [refuse, dict], ids=["an error without a text", "the column's refusal"])
async def test_a_record_that_becomes_no_row_is_recorded_with_any_content(items, outcome_of, raw, what, transform):
    bad = {"id": HOSTILE[what](), "value": HOSTILE[what](), HOSTILE["a NUL"](): 1}
    page = Page(records=[bad], broken=[Broken("\ud800\x00", "\x00" * 5_000, "\ud800\x00")])
    load = Load(
        "own",
        OneAnswer(page),
        Table("item", key="id"),
        transform=transform,
        pipeline=AT_ONCE | BEARS_ALL,
    )
    outcome = await outcome_of(load)
    assert "Traceback" not in (outcome.error or "")
    counts = outcome.result["counts"]
    assert counts["records_failed"] + counts.get("rows_failed", 0) == 2
    assert await raw.fetchval("SELECT count(*) FROM dl_etl_failures WHERE phase IN ('record', 'row')") == 2
    assert await raw.fetchval("SELECT status FROM dl_etl_runs") == outcome.result["status"]


async def test_an_id_that_no_request_can_have_is_a_failure_of_its_record(items, details, outcome_of, raw):
    # JSON of a service cannot contain it, but a transform can produce it.
    load = items_load(items.service.url, windows=None)
    detail = Detail(
        id=lambda record: ["1", "\ud800", "a\x00"][record["id"] - 1],
        request=lambda number: Request(endpoint="/detail", params={"id": number}),
        source=load.source,
        table=Table("detail", key="id"),
        transform=lambda _number, _record: None,
    )
    items.service.put("/detail", Answer(b'{"items": [{"id": 1}]}'))
    items.records = [item(number) for number in (1, 2, 3)]
    outcome = await outcome_of(attrs.evolve(load, detail=detail, pipeline=AT_ONCE | BEARS_ALL))
    counts = outcome.result["counts"]
    assert (outcome.result["status"], counts["details"]) == ("succeeded_with_failures", 2), outcome.error
    assert [tuple(row) for row in await raw.fetch("SELECT phase, key FROM dl_etl_failures")] == [("record", "2")]


async def test_a_file_is_loaded_whose_address_is_longer_than_an_index_stores(tmp_path, counts_of, raw):
    await raw.execute("CREATE TABLE item (id int PRIMARY KEY, day date, value text)")
    folder = tmp_path.joinpath(*(f"{number}{chr(0x4E00 + number * 7) * 70}" for number in range(16)))
    folder.mkdir(parents=True)
    for name in ("a", "b"):
        (folder / f"{name}.csv").write_text(f"id,day,value\n{ord(name)},2026-01-01,x\n")
    load = Load(
        "files",
        Files(f"{folder}/*.csv", format=Csv(), record_source=False),
        Table("item", key="id"),
    )
    assert len(str(folder).encode()) > 2_704
    counts = await counts_of(load)
    assert (counts["segments"], counts["inserted"]) == (2, 2)
    names = [row[0] for row in await raw.fetch("SELECT segment FROM dl_etl_segments")]
    assert len({*names}) == 2
    assert all(name.endswith(".csv") for name in names)


def test_a_name_that_can_not_be_stored_is_refused_where_it_is_declared():
    load = items_load("http://127.0.0.1:1")
    table = Dimension(table="t", query="SELECT 1", key=("k",))
    for declare in (
        lambda name: attrs.evolve(load, name=name),
        lambda name: Flow(name=name, layers={"ods": [load]}),
        lambda name: Dimensions(name=name, tables=(table,)),
    ):
        for name in ("a\x00b", "a\nb", "", "a" * 201, "\ud800"):
            with pytest.raises(ValueError, match="name: must"):
                declare(name)
