"""Real data through whole loads, over real sockets, compared with known figures (E2, E3, E6, E7, E8)."""

from __future__ import annotations

import json
import resource
import signal
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import attrs
import pytest
import trio
from conditions import until
from etl_tasks import names_load
from services import FAST, LEASE_S

from dataloader import Tasks
from dataloader.flows.etl import Detail, History, Load, Table, Windows, add_loads
from dataloader.flows.etl.formats.csv_format import Csv
from dataloader.flows.etl.formats.json_format import Json
from dataloader.flows.etl.formats.xml_format import Xml
from dataloader.flows.etl.sources.files import Files
from dataloader.flows.etl.sources.http import Http
from dataloader.flows.etl.sources.pagination import PageNumber
from dataloader.flows.etl.sources.source import Request
from dataloader.testing import run_task

pytestmark = pytest.mark.full

AT_ONCE = {"rate_min": 0, "rate_max": 0}


@pytest.fixture
def names_archive(data):
    """Return the path of the names' archive."""
    return str(data / "ssa-names" / "ssa-names-1998-2023.tar.xz")


@pytest.fixture
def run(database):
    """Return a function that runs a load once like a worker, and returns its counts."""

    async def run(load, **args):
        tasks = Tasks()
        add_loads(tasks, load)
        outcome = await run_task(tasks, load.name, args, dsn=database.dsn)
        assert outcome.status == "succeeded", outcome.error
        return outcome.result["counts"]

    return run


def span(window):
    return {"from": f"{window.start:%Y-%m-%d}", "to": f"{window.end:%Y-%m-%d}"}


def rates(url):
    return Load(
        "ecb.rates",
        Http(url, endpoint="/ecb/rates", params=span, pages=PageNumber(size=1000), format=Json("data.items")),
        Table("ecb_rate", key=("day", "currency")),
        windows=Windows(start=date(1999, 1, 1), column="day"),
        transform=lambda rate: {"day": rate["date"], "currency": rate["currency"], "rate": rate["rate"]},
        pipeline={**AT_ONCE, "batch_size": 1000},
    )


@pytest.mark.requirement("E6")
async def test_all_rates_of_the_ecb_by_month_windows_and_nothing_when_they_come_again(run, raw, source_app):
    await raw.execute("CREATE TABLE ecb_rate (day date, currency text, rate numeric, PRIMARY KEY (day, currency))")
    counts = await run(rates(source_app.url), to="2026-05-01")
    assert (counts["inserted"], counts["segments"], counts["records"]) == (217_555, 328, 217_555)
    assert await raw.fetchval("SELECT sum(rate) FROM ecb_rate WHERE currency = 'USD'") == Decimal("8255.1995")
    assert await raw.fetchval("SELECT count(*) FROM ecb_rate WHERE day >= '2020-01-01' AND day < '2021-01-01'") == 8_224
    assert source_app.most_at_once() == 1
    cursor = await raw.fetchval("SELECT (state ->> 'upto')::timestamptz FROM dl_load_state WHERE load = 'ecb.rates'")
    assert cursor == datetime(2026, 5, 1, tzinfo=UTC)

    year = {"from": "2008-01-01", "to": "2009-01-01"}
    again = await run(rates(source_app.url), **year)
    assert {"inserted", "updated", "deleted"} & again.keys() == set()
    assert again["unchanged"] == again["records"] > 8_000

    source_app.corrections["2008-07-15", "USD"] = "1.6"
    corrected = await run(rates(source_app.url), **year)
    assert (corrected["updated"], corrected["unchanged"]) == (1, again["records"] - 1)
    usd = "SELECT rate FROM ecb_rate WHERE day = '2008-07-15' AND currency = 'USD'"
    assert await raw.fetchval(usd) == Decimal("1.6")
    # Neither run was for new data.
    assert (
        await raw.fetchval("SELECT (state ->> 'upto')::timestamptz FROM dl_load_state WHERE load = 'ecb.rates'")
        == cursor
    )


@pytest.mark.requirement("E8")
async def test_names_and_nominals_of_the_bank_of_russia_have_49_versions(run, raw, source_app):
    await raw.execute("""
        CREATE TABLE currency (id text, nominal int, name text, valid_from date NOT NULL, valid_to date,
          is_current boolean NOT NULL, PRIMARY KEY (id, valid_from));
        CREATE TABLE cbr_rate (day date, id text, code text, num_code text, rate numeric, PRIMARY KEY (day, id))""")

    def load(name, transform, table):
        return Load(
            name,
            Http(
                source_app.url,
                endpoint="/cbr/daily",
                params=lambda window: {"date": f"{window.start:%Y-%m-%d}"},
                format=Xml(item="Valute"),
            ),
            table,
            windows=Windows(start=date(2020, 1, 1), segment="day"),
            transform=transform,
            pipeline=AT_ONCE,
        )

    days = ["2020-04-25", "2022-03-15", "2022-07-23"]
    sums = {}
    for day in days:
        following = f"{day[:-2]}{int(day[-2:]) + 1}"
        snapshot = load(
            "cbr.currencies",
            lambda valute: {"id": valute["ID"], "nominal": valute["Nominal"], "name": valute["Name"]},
            Table("currency", key="id", history=History(tracked=("nominal", "name"))),
        )
        await run(snapshot, **{"from": day, "to": following})

        def rate(valute, day=day):
            value = Decimal(valute["Value"].replace(",", "."))
            row = {"day": day, "id": valute["ID"], "code": valute["CharCode"], "num_code": valute["NumCode"]}
            return {**row, "rate": value / Decimal(valute["Nominal"])}

        await run(load("cbr.rates", rate, Table("cbr_rate", key=("day", "id"))), **{"from": day, "to": following})
        sums[day] = await raw.fetchval(
            "SELECT round(sum(rate), 8) FROM cbr_rate WHERE day = $1", date.fromisoformat(day)
        )
    assert await raw.fetchval("SELECT count(*) FROM currency") == 49
    assert await raw.fetchval("SELECT count(*) FROM currency WHERE is_current AND valid_to IS NULL") == 34
    assert [str(sums[day]) for day in days] == ["842.53780082", "1330.66119210", "637.95217677"]
    assert await raw.fetchval("SELECT DISTINCT num_code FROM cbr_rate WHERE code = 'AUD'") == "036"


def countries(url, day, **pipeline):
    return Load(
        "factbook.countries",
        Http(url, endpoint=f"/factbook/{day}/countries", pages=PageNumber(size=50), format=Json("items")),
        Table("country", key="code"),
        detail=Detail(
            id=lambda country: country["code"],
            request=lambda code: Request(endpoint=f"/factbook/{day}/countries/{code}"),
            source=Http(url, format=Json()),
            transform=lambda code, document: {"code": code, "document": document},
            table=Table("profile", key="code"),
        ),
        pipeline={**AT_ONCE, "attempts": 1, **pipeline},
    )


PROFILES = """
CREATE TABLE country (code text PRIMARY KEY, region text NOT NULL);
CREATE TABLE profile (code text PRIMARY KEY, document jsonb NOT NULL, content_hash text NOT NULL, source_endpoint text);
"""


@pytest.mark.requirement("E7", "E6")
async def test_a_paged_list_with_details_writes_only_the_changes_of_each_snapshot(run, raw, source_app):
    await raw.execute(PROFILES)
    first = await run(countries(source_app.url, "2025-01-22"))
    assert (first["inserted"], first["details"], first["segments"]) == (261 + 261, 261, 1)
    assert "84,119,100" in await raw.fetchval("SELECT document::text FROM profile WHERE code = 'gm'")
    for day, changed in (("2025-01-23", 4), ("2025-01-30", 41)):
        counts = await run(countries(source_app.url, day))
        assert (counts["updated"], counts["unchanged"]) == (changed, 261 + 261 - changed)
        assert "inserted" not in counts
    assert len(source_app.asked("countries\\?")) == 3 * 6
    assert await raw.fetchval("SELECT count(*) FROM country") == 261
    assert source_app.most_at_once() == 1


@pytest.mark.requirement("E7", "E9", "E10")
async def test_details_that_fail_are_counted_and_named_and_can_be_tried_again_alone(run, raw, source_app):
    await raw.execute(PROFILES)
    broken = ("aa", "ag", "ee", "gm", "us")
    for code in broken:
        source_app.misbehave(f"/countries/{code}$", times=None, status=404 if code < "c" else 500)
    counts = await run(countries(source_app.url, "2025-01-22", max_failed_share=0.02))
    assert (counts["details"], counts["details_failed"]) == (256, 5)
    failures = await raw.fetch("SELECT phase, key, error FROM dl_etl_failures WHERE solved_at IS NULL ORDER BY key")
    assert [(failure["phase"], failure["key"]) for failure in failures] == [("detail", code) for code in broken]
    assert "404" in failures[0]["error"]
    assert await raw.fetchval("SELECT count(*) FROM profile") == 256

    asked = len(source_app.requests)
    source_app.behave()
    again = await run(countries(source_app.url, "2025-01-22"), failures="all")
    assert (again["details"], again["inserted"]) == (5, 5)
    assert sorted(seen.path[-2:] for seen in source_app.requests[asked:]) == list(broken)
    assert await raw.fetchval("SELECT count(*) FROM profile") == 261
    assert await raw.fetchval("SELECT count(*) FROM dl_etl_failures WHERE solved_at IS NULL") == 0


@pytest.mark.requirement("E10")
async def test_eleven_details_that_fail_in_a_row_end_the_run_as_failed(database, raw, source_app):
    await raw.execute(PROFILES)
    source_app.misbehave("/countries/[a-z]+$", times=None, status=500)
    tasks = Tasks()
    add_loads(tasks, countries(source_app.url, "2025-01-22"))
    outcome = await run_task(tasks, "factbook.countries", {}, dsn=database.dsn)
    assert outcome.status == "failed"
    assert outcome.error.startswith("11 consecutive failures (max_failures is 10); the last one was a detail")
    assert outcome.result["status"] == "failed"
    assert outcome.result["counts"]["details_failed"] == len(outcome.result["failures"]) == 11
    assert len(source_app.asked("/countries/[a-z]+$")) == 11
    # The list was written before, but no details.
    assert await raw.fetchval("SELECT count(*) FROM country") == 261
    assert await raw.fetchval("SELECT status FROM dl_etl_runs") == "failed"


@pytest.mark.requirement("E8", "S7")
async def test_the_constituents_of_the_sp500_have_814_versions(run, raw, data):
    await raw.execute("""
        CREATE TABLE constituent (symbol text, name text, sector text, sub_industry text, location text, added text,
          cik text, founded text, valid_from date NOT NULL, valid_to date, is_current boolean NOT NULL,
          PRIMARY KEY (symbol, valid_from))""")
    tracked = ("name", "sector", "sub_industry", "location", "added", "cik", "founded")
    names = ("GICS Sector", "GICS Sub-Industry", "Headquarters Location", "Date added", "CIK", "Founded")

    def constituent(row):
        # The column was called Company for two days.
        found = (row["Symbol"], row.get("Security") or row["Company"], *(row[name] for name in names))
        return dict(zip(("symbol", *tracked), found, strict=True))

    load = Load(
        "sp500",
        Files(
            str(data / "sp500-scd" / "constituents-snapshots.tar.xz"),
            members="*.csv",
            format=Csv(),
            window_of=r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)",
        ),
        Table(
            "constituent",
            key="symbol",
            history=History(tracked=tracked, as_of=lambda segment: date.fromisoformat(segment.name[-14:-4])),
        ),
        windows=Windows(start=date(2023, 4, 13), segment="year"),
        transform=constituent,
    )
    counts = await run(load)
    assert (counts["segments"], counts["closed"], counts["reappeared"]) == (126, 78, 6)
    again = await run(load)
    assert (again["segments"], again["unchanged"], again.get("segments_failed", 0)) == (1, 503, 0)
    versions = await raw.fetchrow("SELECT count(*), count(*) FILTER (WHERE is_current) AS open FROM constituent")
    assert tuple(versions) == (814, 503)
    assert await raw.fetchval("SELECT sum(cik::bigint) FROM constituent WHERE is_current") == 437_236_779


@pytest.mark.requirement("E10", "S7")
async def test_dirty_rows_are_counted_and_named_and_the_rest_is_loaded(run, raw, data):
    await raw.execute("CREATE TABLE old_constituent (symbol text PRIMARY KEY, name text, sector text)")
    load = Load(
        "sp500.dirty",
        Files(str(data / "sp500-scd" / "constituents-snapshots.tar.xz"), members="2012-12-27.csv", format=Csv()),
        Table("old_constituent", key="symbol"),
        transform=lambda row: {"symbol": row["Symbol"], "name": row["Name"], "sector": row["Sector"]},
    )
    counts = await run(load)
    assert counts["records_failed"] == 3
    samples = [row["sample"] for row in await raw.fetch("SELECT sample FROM dl_etl_failures ORDER BY failure_id")]
    assert [sample[:3] for sample in samples] == ["DHR", "POM", "WPO"]
    assert counts["inserted"] == await raw.fetchval("SELECT count(*) FROM old_constituent") == 497


NAMES = "CREATE TABLE name (year int, name text, sex text, count int, PRIMARY KEY (year, name, sex))"
ROWS, CHILDREN, FILES = 840_591, 95_485_448, 26


@pytest.mark.requirement("E3", "S7")
async def test_26_files_of_840_591_names(run, raw, names_archive):
    await raw.execute(NAMES)
    load = names_load(names_archive)
    counts = await run(load)
    assert (counts["inserted"], counts["segments"]) == (ROWS, FILES)
    assert await raw.fetchval("SELECT sum(count) FROM name") == CHILDREN
    again = await run(attrs.evolve(load, source=attrs.evolve(load.source, members="yob2010.txt")))
    assert (again["unchanged"], again.keys() & {"inserted", "updated"}) == (34_101, set())


@pytest.mark.requirement("E3", "E6", "Q10", "S7")
async def test_a_load_resumes_after_a_kill_half_way_and_its_memory_stays_flat(raw, names_archive, serve, add, row_when):
    await raw.execute(NAMES)
    environment = {"NAMES_ARCHIVE": names_archive}

    async def done():
        return await raw.fetchval("SELECT count(*) FROM dl_etl_segments")

    service = await serve(tasks="etl_tasks:tasks", environment=environment, **FAST)
    job_id = await add("names", lease_ttl_sec=LEASE_S)
    at_kill = await until(done, lambda number: number >= FILES // 2, within_s=60)
    service.signal(signal.SIGKILL)
    await service.exit_code(within_s=10)
    assert at_kill < FILES
    before = {row["segment"]: row["xmin"] for row in await raw.fetch("SELECT segment, xmin FROM dl_etl_segments")}

    successor = await serve(tasks="etl_tasks:tasks", environment=environment, **FAST)
    early, late = [], []
    while (now := await done()) < FILES:
        (early if now <= at_kill + 4 else late).append(memory_mib(successor.process.pid))
        await trio.sleep(0.02)
    row = await row_when(job_id, "succeeded", within_s=20)
    assert row["attempt"] == 2
    written = {row["segment"]: row["xmin"] for row in await raw.fetch("SELECT segment, xmin FROM dl_etl_segments")}
    assert len(written) == FILES
    assert written.items() >= before.items()
    assert await raw.fetchval("SELECT count(*) FROM name") == ROWS
    assert await raw.fetchval("SELECT sum(count) FROM name") == CHILDREN
    assert json.loads(row["result"])["counts"].items() >= {"segments": FILES, "inserted": ROWS}.items()
    assert max(late) - max(early) < 20, f"{max(early)} MiB at first, {max(late)} at last"


def memory_mib(pid):
    """Return the memory of a process in MiB."""
    [pages] = Path(f"/proc/{pid}/statm").read_text().split()[1:2]
    return int(pages) * resource.getpagesize() / 2**20
