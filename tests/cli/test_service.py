"""`serve` and `config`, and all commands by the HTTP API of a running service."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading

import pytest

TASKS = """
from dataloader.jobs.tasks import Tasks
tasks = Tasks()

@tasks.task("hello")
async def hello(job):
    await job.progress({"greeted": job.args.get("name")})
    return {"said": "hello"}

@tasks.task("fail", queue="own")
async def fail(job):
    raise ValueError("on purpose")
"""
TOKENS = '[{"name": "ops", "role": "admin", "token": "sixteen-characters"}]'
MISSING = "01900000-0000-7000-8000-000000000000"


class Service:
    """A `serve` process, with its log lines so far."""

    def __init__(self, process):
        self.process = process
        self.lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.log = []

    def _read(self):
        for line in self.process.stderr:
            self.lines.put(line)

    def line(self, event):
        """Return the next log line with `event`; wait for it if necessary."""
        while True:
            line = json.loads(self.lines.get(timeout=20))
            self.log.append(line)
            if line["event"] == event:
                return line


@pytest.fixture
def serve(start, tmp_path):
    """Return a function that starts a service on a free port; its tasks are `hello` and `fail`."""
    (tmp_path / "my_tasks.py").write_text(TASKS)

    def serve(*arguments, **settings):
        return Service(start("serve", "--tasks", "my_tasks:tasks", "--port", 0, *arguments, **settings))

    return serve


@pytest.mark.full
@pytest.mark.requirement("Q13")
@pytest.mark.parametrize(("given", "queues"), [({}, {"default": 10, "own": 10}), ({"WORKERS_JSON": "[]"}, {})])
def test_by_default_the_tasks_queues_are_served_and_with_an_empty_list_none(serve, database, given, queues):
    service = serve(DL_DB_DSN=database.dsn, **given)
    assert service.line("serving")["queues"] == queues
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(timeout=30) == 0


@pytest.mark.full
@pytest.mark.requirement("Q15")
@pytest.mark.parametrize("shell", ['exec "$@" 2>&-', "trap '' HUP; exec \"$@\""], ids=["without stderr", "by nohup"])
def test_a_service_without_stderr_runs_and_one_that_is_to_ignore_hangups_does(tmp_path, on_database, database, shell):
    (tmp_path / "my_tasks.py").write_text(TASKS)
    command = [sys.executable, "-m", "dataloader", "serve", "--tasks", "my_tasks:tasks", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DL_", "WORKERS_JSON"))}
    process = subprocess.Popen(
        ["sh", "-c", shell, "sh", *command],
        cwd=tmp_path,
        env=environment | {"DL_DB_DSN": database.dsn},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert (
            '"said":"hello"' in on_database("trigger", "default", "hello", "--wait", "--timeout", 60, "--json").stdout
        )
        if "HUP" in shell:
            process.send_signal(signal.SIGHUP)
            assert '"said":"hello"' in on_database("trigger", "default", "hello", "--wait", "--json").stdout
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait(timeout=20)


@pytest.mark.full
@pytest.mark.requirement("Q15")
def test_serve_starts_an_embedded_database_runs_jobs_and_drains(serve, dataloader):
    service = serve("--workers", '[{"queue": "q", "concurrency": 1}]')
    up = service.line("embedded PostgreSQL started")
    serving = service.line("serving")
    assert serving["queues"] == {"q": 1}
    # Without a proxy: it would also have to be on this machine, and would see the token.
    by_url = ("--url", serving["url"])
    job = dataloader("trigger", "q", "hello", "--wait", "--json", *by_url, http_proxy="http://127.0.0.1:1")
    assert job.returncode == 0, job.stderr
    assert json.loads(job.stdout)["result"] == {"said": "hello"}
    # Without --url, a command uses the running database.
    assert dataloader("jobs", "--json").stdout.count('"status":"succeeded"') == 1
    shell = up["psql"].split()[1:]
    assert dataloader(*shell, "-XAtc", "select count(*) from dl_jobs").stdout == "1\n"
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(timeout=30) == 0


@pytest.mark.full
@pytest.mark.requirement("Q2", "Q3", "Q4")
def test_a_service_answers_every_question_as_the_database_does(serve, on_database, dataloader, database):
    service = serve(DL_DB_DSN=database.dsn, DL_TOKENS=TOKENS)
    url = service.line("serving")["url"]

    def asked(*arguments):
        """Return the answer of a command by the service.

        Its exit code, output and error must equal those by the database.
        """
        by_url = dataloader(*arguments, "--json", "--url", url, DL_TOKEN="sixteen-characters")
        by_database = on_database(*arguments, "--json")
        assert by_url == by_database
        return json.loads(by_url.stdout) if by_url.stdout else None

    def done(*arguments):
        """Run a command by the service; return its answer."""
        result = dataloader(*arguments, "--json", "--url", url, DL_TOKEN="sixteen-characters")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    job_id = done("trigger", "a/b ü", "t", "--args", '{"password": "x", "n": 1}', "--available-at", "1h")["job_id"]
    other = done("trigger", "q", "t", "--idempotency-key", "k", "--lock-key", "l")
    assert done("trigger", "q", "t", "--idempotency-key", "k", "--lock-key", "l") == other | {
        "created": False,
        "did": "again",
    }
    refused = dataloader("trigger", "q", "u", "--idempotency-key", "k", "--url", url, DL_TOKEN="sixteen-characters")
    assert (refused.returncode, "idempotency_key 'k' belongs to" in refused.stderr) == (1, True)
    twice = [done("trigger", "q", "t", "--idempotency-key", "without-lock")["job_id"] for _ in range(2)]
    assert twice[0] == twice[1]

    assert asked("status", job_id)["args"] == {"password": "***", "n": 1}
    assert len(asked("jobs")["jobs"]) == 3
    page = asked("jobs", "--limit", 1)
    assert asked("jobs", "--limit", 1, "--after", page["next"])["jobs"][0]["job_id"] == other["job_id"]
    filters = ("--queue", "q", "--task", "t", "--status", "queued", "--status", "failed", "--lock-key", "l", "--since")
    assert [job["job_id"] for job in asked("jobs", *filters, "2020-01-01T00:00:00+02:00")["jobs"]] == [other["job_id"]]
    assert asked("jobs", "--until", "2020-01-01T00:00:00Z") == {"jobs": [], "next": None}

    assert done("cancel", job_id)[0]["status"] == "canceled"
    assert done("retry", job_id)[0]["status"] == "queued"
    assert [event["kind"] for event in asked("events", job_id)] == ["queued", "canceled", "requeue"]
    database.psql(
        f"insert into dl_job_events (job_id, queue, kind, payload) values ('{job_id}', 'a/b ü', 'log',"
        """ '{"level": "info", "message": "password=x", "fields": {"rows": 3}}')"""
    )
    assert [(line["kind"], line["message"]) for line in asked("logs", job_id, "--level", "info")["lines"]] == [
        ("canceled", "the job was canceled"),
        ("requeue", "an operator queued the job again"),
        ("log", "password=***"),
    ]
    assert done("cancel", "--all", "--queue", "q", "--yes") == {"changed": 2}
    assert done("retry", "--all", "--queue", "q", "--yes") == {"changed": 2}
    assert done("pause", "a/b ü")["paused"]
    assert [(q["queue"], q["paused"]) for q in asked("queues")] == [
        ("a/b ü", True),
        ("default", False),
        ("own", False),
        ("q", False),
    ]
    done("resume", "a/b ü")
    assert [entry["actor"] for entry in asked("audit", "--limit", 2)] == ["ops", "ops"]
    assert len(asked("audit", "--before", 3)) == 2
    assert len(asked("workers")) == 1

    for command in ("status", "cancel", "retry", "events", "logs"):
        result = dataloader(command, MISSING, "--url", url, DL_TOKEN="sixteen-characters")
        assert (result.returncode, result.stderr) == (4, f"no job has the ID {MISSING}\n")
    queued = dataloader("retry", job_id, "--url", url, DL_TOKEN="sixteen-characters")
    assert (queued.returncode, "is queued" in queued.stderr) == (1, True)
    # A rejected one does not prevent the others, which are reported.
    done("cancel", other["job_id"])
    several = dataloader(
        "retry", job_id, MISSING, other["job_id"], "--json", "--url", url, DL_TOKEN="sixteen-characters"
    )
    assert (several.returncode, "is queued" in several.stderr) == (4, True)
    assert several.stderr.endswith(f"\nno job has the ID {MISSING}\n")
    assert [job["job_id"] for job in json.loads(several.stdout)] == [other["job_id"]]
    assert dataloader("jobs", "--after", "x", "--url", url, DL_TOKEN="sixteen-characters").returncode == 2
    missing = dataloader("queues", "--url", url)
    assert (missing.returncode, missing.stderr) == (
        2, f"DL_TOKEN: is required by {url}; set DL_TOKEN, or pass --token\n"
    )  # fmt: skip
    wrong = dataloader("queues", "--url", url, "--token", "wrong-wrong-wrong")
    assert (wrong.returncode, wrong.stderr.startswith("--token: ")) == (2, True)
    assert "wrong-wrong" not in wrong.stderr
    wrong = dataloader("queues", "--url", url, DL_TOKEN="wrong-wrong-wrong")
    assert (wrong.returncode, wrong.stderr.startswith("DL_TOKEN: rejected by ")) == (2, True)
    database.psql(
        "insert into dl_workers (worker, host, pid, version, queues) values ('w', 'h', 7, '1', '{\"token=hush\": 2}')"
    )
    for name, warning in (("token=hush", ""), ("nobody", "no worker serves the queue 'nobody'")):
        paused = dataloader("pause", name, "--url", url, DL_TOKEN="sixteen-characters")
        assert (paused.returncode, paused.stderr.partition(";")[0]) == (0, warning)


@pytest.mark.full
@pytest.mark.requirement("Q9")
def test_wait_by_the_service_reports_a_failed_job(serve, dataloader, database):
    service = serve("--workers", '[{"queue": "q", "concurrency": 1}]', DL_DB_DSN=database.dsn)
    url = service.line("serving")["url"]
    result = dataloader("trigger", "q", "fail", "--max-attempts", 1, "--wait", "--url", url)
    assert result.returncode == 3
    assert "ValueError: on purpose" in result.stdout


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_line(start, database):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        service = start("serve", "--port", taken.getsockname()[1], "--log-level", "critical", DL_DB_DSN=database.dsn)
        _, stderr = service.communicate(timeout=30)
    assert service.returncode == 1
    assert "Address already in use" in stderr
    assert "Traceback" not in stderr


def test_queues_without_tasks_are_refused(dataloader):
    result = dataloader("serve", WORKERS_JSON='[{"queue": "q", "concurrency": 1}]')
    assert (result.returncode, result.stderr.startswith("--tasks: is required")) == (2, True)


@pytest.mark.requirement("Q13", "Q16")
def test_config_shows_each_setting_where_it_came_from_and_no_secret(dataloader, tmp_path):
    (tmp_path / ".env").write_text("DL_PORT=1\nDL_POLL_SEC=2\n")
    result = dataloader("config", "--json", DL_PORT="3", DL_DB_DSN="postgresql://u:sesame@h/d", DL_TOKENS=TOKENS)
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert (rows["DL_PORT"]["value"], rows["DL_PORT"]["source"]) == ("3", "environment")
    assert (rows["DL_POLL_SEC"]["value"], rows["DL_POLL_SEC"]["source"]) == ("2", ".env")
    assert rows["DL_HOST"]["source"] == "default"
    for form in ("--json", None):
        shown = dataloader("config", *filter(None, [form]), DL_DB_DSN="postgresql://u:sesame@h/d", DL_TOKENS=TOKENS)
        assert "sesame" not in shown.stdout
        assert "sixteen-characters" not in shown.stdout


def test_config_warns_of_a_variable_that_nothing_reads(dataloader):
    result = dataloader("config", DL_PROT="8080", DL_TOKEN="x")
    assert result.returncode == 0
    assert "DL_PROT (environment) is not a setting" in result.stderr
    assert "DL_TOKEN " not in result.stderr
