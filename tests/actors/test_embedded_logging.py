"""A library is silent by default: log lines of ours that an embedding program receives, and by which way (Q16)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.requirement("Q16")]

PROGRAM = """
import logging, sys, urllib.request
import structlog, trio
from dataloader import Settings, Tasks, Worker, configure_logging, open_supervisor

tasks = Tasks()

@tasks.task("fail", max_attempts=1)
async def fail(job):
    raise ValueError("password=s3cr3t")

async def main():
    settings = Settings(db_dsn=sys.argv[1], workers=(Worker("q", 2),), port=0)
    async with open_supervisor(settings, tasks, with_web=True) as supervisor:
        job = await supervisor.jobs.enqueue("fail", queue="q")
        assert (await supervisor.jobs.wait(job.job_id)).status == "failed"
        for path in ("health", "api/v1/jobs", "nowhere"):
            await trio.to_thread.run_sync(ask, f"{supervisor.url}/{path}")

def ask(url):
    try:
        urllib.request.urlopen(url, timeout=30)
    except urllib.error.HTTPError:
        pass

%s
trio.run(main)
print("the host's own line", structlog.is_configured())
# It changes asyncio for the whole process: only where a task is asyncio's.
assert "trio_asyncio" not in sys.modules
"""


@pytest.fixture
def run_program(database):
    """Return a function that runs a program with a supervisor, and a line of its own before; it returns the output."""

    def run_program(line=""):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM % line, database.dsn],
            env={name: value for name, value in os.environ.items() if not name.startswith("DL_")},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run_program


def test_a_program_without_a_log_gets_no_lines_and_keeps_its_structlog(run_program):
    assert run_program() == ("the host's own line False\n", "")


def test_a_program_sees_our_lines_by_its_own_logging_with_fields_and_without_secrets(run_program):
    line = "logging.basicConfig(level='INFO', format='%(levelname)s %(name)s %(filename)s %(message)s')"
    said, log = run_program(line)
    assert said == "the host's own line False\n"
    [failed] = [line for line in log.splitlines() if "the job failed" in line]
    assert failed.startswith("WARNING dataloader.actors.runner runner.py the job failed ")
    for field in ("task='fail'", "attempt=1", "next='fail'", "password=***"):
        assert field in failed
    assert "s3cr3t" not in log


def test_the_log_of_serve_is_there_for_the_asking(run_program):
    said, log = run_program("configure_logging('json')")
    assert said == "the host's own line True\n"
    events = {line["event"]: line for line in map(json.loads, log.splitlines())}
    assert events["the job failed"]["task"] == "fail"
    assert events["the job failed"]["logger"] == "dataloader.actors.runner"
    assert "s3cr3t" not in log
