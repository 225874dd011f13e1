"""The examples, run like a reader would run them."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psycopg
import pytest
import trio
import trio_asyncio
from conditions import patience_s, until
from psycopg.types.json import Jsonb
from source_app import Answer, open_source_app

from dataloader.testing import run_task

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCS = EXAMPLES.parent / "docs"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_test():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"tasks", "embedding", "earthquakes", "pages", "payments"}


async def test_the_ten_line_task_counts_and_shows_it():
    outcome = await run_task(load("tasks").tasks, "hello.count", {"to": 3})
    assert outcome.result == {"counted": 3}
    assert outcome.progress == [{"n": 1}, {"n": 2}, {"n": 3}]


async def test_a_supervisor_is_embedded_in_a_trio_program(database):
    with trio.fail_after(patience_s()):
        assert await load("embedding").main(database.dsn) == 6


async def test_a_supervisor_is_embedded_in_a_program_with_its_own_trio_asyncio_loop(database):
    with trio.fail_after(patience_s()):
        async with trio_asyncio.open_loop():
            assert await load("embedding").main(database.dsn) == 6


@pytest.mark.slow
@pytest.mark.requirement("P1")
async def test_the_payment_example_runs_as_the_page_on_processes_shows(database, capsys):
    with trio.fail_after(60):
        assert await load("payments").main(database.dsn) == ["reserved", "paid", "captured"]
    assert capsys.readouterr().out == "reserved\nrefused: 5 is due\nthanks\nreserved, paid, captured\n"
    example = (EXAMPLES / "payments.py").read_text()
    steps = example[example.index("@attrs.frozen") : example.index("\n\nasync def main")].strip()
    assert f"{steps}\n```" in (DOCS / "processes.md").read_text()


@pytest.mark.full
def test_embedding_runs_as_a_script_on_a_separate_database(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "DL_DB_DSN"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / "embedding.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "6 words in 3 jobs\n" in done.stdout
    assert done.stdout.endswith("drained\n")


class _Site(BaseHTTPRequestHandler):
    """A page for each number, each one byte longer than the one before."""

    def do_GET(self):
        body = b"." * int(self.path.removeprefix("/"))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *said):
        """Log nothing."""


@pytest.fixture
def site():
    """Return the address of a site in a thread of this process."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.full
async def test_a_site_is_loaded_by_handlers_of_every_flavour_enqueued_by_sql_alone(database, serve, raw, site):
    service = await serve({"pages": 8}, tasks="pages:tasks", environment={"PYTHONPATH": str(EXAMPLES)})
    with psycopg.connect(database.dsn) as connection:
        args = Jsonb({"url": site, "pages": 100})
        connection.execute("SELECT dl_enqueue('site.load', %s)", [args])

    async def reported():
        return await raw.fetchrow("SELECT status::text, result FROM dl_jobs WHERE task = 'site.report'")

    row = await until(reported, lambda row: row is not None and row["status"] not in {"queued", "running"}, within_s=60)
    assert (row["status"], json.loads(row["result"])) == ("succeeded", {"pages": 100, "bytes": sum(range(100))})
    ended = dict(await raw.fetch("SELECT task, count(*) FROM dl_jobs WHERE status = 'succeeded' GROUP BY task"))
    assert ended == {"site.load": 1, "page.load": 100, "site.report": 1}
    service.signal(signal.SIGTERM)
    assert await service.exit_code(within_s=20) == 0
    assert not [line for line in service.lines if line["level"] in {"warning", "error"}]


def test_the_page_on_tasks_has_the_whole_example_of_the_flavours():
    text = (EXAMPLES / "pages.py").read_text()
    code = text.split('"""\n', 2)[-1].strip()
    assert f"```python\n{code}\n```" in (DOCS / "tasks.md").read_text()


QUAKES = {
    "us1": {"mag": 6.5, "time": 1_767_312_000_000, "place": "near the coast", "felt": 12, "alert": "green"},
    "us2": {"mag": 4.6, "time": 1_767_398_400_000, "place": None, "felt": None, "alert": None},
}


def quakes_of_a_day(seen):
    """Return the answers of the USGS: a day's list, or one quake."""
    features = {
        name: {
            "id": name,
            "properties": {**quake, "products": {"origin": [], "shakemap": []}},
            "geometry": {"coordinates": [1.5, 2.5, 10]},
        }
        for name, quake in QUAKES.items()
    }
    if "eventid" in seen.query:
        return Answer(json.dumps(features[seen.query["eventid"]]).encode())
    start, end = (datetime.fromisoformat(seen.query[name]).timestamp() for name in ("starttime", "endtime"))
    found = [one for one in features.values() if start <= one["properties"]["time"] / 1000 < end]
    return Answer(json.dumps({"features": found}).encode())


@pytest.mark.slow
@pytest.mark.requirement("E6", "E7")
async def test_the_earthquakes_of_a_week_and_the_details_of_the_strong_one(database, raw, monkeypatch):
    await raw.execute((EXAMPLES / "earthquakes.sql").read_text())
    with open_source_app() as usgs:
        usgs.put("/fdsnws/event/1/query", quakes_of_a_day)
        monkeypatch.setenv("USGS_URL", usgs.url)
        asked = {"from": "2026-01-01", "to": "2026-01-08", "pipeline": {"rate_min": 0, "rate_max": 0}}
        outcome = await run_task(load("earthquakes").tasks, "usgs.quakes", asked, dsn=database.dsn)
    assert outcome.status == "succeeded", outcome.error
    assert outcome.result["counts"]["segments"] == 7
    assert (outcome.result["counts"]["details"], outcome.result["counts"]["details_skipped"]) == (1, 1)
    rows = await raw.fetch("SELECT id, at::date::text, magnitude::text, fetched_at IS NOT NULL FROM quake ORDER BY id")
    assert [tuple(row) for row in rows] == [("us1", "2026-01-02", "6.5", True), ("us2", "2026-01-03", "4.6", True)]
    shaking = await raw.fetchrow("SELECT * FROM quake_shaking")
    assert tuple(shaking) == ("us1", 12, "green", ["origin", "shakemap"])
