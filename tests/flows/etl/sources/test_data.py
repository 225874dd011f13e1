"""The data sets, read by the sources alone: the known number of records, and the broken ones by name."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal

import attrs
import pytest
import trio
from data_sets import countries
from walking import ask, broken, read, records, requests, walk

from dataloader.flows.etl.formats.csv_format import Csv
from dataloader.flows.etl.formats.json_format import Json
from dataloader.flows.etl.formats.packed_format import Compressed, Zip
from dataloader.flows.etl.formats.xml_format import Xml
from dataloader.flows.etl.sources.files import Files
from dataloader.flows.etl.sources.http import Http
from dataloader.flows.etl.sources.pagination import PageNumber
from dataloader.flows.etl.sources.source import Request, SourceError, Window

pytestmark = [pytest.mark.full, pytest.mark.requirement("S7")]


def between(first: int, last: int) -> Window:
    return Window(datetime(first, 1, 1, tzinfo=UTC), datetime(last, 1, 1, tzinfo=UTC))


def ecb(source_app, **params) -> Http:
    return Http(
        source_app.url,
        endpoint="/ecb/rates",
        params=lambda window: {"from": f"{window.start:%Y-%m-%d}", "to": f"{window.end:%Y-%m-%d}", **params},
        pages=PageNumber(size=1_000, total_path="data.total"),
        format=Json("data.items"),
    )


async def test_ecb_rates_of_a_year_come_by_pages_and_keep_their_digits(source_app):
    found = records(await walk(ecb(source_app), between(1999, 2000)))
    assert len(found) == 6_993
    assert len({record["date"] for record in found}) == 259
    assert all(isinstance(record["rate"], (Decimal, int)) for record in found)
    rates = {(r["date"], r["currency"]): r["rate"] for r in records(await walk(ecb(source_app), between(2008, 2009)))}
    assert rates["2008-07-15", "USD"] == Decimal("1.599")


async def test_a_correction_is_served(source_app):
    source_app.corrections["1999-01-04", "USD"] = "9.9"
    found = records(await walk(ecb(source_app, **{"as": "text"}), between(1999, 2000)))
    assert {(r["date"], r["currency"]): r["rate"] for r in found}["1999-01-04", "USD"] == "9.9"


async def test_ecb_rates_are_217_555_in_all_and_dollars_add_up(source_app):
    found = records(await walk(ecb(source_app), between(1999, 2027)))
    assert len(found) == 217_555
    dollars = [record["rate"] for record in found if record["currency"] == "USD"]
    assert (len(dollars), sum(dollars)) == (6_983, Decimal("8255.1995"))
    assert len(source_app.requests) == 218
    assert source_app.most_at_once() == 1


async def test_the_ecb_s_own_archive_is_read_wide_with_its_nameless_column_left_out(data):
    source = Files(data / "ecb-fx" / "eurofxref-hist.zip", format=Zip(Csv()))
    [page] = await walk(source)
    assert (len(page.records), page.broken) == (6_983, [])
    assert len(page.records[0]) == 42 + 1
    rates = [value for row in page.records for name, value in row.items() if name not in {"Date", "source_file"}]
    assert len(rates) - rates.count("N/A") == 217_555
    assert rates.count("N/A") == 68_748


async def test_cbr_rates_are_34_a_day_from_xml_in_windows_1251(source_app):
    source = Http(
        source_app.url,
        endpoint="/cbr/daily",
        params=lambda window: {"date": f"{window.start:%Y-%m-%d}"},
        format=Xml("Valute", inherit=["Date"]),
    )
    sums = {}
    for day in (
        datetime(2020, 4, 25, tzinfo=UTC),
        datetime(2022, 3, 15, tzinfo=UTC),
        datetime(2022, 7, 23, tzinfo=UTC),
    ):
        found = records(await walk(source, Window(day, None)))
        assert len(found) == 34
        assert {record["Date"] for record in found} == {f"{day:%d.%m.%Y}"}
        sums[f"{day:%Y-%m-%d}"] = sum(Decimal(record["Value"].replace(",", ".")) for record in found)
    assert sums == {
        "2020-04-25": Decimal("1693.8317"),
        "2022-03-15": Decimal("1993.7022"),
        "2022-07-23": Decimal("1446.5742"),
    }
    [hongkong] = [record for record in found if record["CharCode"] == "HKD"]
    assert (hongkong["Nominal"], hongkong["Value"], hongkong["NumCode"]) == ("10", "73,2411", "344")
    assert hongkong["Name"] == "Гонконгских долларов"


async def test_the_factbook_has_261_countries_in_six_pages_and_a_document_for_each(source_app):
    listing = Http(
        source_app.url,
        endpoint="/factbook/2025-01-22/countries",
        pages=PageNumber(size=50, total_path="total"),
        format=Json("items"),
    )
    codes = [record["code"] for record in records(await walk(listing))]
    assert (len(codes), len(set(codes))) == (261, 261)
    assert len(source_app.asked("countries")) == 6
    detail = Http(source_app.url)
    page = read(detail, await ask(detail, Request(endpoint="/factbook/2025-01-22/countries/gm", key="gm")))
    [germany] = page.records
    assert "84,119,100" in str(germany["People and Society"]["Population"])


async def test_details_can_fail_for_some_codes(source_app):
    some = ["gm", "fr", "ao", "ch", "us"]
    source_app.misbehave(f"countries/({'|'.join(some)})$", times=None, status=404)
    source_app.misbehave("countries/uv$", status=500)
    codes = [country["code"] for country in countries("2025-01-22")[::10]]
    source, failed = Http(source_app.url), {}
    with trio.fail_after(60):
        async with source.open() as connection:
            for code in [*codes, *some, "uv", "uv"]:
                try:
                    request = Request(endpoint=f"/factbook/2025-01-22/countries/{code}", key=code)
                    await connection.fetch(request, timeout_s=30)
                except SourceError as error:
                    failed[code] = error.status
    assert failed == dict.fromkeys(some, 404) | {"uv": 500}
    assert len(source_app.asked("countries/uv")) == 2


async def test_sp500_snapshots_name_their_dirty_rows(data):
    source = Files(
        data / "sp500-scd" / "constituents-snapshots.tar.xz",
        members="*.csv",
        format=Csv(),
        window_of=r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)\.csv",
    )
    assert len(await requests(source)) == 186
    pages = await walk(source, Window(None, datetime(2014, 2, 1, tzinfo=UTC)))
    dirty = [one for one in broken(pages) if one.error == "4 cells, not 3"]
    assert [one.sample.partition(",")[0] for one in dirty] == ["DHR", "POM", "WPO"]
    dirty = [one for one in broken(pages) if one.error == "2 cells, not 3"]
    assert [one.sample.partition(",")[0] for one in dirty] == ["LYB"] * 5
    assert len(broken(pages)) == 8
    assert all(re.fullmatch(r"line \d+", one.key) for one in dirty)
    [page] = await walk(source, Window(datetime(2023, 4, 13, tzinfo=UTC), datetime(2023, 4, 14, tzinfo=UTC)))
    assert (len(page.records), sum(int(record["CIK"]) for record in page.records)) == (503, 400_484_440)


async def test_a_snapshot_is_also_read_by_http(source_app):
    source = Http(source_app.url, endpoint="/sp500/2026-08-08.csv", format=Csv())
    found = records(await walk(source))
    assert (len(found), sum(int(record["CIK"]) for record in found)) == (503, 437_236_779)
    with pytest.raises(SourceError, match="status 404"):
        await walk(attrs.evolve(source, endpoint="/sp500/1999-01-01.csv"))


SSA_COLUMNS = ["name", "sex", "count"]


async def test_a_year_of_names_comes_from_the_archive_and_by_http(source_app, data):
    archive = Files(
        data / "ssa-names" / "ssa-names-1998-2023.tar.xz",
        members="*.txt",
        format=Csv(columns=SSA_COLUMNS),
        window_of=r"yob(?P<year>\d{4})",
    )
    [page] = await walk(archive, between(2010, 2011))
    assert (len(page.records), sum(int(record["count"]) for record in page.records)) == (34_101, 3_695_146)
    assert page.records[0] == {"name": "Isabella", "sex": "F", "count": "22934", "source_file": "yob2010.txt"}
    found = records(await walk(Http(source_app.url, endpoint="/ssa/yob2010.txt", format=Csv(columns=SSA_COLUMNS))))
    assert found == [{name: record[name] for name in SSA_COLUMNS} for record in page.records]


async def test_names_are_840_591_lines_in_26_files(data):
    source = Files(data / "ssa-names" / "ssa-names-1998-2023.tar.xz", members="*.txt", format=Csv(columns=SSA_COLUMNS))
    pages = await walk(source)
    assert len(pages) == 26
    assert broken(pages) == []
    assert sum(len(page.records) for page in pages) == 840_591
    assert sum(int(record["count"]) for page in pages for record in page.records) == 95_485_448


async def test_fred_rates_come_from_a_file_that_is_compressed(data):
    source = Files(data / "fred-fx" / "fred-monthly.csv.xz", format=Compressed(Csv()))
    found = records(await walk(source))
    assert (len(found), found[0]["Country"]) == (17_237, "Australia")
    assert sum(Decimal(record["Exchange rate"]) for record in found) == Decimal("37692167.3406")
