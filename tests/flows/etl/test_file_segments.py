"""A file, or an archive's member, is one segment: listed and read once in a run, however windows are cut (E6, S7)."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime

import attrs
import pytest

from dataloader.flows.etl import History, Load, Table, Windows
from dataloader.flows.etl.formats.csv_format import Csv
from dataloader.flows.etl.plan.planner import single_walks
from dataloader.flows.etl.sources.files import Files, FilesConnection
from dataloader.flows.etl.sources.source import Window

pytestmark = pytest.mark.requirement("E6", "S7")
BY_YEAR = r"(?P<year>\d{4})\.csv"
BY_DAY = r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)\.csv"
CSV = Csv()


@attrs.frozen
class Watched(Files):
    """Files that count their listings, and the reads of each."""

    seen: Counter = attrs.field(factory=Counter, kw_only=True, eq=False)

    @asynccontextmanager
    async def open(self):
        connection = _Watched(self)
        try:
            yield connection
        finally:
            connection.close()

    async def requests(self, window):
        self.seen["listed"] += 1
        async for request in super().requests(window):
            yield request


@attrs.define
class _Watched(FilesConnection):
    async def fetch(self, request, *, timeout_s):
        self.source.seen[request.key or request.endpoint.rpartition("/")[2]] += 1
        return await super().fetch(request, timeout_s=timeout_s)


def csv(*rows):
    return "\n".join(["id,day,value", *rows]) + "\n"


def people(source, *, key=("id",), segment="month", **options):
    return Load(
        "people",
        source,
        Table("item", key=key, mode="upsert" if key else "insert", **options),
        windows=Windows(start=date(2025, 1, 1), segment=segment, column="day"),
    )


@attrs.frozen
class Twice(Files):
    """Files that are listed twice."""

    async def requests(self, window):
        async for request in super().requests(window):
            for _ in range(2):
                yield request


async def test_two_walks_with_one_name_are_two_segments(tmp_path, counts_of, raw):
    await raw.execute("CREATE TABLE item (id int, day date, value text)")
    (tmp_path / "2025.csv").write_text(csv("1,2025-01-01,a"))
    source = Twice(f"{tmp_path}/*.csv", format=CSV, record_source=False, window_of=BY_YEAR)
    counts = await counts_of(people(source, key=()))
    assert (counts["inserted"], counts["segments"]) == (2, 2)
    segments = [row[0] for row in await raw.fetch("SELECT segment FROM dl_etl_segments ORDER BY segment")]
    assert segments == [f"{tmp_path}/2025.csv", f"{tmp_path}/2025.csv (2)"]


async def test_a_file_longer_than_a_window_is_read_once_without_duplicate_rows(tmp_path, counts_of, raw):
    await raw.execute("CREATE TABLE item (id int, day date, value text)")
    (tmp_path / "2025.csv").write_text(csv(*(f"{number},2025-01-{number:02},a" for number in range(1, 11))))
    source = Watched(f"{tmp_path}/*.csv", format=CSV, record_source=False, window_of=BY_YEAR)
    counts = await counts_of(people(source, key=()), to="2025-11-01")
    assert (counts["inserted"], counts["segments"], counts["requests"]) == (10, 1, 1)
    assert await raw.fetchval("SELECT count(*) FROM item") == 10
    assert source.seen == {"listed": 1, "2025.csv": 1}


async def test_a_file_without_a_known_window_is_read_once_per_run(tmp_path, counts_of, raw):
    await raw.execute("CREATE TABLE item (id int, day date, value text)")
    (tmp_path / "all.csv").write_text(csv("1,2025-01-01,a"))
    source = Watched(tmp_path / "all.csv", format=CSV, record_source=False)
    counts = await counts_of(people(source, key=(), segment="day"), to="2025-02-01")
    assert (counts["inserted"], counts["segments"]) == (1, 1)
    assert source.seen == {"listed": 1, "all.csv": 1}


async def test_an_archive_is_listed_once_and_its_members_load_in_window_order(tmp_path, counts_of, raw):
    await raw.execute("CREATE TABLE item (id int PRIMARY KEY, day date, value text)")
    days = [3, 1, 2]
    with tarfile.open(tmp_path / "days.tar.gz", "w:gz") as archive:
        for day in days:
            body = csv(f"1,2025-01-0{day},{day}").encode()
            info = tarfile.TarInfo(f"2025-01-0{day}.csv")
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    source = Watched(tmp_path / "days.tar.gz", members="*.csv", format=CSV, record_source=False, window_of=BY_DAY)
    counts = await counts_of(people(source, segment="day"), to="2025-01-10")
    assert (counts["inserted"], counts["updated"], counts["segments"]) == (1, 2, 3)
    # The value of the last day remains.
    assert await raw.fetchval("SELECT value FROM item") == "3"
    assert source.seen == {"listed": 1, **{f"2025-01-0{day}.csv": 1 for day in days}}


async def test_only_rows_of_a_file_s_own_window_are_taken_for_gone(tmp_path, counts_of, raw):
    await raw.execute("CREATE TABLE item (id int PRIMARY KEY, day date, value text, deleted_at timestamptz)")
    await raw.execute("INSERT INTO item VALUES (7, '2024-12-31', 'x'), (8, '2025-11-30', 'x'), (9, '2026-01-01', 'x')")
    (tmp_path / "2025.csv").write_text(csv("1,2025-01-01,a"))
    source = Watched(f"{tmp_path}/*.csv", format=CSV, record_source=False, window_of=BY_YEAR)
    counts = await counts_of(people(source, delete_missing="deleted_at"), to="2025-03-01")
    # In the whole year, although the run ends with March: the file was read as a whole.
    assert (counts["inserted"], counts["deleted"]) == (1, 1)
    assert [row["id"] for row in await raw.fetch("SELECT id FROM item WHERE deleted_at IS NOT NULL")] == [8]


VERSIONS = """
CREATE TABLE item (id int, value text, valid_from date NOT NULL, valid_to date, is_current boolean NOT NULL,
  PRIMARY KEY (id, valid_from))"""


async def daily_versions(folder, raw):
    """Create the table of versions, and a file of each of three days; return the load that has their history."""
    await raw.execute(VERSIONS)
    for day, value in (("2025-01-05", "a"), ("2025-01-20", "b"), ("2025-02-03", "c")):
        (folder / f"{day}.csv").write_text(f"id,value\n1,{value}\n")
    source = Watched(f"{folder}/*.csv", format=CSV, record_source=False, window_of=BY_DAY)
    return people(source, history=History(tracked=("value",)))


@pytest.mark.requirement("E8")
async def test_daily_files_in_segments_of_months_are_snapshots_of_their_own_days(tmp_path, counts_of, table, raw):
    counts = await counts_of(await daily_versions(tmp_path, raw), to="2025-03-01")
    assert (counts["segments"], counts["inserted"], counts["changed"]) == (3, 1, 2)
    assert await table("value, valid_from, valid_to") == [
        "(a,2025-01-05,2025-01-20)",
        "(b,2025-01-20,2025-02-03)",
        "(c,2025-02-03,)",
    ]


@pytest.mark.slow
@pytest.mark.requirement("E8")
async def test_after_a_truncate_a_run_reads_all_files_again(tmp_path, counts_of, table, raw):
    load = await daily_versions(tmp_path, raw)
    await counts_of(load, to="2025-03-01")
    assert (await counts_of(load, to="2025-03-01"))["segments"] == 1
    before = await table("value, valid_from, valid_to")
    await raw.execute("TRUNCATE item")
    assert (await counts_of(load, to="2025-03-01"))["segments"] == 3
    assert await table("value, valid_from, valid_to") == before


@pytest.mark.requirement("E8")
async def test_a_file_that_is_overwritten_is_a_snapshot_as_of_the_last_window(tmp_path, counts_of, table, raw):
    await raw.execute(VERSIONS)
    load = people(
        Watched(tmp_path / "now.csv", format=CSV, record_source=False),
        segment="day",
        history=History(tracked=("value",)),
    )
    for day, value in (("2025-01-05", "a"), ("2025-01-07", "b")):
        (tmp_path / "now.csv").write_text(f"id,value\n1,{value}\n")
        await counts_of(load, to=day)
    assert await table("value, valid_from, valid_to") == ["(a,2025-01-04,2025-01-06)", "(b,2025-01-06,)"]


async def test_where_a_file_s_own_window_is_open_the_run_bounds_it(tmp_path):
    (tmp_path / "old.csv").write_text(csv())
    day = [datetime(2025, 1, number, tzinfo=UTC) for number in range(1, 5)]
    load = people(Files(f"{tmp_path}/*.csv", format=CSV, window_of=lambda _: Window(end=day[2])))
    walks = single_walks(load, [Window(day[0], day[1]), Window(day[1], day[3])])
    assert [window async for window, _ in walks] == [Window(day[0], day[2])]
