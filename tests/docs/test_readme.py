"""The README's first task, pasted and run: the output is the same as shown."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
START_S = 60


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_first_task_is_the_example():
    code, _transaction = blocks("python")
    assert code == (ROOT / "examples" / "tasks.py").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.fixture
def short_path():
    """Return a folder in which the address of an embedded server is as the page says: sockets' paths are limited."""
    with TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.full
@pytest.mark.requirement("Q2")
def test_the_first_task_works_when_pasted(short_path):
    """Serve, trigger, result: the README's own commands, on a free port."""
    serve, trigger = (shlex.split(block) for block in blocks("sh") if block.startswith("dataloader"))
    code, transaction = blocks("python")
    assert "save this as `my_tasks.py`" in README
    (short_path / "my_tasks.py").write_text(code)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert trigger[-2] == "http://127.0.0.1:8080", "the default port"
    trigger[-2] = f"http://127.0.0.1:{port}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DL_", "WORKERS_JSON"))}
    program = [sys.executable, "-m", "dataloader"]
    with (short_path / "log").open("w+") as log:
        service = subprocess.Popen(
            [*program, *serve[1:]], cwd=short_path, env=environment | {"DL_PORT": str(port)}, stderr=log
        )
        try:
            wait_until(lambda: '"event":"serving"' in (short_path / "log").read_text(), service)
            triggered = subprocess.run(
                [*program, *trigger[1:]], cwd=short_path, env=environment, capture_output=True, text=True, timeout=60,
                check=False,
            )  # fmt: skip
            assert triggered.returncode == 0, triggered.stderr
            assert columns(triggered.stdout) >= columns(blocks("text")[0])
            shown = dict(line.split(None, 1) for line in triggered.stdout.splitlines())
            assert (shown["status"], json.loads(shown["result"])) == ("succeeded", {"counted": 3})
            assert counted_by_a_transaction(short_path, transaction) == {"counted": 7}
            service.send_signal(signal.SIGTERM)
            assert service.wait(60) == 0
        finally:
            service.kill()
            service.wait()


def counted_by_a_transaction(folder, snippet):
    """Run the snippet on the service's embedded server; return the result of the job that it has enqueued."""
    server = folder / ".dataloader"
    password = (server / "postgres.password").read_text().strip()
    dsn = f"postgresql://postgres:{password}@/dataloader?host={server}/postgres-18"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (number int)")
        imports = "import os\nimport psycopg\nfrom psycopg.types.json import Jsonb\n"
        subprocess.run([sys.executable, "-c", imports + snippet], env={"DATABASE_URL": dsn}, check=True, timeout=60)
        assert connection.execute("SELECT number FROM orders").fetchall() == [(7,)]
        job = "SELECT result FROM dl_jobs WHERE args = '{\"to\": 7}' AND status = 'succeeded'"
        deadline = time.monotonic() + START_S
        while (row := connection.execute(job).fetchone()) is None:
            assert time.monotonic() < deadline, "the job does not succeed"
            time.sleep(0.05)
        return row[0]


def wait_until(condition, service):
    deadline = time.monotonic() + START_S
    while not condition():
        assert service.poll() is None, "the service has ended"
        assert time.monotonic() < deadline, "the service does not start"
        time.sleep(0.05)


def columns(text: str) -> set[str]:
    """Return the names of the fields, each with the space before its value."""
    return {line[: re.match(r"\S+ *", line).end()] for line in text.splitlines() if line != "…"}
