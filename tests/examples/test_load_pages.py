"""The programs of docs/loads: the commands below them make their tables and files, and each load runs."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import sqlite3
import subprocess
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio
from conditions import patience_s
from source_app import Answer, open_source_app

from dataloader import Settings, Worker, open_supervisor
from dataloader.testing import run_task

pytestmark = pytest.mark.slow

PAGES = Path(__file__).parents[2] / "docs" / "loads"
QUICK = {"pipeline": {"rate_min": 0, "rate_max": 0}}


@attrs.frozen
class Shown:
    """Program of a page, executed, and the commands below it, which run on a test's database."""

    names: dict
    commands: list
    database: object

    @classmethod
    def of(cls, page, database, *, changed=lambda program: program):
        text = (PAGES / f"{page}.md").read_text()
        names = {}
        exec(compile(changed(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]), page, "exec"), names)
        lines = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)[0].splitlines()
        return cls(names, [shlex.split(line, comments=True) for line in lines], database)

    async def run(self, args=None):
        """Run the commands in order. Return the runs of loads and flows, and the rows that `psql` has shown."""
        runs, rows = [], []
        for command in self.commands:
            match command:
                case ["dataloader", "psql", "-c", statement]:
                    rows += self.database.psql(statement).splitlines()
                case ["dataloader", "etl", "run" | "flow", name, *_]:
                    runs.append(await run_task(self.names["tasks"], name, args or QUICK, dsn=self.database.dsn))
                case ["dataloader", "etl", "retry", name, *_]:
                    args = {"failures": "all"}
                    runs.append(await run_task(self.names["tasks"], name, args, dsn=self.database.dsn))
                case ["dataloader", *_]:
                    pass  # migrate, plan, and lists
                case _:
                    run = partial(subprocess.run, ["sh", "-c", _line(command)], check=True, timeout=10)
                    await trio.to_thread.run_sync(run)
        assert [run.error for run in runs] == [None] * len(runs)
        return runs, rows


def _line(command):
    """Return a line for a shell, whose `>` is no word."""
    return " ".join(word if word == ">" else shlex.quote(word) for word in command)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def supplier():
    with open_source_app() as app:
        yield app


def test_each_page_begins_with_a_program():
    pages = {path.stem for path in PAGES.glob("*.md")} - {"reference"}
    begun = {page for page in pages if "```python\n" in (PAGES / f"{page}.md").read_text()[:700]}
    assert begun == pages
    tested = set(re.findall(r'(?:Shown\.of|PAGES /) ?\(?"(\w+)', Path(__file__).read_text()))
    assert pages <= tested


@pytest.mark.requirement("E6", "E8", "E12")
async def test_the_first_load_runs_up_to_now(database, raw, supplier):
    just_now = time.time()

    def quakes(seen):
        start, end = (datetime.fromisoformat(seen.query[name]).timestamp() for name in ("starttime", "endtime"))
        quake = {"id": "us3", "properties": {"mag": 5, "place": "here"}}
        return Answer(json.dumps({"features": [quake] if start <= just_now < end else []}).encode())

    supplier.put("/fdsnws/event/1/query", quakes)
    shown = Shown.of("index", database, changed=lambda text: text.replace("https://earthquake.usgs.gov", supplier.url))
    since = datetime.now(UTC).date() - timedelta(days=1)
    await shown.run({"from": str(since), **QUICK})
    assert tuple(await raw.fetchrow("SELECT * FROM quake")) == ("us3", 5, "here")


async def test_a_table_takes_rows_with_their_types_and_keeps_other_fields(database, raw, folder):
    shown = Shown.of("tables", database)
    await shown.run()
    row = await raw.fetchrow("SELECT name, hired::text, payload::text, source_file, fetched_at IS NULL FROM person")
    assert tuple(row) == ("Ada", "2026-01-31", '{"shoes": 39}', "people.jsonl", False)
    (folder / "people.jsonl").write_text('{"id": 2, "name": "Bob"}\n')
    await run_task(shown.names["tasks"], "hr.people", dsn=database.dsn)
    assert await raw.fetch("SELECT id, left_at IS NULL FROM person ORDER BY id") == [(1, False), (2, True)]


async def test_an_incremental_run_begins_at_the_watermark_minus_the_look_back(database, raw, supplier, monkeypatch):
    monkeypatch.setenv("SHOP_URL", supplier.url)
    supplier.put("/orders", Answer(b'{"orders": [{"id": 1, "total": "9.50"}]}'))
    shown = Shown.of("incremental", database)
    await shown.run({"to": "2026-03-01", **QUICK})
    args = {"to": "2026-03-04", **QUICK}
    run = await run_task(shown.names["tasks"], "shop.orders", args, dsn=database.dsn)
    assert (run.status, run.error) == ("succeeded", None)
    begins = [seen.query["changed_from"] for seen in supplier.requests]
    days = ["2026-01-01", "2026-02-01", "2026-02-26", "2026-03-01"]
    assert begins == [f"{day}T00:00:00+01:00" for day in days]
    assert await raw.fetch("SELECT id, total::text FROM shop_order") == [(1, "9.50")]


async def test_pages_of_an_interface_and_compressed_files_are_read(database, raw, supplier, folder, monkeypatch):
    monkeypatch.setenv("CRM_URL", supplier.url)
    monkeypatch.setenv("CRM_TOKEN", "a token")

    def customers(seen):
        assert seen.headers.get("Authorization", seen.headers.get("authorization")) == "Bearer a token"
        number, following = (2, None) if seen.query.get("after") == "p2" else (1, "p2")
        found = {"customers": [{"id": number, "name": "Ann"}], "next": following}
        return Answer(json.dumps(found).encode())

    supplier.put("/customers", customers)
    (folder / "inbox").mkdir()
    (folder / "inbox" / "sales-2026-01-01.csv.gz").write_bytes(gzip.compress(b"day,shop,amount\n2026-01-01,north,5\n"))
    await Shown.of("sources", database).run()
    assert await raw.fetchval("SELECT array_agg(id ORDER BY id) FROM customer") == [1, 2]
    row = await raw.fetchrow("SELECT day::text, shop, amount, source_file FROM sale")
    assert tuple(row) == ("2026-01-01", "north", 5, "sales-2026-01-01.csv.gz")


async def test_a_function_yields_the_rows_that_have_changed_since_the_last_run(database, raw):
    shown = Shown.of("rows", database)
    _, rows = await shown.run()
    assert sorted(rows) == ["1|9.5", "2|4"]
    with sqlite3.connect("shop.db") as shop:
        shop.execute("INSERT INTO orders VALUES (3, 1, 3)")
    again = await run_task(shown.names["tasks"], "shop.orders", dsn=database.dsn)
    assert (again.result["counts"]["records"], again.result["counts"]["inserted"]) == (1, 1)


async def test_versions_of_rows_are_kept_and_a_dimension_follows_in_the_flow(database, raw):
    _, rows = await Shown.of("destinations", database).run()
    assert sorted(row for row in rows if row.endswith(("|t", "|f"))) == [
        "1|0.10|2026-01-01|2026-01-02|f",
        "1|0.15|2026-01-02||t",
        "2|0.20|2026-01-01|2026-01-02|f",
    ]
    assert await raw.fetch("SELECT sku, price::text FROM product") == [(1, "0.15")]


async def test_a_load_takes_units_of_its_supplier(database, supplier, monkeypatch):
    monkeypatch.setenv("STOCK_URL", supplier.url)
    supplier.put("/levels", Answer(b'{"levels": [{"sku": 1, "pieces": 7}]}'))
    shown = Shown.of("politeness", database)
    for command in shown.commands:
        if command[:2] == ["dataloader", "psql"]:
            database.psql(command[-1])
    settings = Settings(db_dsn=database.dsn, workers=(Worker("default", 1),))
    async with open_supervisor(settings, shown.names["tasks"]) as supervisor:
        added = await supervisor.jobs.enqueue("stock.levels", QUICK)
        with trio.fail_after(patience_s()):
            run = await supervisor.jobs.wait(added.job_id)
        assert (run.status, run.error) == ("succeeded", None)
        [limit] = (await supervisor.limits.supplier("stock")).rate_limits
    assert (limit.used, limit.left) == (1, 9_999)


async def test_a_failed_record_is_recorded_and_its_retry_writes_it(database, raw):
    runs, _ = await Shown.of("failures", database).run()
    assert [run.result["status"] for run in runs] == ["succeeded_with_failures", "succeeded"]
    assert await raw.fetch("SELECT sku, price::text FROM product ORDER BY sku") == [(1, "0.10"), (2, "0.20")]
    assert await raw.fetchval("SELECT count(*) FROM dl_etl_failures WHERE solved_at IS NULL") == 0


async def test_a_program_shows_the_progress_of_a_run(database, monkeypatch, capsys):
    shown = Shown.of("tables", database)
    shown.commands[:] = [one for one in shown.commands if one[:2] != ["dataloader", "etl"]]
    await shown.run()
    program = re.findall(r"```python\n(.*?)```", (PAGES / "observing.md").read_text(), re.DOTALL)[0]
    names = {}
    exec(compile(program.replace("\ntrio.run(main)\n", ""), "observing", "exec"), names)
    monkeypatch.setenv("DL_DB_DSN", database.dsn)
    settings = Settings(db_dsn=database.dsn, workers=(Worker("default", 1),))
    async with open_supervisor(settings, shown.names["tasks"]):
        with trio.fail_after(patience_s()):
            await names["main"]()
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("succeeded {")
    assert "'inserted': 1" in said[-1]
