"""`dataloader etl …`, on real loads: files in the command's directory, and a source over HTTP that counts requests."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import termios
import time
from pathlib import Path

import httpx2
import pytest
from services import Service
from source_app import Answer, open_source_app

from dataloader.cli.etl import etl_command

LOADS = """
import os
from datetime import date
from dataloader import Tasks
from dataloader.flows.etl.flow.flow import Flow, add_flows
from dataloader.flows.etl.declare.load import Load, Table
from dataloader.flows.etl.run.load_task import add_loads
from dataloader.flows.etl.sources.files import Files
from dataloader.flows.etl.formats.csv_format import Csv
from dataloader.flows.etl.formats.json_format import Json
from dataloader.flows.etl.sources.http import Http
from dataloader.flows.etl.declare.windows import Windows
from dataloader.store.etl.history import History

tasks = Tasks()

def person(record):
    return {"id": int(record["id"]), "name": record["name"]}

people = Load(
    name="people",
    source=Files("data/*.csv", format=Csv()),
    transform=person,
    table=Table("people", key="id"),
    pipeline={"max_failed_share": 0.5},
)
days = Load(
    name="days",
    source=Http(
        os.environ.get("SOURCE_URL", "http://127.0.0.1:9"),
        endpoint="/days",
        params=lambda window: {"from": f"{window.start:%Y-%m-%d}"},
        format=Json(),
    ),
    windows=Windows(start=date(2026, 1, 1), segment="day"),
    table=Table("days", key="day"),
    schedule={"cron": os.environ["DAYS_CRON"]} if "DAYS_CRON" in os.environ else None,
)
versions = Load(
    name="versions",
    source=days.source,
    windows=days.windows,
    transform=lambda record: {"id": 1, "rate": record["rate"]},
    table=Table("versions", key="id", history=History(tracked=("rate",), complete=False)),
)
add_loads(tasks, people, days, versions)
add_flows(tasks, Flow(name="nightly", layers={"ods": [people], "dwd": [days]}))

def broken(window):
    return 1 / 0

add_loads(tasks, Load(
    name="broken", source=Http("http://127.0.0.1:9", params=broken), table=Table("days", key="day"),
))

@tasks.task("no load")
async def no_load(job):
    return {"said": "hello"}
"""
TABLES = """
CREATE TABLE people (id int PRIMARY KEY, name text);
CREATE TABLE days (day date PRIMARY KEY, rate int);
CREATE TABLE versions (id int, rate int, valid_from date, valid_to date, is_current boolean NOT NULL)"""
HERE = ("--tasks", "my_loads:tasks")
QUICK = ("--pipeline-rate-min", 0, "--pipeline-rate-max", 0)
THREE_DAYS = ("--from", "2026-01-01", "--to", "2026-01-04")
WAIT_S = 40


@pytest.fixture
def loads(tmp_path, database):
    """Return the module my_loads, three people in two files, one of them broken, and the tables."""
    (tmp_path / "my_loads.py").write_text(LOADS)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("id,name\n1,Ada\nx,Bob\n")
    (tmp_path / "data" / "b.csv").write_text("id,name\n3,Eve\n")
    database.psql(TABLES)


@pytest.fixture
def source():
    """Return a source of one rate per day."""
    with open_source_app() as app:
        app.put("/days", lambda seen: Answer(json.dumps([{"day": seen.query["from"], "rate": 7}]).encode()))
        yield app


@pytest.fixture
def command(start, database, loads):
    """Return a function that starts a command as a process, on the test's database."""

    def command(*arguments, **settings):
        return start(*arguments, **({"DL_DB_DSN": database.dsn} | settings))

    return command


@pytest.fixture
def call(command):
    """Return a function that runs a command as a process to its end, and returns its exit code, stdout and stderr."""

    def call(*arguments, **settings):
        process = command(*arguments, **settings)
        stdout, stderr = process.communicate(timeout=WAIT_S)
        return process.returncode, stdout, stderr

    return call


@pytest.fixture
def serve(command):
    """Return a function that starts a service for the queue `default`, and returns its address."""

    def serve(*arguments, queue="default", **settings):
        workers = json.dumps([{"queue": queue, "concurrency": 2}])
        process = command(
            "serve", *HERE, "--port", 0, "--workers", workers, *arguments, DL_LOG_FORMAT="json", **settings
        )
        service = Service(process)
        wait_until(lambda: any(line["event"] == "serving" for line in service.lines), lambda: service.lines)
        return service.url

    return serve


def wait_until(condition, shown=lambda: ""):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, shown()
        time.sleep(0.02)


@pytest.mark.parametrize("name", list(etl_command.commands))
def test_each_command_has_help_that_begins_with_a_sentence(name, dataloader):
    result = dataloader("etl", name, "--help")
    usage, _, sentence = result.stdout.splitlines()[:3]
    assert usage.startswith(f"Usage: dataloader etl {name}")
    assert sentence.strip().endswith(".")


def test_the_document_names_each_command():
    text = Path(__file__).parents[2].joinpath("docs", "cli.md").read_text()
    assert set(re.findall(r"^\| `etl (\w+)", text, re.MULTILINE)) == set(etl_command.commands)


@pytest.mark.full
@pytest.mark.requirement("E9", "E10")
def test_a_load_runs_here_without_a_service_and_ends_with_its_summary(call, database):
    code, stdout, stderr = call("etl", "run", "people", *HERE)
    assert (code, database.psql("SELECT id, name FROM people ORDER BY id")) == (0, "1|Ada\n3|Eve")
    fields, _, failures = stdout.partition("\n\n")
    shown = dict(line.split(maxsplit=1) for line in fields.splitlines())
    assert (shown["status"], shown["failed"]) == ("succeeded_with_failures", "records failed: 1")
    assert shown["requests"].startswith("requests 2, segments 2, busy ")
    assert shown["processing"].startswith("records 3, records failed 1, rows made 2, busy ")
    assert shown["writing"].startswith("inserted 2, busy ")
    header, failure = failures.splitlines()
    assert header.split() == ["SEGMENT", "PHASE", "ITEM", "ERROR"]
    assert failure.split()[:3] == ["data/a.csv", "record", "x"]
    assert [line.split()[:2] for line in stderr.splitlines()][-1] == ["people", "succeeded"]
    assert "slots of the queue" not in stderr
    # Nothing remains: neither a job in a queue without workers, nor a worker.
    assert database.psql("SELECT status, attempt, max_attempts, lock_key FROM dl_jobs") == "succeeded|1|1|load:people"
    assert database.psql("SELECT count(*) FROM dl_workers") == "0"


@pytest.mark.full
@pytest.mark.requirement("R7")
@pytest.mark.parametrize("declared", [{}, {"DAYS_CRON": "5 4 * * *"}], ids=["without it", "with another one"])
def test_a_run_in_this_process_leaves_the_schedules_of_services(call, serve, database, declared):
    serve(DAYS_CRON="@hourly")
    stored = "SELECT name, spec, stored_by, next_at, changed_at, retired_at FROM dl_schedules"
    before = database.psql(stored)
    assert "@hourly" in before
    assert call("etl", "run", "people", *HERE, **declared)[0] == 0
    assert database.psql(stored) == before


@pytest.mark.full
@pytest.mark.requirement("E9")
def test_as_json_the_job_is_all_that_is_printed(call):
    code, stdout, stderr = call("etl", "run", "people", *HERE, "--json")
    job = json.loads(stdout)
    assert (code, stderr, job["status"], job["result"]["counts"]["inserted"]) == (0, "", "succeeded", 2)


@pytest.mark.full
@pytest.mark.requirement("E10")
def test_a_load_that_fails_ends_with_3_and_says_why_in_a_line(call, database):
    database.psql("DROP TABLE people")
    code, stdout, stderr = call("etl", "run", "people", *HERE)
    assert code == 3
    # The summary contains it, so no log line repeats it.
    assert {line.split()[0] for line in stderr.splitlines()} == {"people"}
    shown = dict(line.split(maxsplit=1) for line in stdout.splitlines())
    assert shown["status"] == "failed"
    assert "there is no table people" in shown["error"]
    assert json.loads(call("etl", "status", "people", "--json")[1])["last_run"]["reason"] == shown["error"]
    assert "Traceback" not in stdout


@pytest.mark.full
@pytest.mark.requirement("E9")
def test_a_load_that_raises_here_shows_its_traceback_for_people_with_its_own_frame(call):
    code, stdout, stderr = call("etl", "run", "broken", *HERE)
    _, _, trace = stderr.partition("Traceback (most recent call last):\n")
    lines = trace.splitlines()
    assert (code, any("my_loads.py" in line for line in lines), "ZeroDivisionError: division by zero" in lines) == (
        3,
        True,
        True,
    ), stderr
    assert "ZeroDivisionError: division by zero" in stdout


@pytest.mark.full
@pytest.mark.requirement("E10")
def test_a_load_whose_source_is_closed_ends_with_3_and_so_does_its_flow(call, database):
    closed = {"SOURCE_URL": "http://127.0.0.1:9"}
    code, stdout, stderr = call("etl", "run", "days", *HERE, *QUICK, *THREE_DAYS, **closed)
    assert code == 3
    # Three failures, not six.
    assert "failed 3  segments 3 of 3 (3 failed)" in stderr
    shown = dict(line.split(maxsplit=1) for line in stdout.splitlines() if " " in line)
    assert shown["status"] == "failed"
    assert shown["error"].startswith(
        "3 of 3 segments could not be loaded (max_failed_segments is 0); the first failure "
    )
    assert database.psql("SELECT state FROM dl_load_state") == ""
    assert json.loads(call("etl", "status", "days", "--json")[1])["last_run"]["status"] == "failed"
    assert call("etl", "flow", "nightly", *HERE, *QUICK, *THREE_DAYS, **closed)[0] == 3
    assert json.loads(call("etl", "status", "people", "--json")[1])["last_run"]["status"] == "succeeded_with_failures"


@pytest.mark.full
@pytest.mark.requirement("E5", "E10")
def test_the_tolerated_share_of_failures_is_set_on_the_command_line(call):
    assert call("etl", "run", "people", *HERE)[0] == 0
    code, stdout, _ = call("etl", "run", "people", *HERE, "--pipeline-max-failed-share", 0.1)
    assert (code, "1 of 3 records failed (33.3%; max_failed_share is 0.1)" in stdout) == (3, True)
    code, _, stderr = call("etl", "run", "people", *HERE, "--pipeline-max-failed-share", 2)
    assert (code, "pipeline.max_failed_share: must be a number from 0 to 1, not 2.0" in stderr) == (2, True)


@pytest.mark.full
@pytest.mark.requirement("E10")
def test_a_failure_that_is_not_there_is_not_tried_again(call):
    code, stdout, _ = call("etl", "retry", "people", *HERE)
    assert (code, "people has no failure that can be retried alone" in stdout) == (0, True)
    code, stdout, _ = call("etl", "retry", "people", "--failure", 17, *HERE)
    told = "args.failures: the load has no unresolved failure 17; list its failures with `dataloader etl failures`"
    assert (code, told in stdout) == (3, True)


@pytest.mark.full
@pytest.mark.parametrize("where", [HERE, ()])
def test_a_database_that_is_away_ends_a_run_with_1_in_one_line(call, where):
    code, stdout, stderr = call("etl", "run", "people", *where, DL_DB_DSN="postgresql://nobody@127.0.0.1:9/none")
    assert (code, stdout, len(stderr.splitlines())) == (1, "", 1)
    assert stderr.startswith("DL_DB_DSN: the database at 127.0.0.1:9 cannot be reached (ConnectionRefusedError: ")


@pytest.mark.full
@pytest.mark.requirement("E4")
def test_an_interrupt_cancels_a_local_load_and_received_rows_are_written(command, call, source, database):
    # The second request takes longer than any wait.
    source.misbehave("2026-01-02", delay_s=WAIT_S)
    running = command("etl", "run", "days", *HERE, *QUICK, *THREE_DAYS, SOURCE_URL=source.url)
    wait_until(lambda: len(source.asked("2026-01-02")) == 1)
    wait_until(lambda: database.psql("SELECT count(*) FROM days") == "1")
    began_at = time.monotonic()
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=WAIT_S)
    assert time.monotonic() - began_at < 15
    assert running.returncode == 130, stderr
    assert "Traceback" not in stderr
    shown = dict(line.split(maxsplit=1) for line in stdout.splitlines())
    assert (shown["status"], shown["writing"].split(",")[0]) == ("canceled", "inserted 1")
    assert database.psql("SELECT status FROM dl_jobs") == "canceled"
    assert database.psql("SELECT day FROM days") == "2026-01-01"
    source.behave()
    assert not source.asked("2026-01-03")
    again = "dataloader etl run days --tasks my_loads:tasks --from 2026-01-01 --to 2026-01-04"
    said = f"the rows that it has written are kept; continue with `{again} --pipeline-rate-min 0.0"
    assert stderr.splitlines()[-1].startswith(said)
    # No process serves the queue of the ended command.
    code, _, stderr = call("retry", shown["job_id"])
    assert (code, "no process serves its queue" in stderr) == (1, True)
    assert "`dataloader etl run days --from 2026-01-01 --to 2026-01-04 --pipeline" in stderr
    assert call("retry", "--all", "--yes", "--status", "canceled")[1] == "0 jobs\n"
    assert database.psql("SELECT status FROM dl_jobs") == "canceled"


@pytest.mark.slow
@pytest.mark.requirement("E4")
def test_a_second_interrupt_does_not_wait_and_leaves_no_job_behind(command, source, database):
    source.misbehave("2026-01-01", delay_s=WAIT_S)
    running = command("etl", "run", "days", *HERE, *QUICK, *THREE_DAYS, SOURCE_URL=source.url)
    wait_until(source.asked)
    for _ in range(2):
        running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=WAIT_S)
    assert (running.returncode, "Traceback" in stderr) == (130, False)
    assert database.psql("SELECT status FROM dl_jobs") == "canceled"


@pytest.mark.full
@pytest.mark.requirement("E6", "E11")
def test_a_killed_local_run_is_lost_and_the_next_one_continues_after_it(command, call, source, database):
    quick = {"DL_DEFAULT_LEASE_TTL_SEC": "3", "DL_HEARTBEAT_SEC": "1", "DL_REAPER_PERIOD_SEC": "1"}
    until = ("--to", "2026-01-04")
    source.misbehave("2026-01-02", delay_s=WAIT_S)
    killed = command("etl", "run", "days", *HERE, *QUICK, *until, SOURCE_URL=source.url, **quick)
    wait_until(lambda: database.psql("SELECT count(*) FROM dl_load_state") == "1")
    wait_until(lambda: source.asked("2026-01-02"))
    killed.kill()
    killed.wait(WAIT_S)
    source.behave()
    # Its turn at the source would last a minute, but ends with its lease.
    code, stdout, stderr = call("etl", "run", "days", *HERE, *QUICK, *until, SOURCE_URL=source.url, **quick)
    assert code == 0, stdout + stderr
    assert database.psql("SELECT status FROM dl_jobs ORDER BY created_at") == "lost\nsucceeded"
    assert database.psql("SELECT count(*) FROM days") == "3"
    assert len(source.asked("2026-01-01")) == 1
    lost, done = (str(run) for run in database.psql("SELECT job_id FROM dl_jobs ORDER BY created_at").split())
    assert json.loads(call("etl", "status", "days", "--json")[1])["last_run"]["run_id"] == done
    assert database.psql(f"SELECT status FROM dl_etl_runs WHERE run_id = '{lost}'") == "running"


@pytest.mark.full
def test_a_load_for_a_service_is_not_added_if_its_queue_has_no_worker(call, serve, database):
    code, stdout, stderr = call("etl", "run", "people")
    assert (code, stdout) == (1, "")
    assert "it would never run: no process serves the queue 'default'; start `dataloader serve" in stderr
    assert database.psql("SELECT count(*) FROM dl_jobs") == "0"
    serve(queue="etl")
    code, _, stderr = call("etl", "run", "people")
    assert (code, "served queues (--queue): etl" in stderr) == (1, True)
    code, stdout, stderr = call("etl", "run", "people", "--no-wait")
    assert (code, stdout.split()[1]) == (0, "queued")
    assert stderr.startswith("the job waits: no process serves the queue 'default'")
    assert call("etl", "run", "people", "--queue", "etl")[0] == 0
    rows = database.psql("SELECT queue, status FROM dl_jobs ORDER BY 1, 2")
    assert rows == "default|queued\ndefault|canceled\netl|succeeded"


@pytest.mark.full
def test_etl_run_refuses_an_unknown_load_and_an_interrupt_ends_only_the_wait(command, call, serve, database):
    url = serve()
    unknown = "no worker of the queue 'default' has the task 'unheard-of'; check its name"
    for where in ((), ("--url", url)):
        code, stdout, stderr = call("etl", "run", "unheard-of", *where)
        assert (code, stdout) == (1, "")
        assert f"no job was enqueued, because it would never run: {unknown}" in stderr
    assert database.psql("SELECT count(*) FROM dl_jobs") == "0"
    stderr = call("jobs", "--url", url.replace("http:", "https:"))[2]
    assert ("SSL" in stderr, "ConnectError" in stderr) == (True, False)
    port = url.rpartition(":")[2]
    code, _, stderr = call("serve", *HERE, "--port", port)
    said = f"the service cannot listen at 127.0.0.1:{port}: Address already in use; choose another port with --port\n"
    assert (code, stderr.endswith(said)) == (1, True)
    code, stdout, stderr = call("etl", "run", "no load")
    assert (code, "rows made" in stderr, "is a plain task, not a load or a flow" in stderr) == (0, False, True)
    database.psql("DELETE FROM dl_jobs")
    code, stdout, stderr = call("etl", "run", "unheard-of", "--no-wait")
    assert (code, stdout.split()[1], stderr) == (0, "queued", f"the job waits: {unknown}\n")
    database.psql("DELETE FROM dl_jobs")
    # A process of an earlier release also serves the queue, without reporting its tasks: it may know this one.
    database.psql(
        "INSERT INTO dl_workers (worker, host, pid, version, queues) SELECT 'w', 'h', 1, '0', queues FROM dl_workers"
    )
    waiting = command("etl", "run", "unheard-of")
    said = Service(waiting).lines
    wait_until(lambda: any("unheard-of  queued" in line["event"] for line in said), lambda: said)
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(WAIT_S) == 130
    job_id = database.psql("SELECT job_id FROM dl_jobs")
    wait_until(
        lambda: any(f"the job continues; cancel it with `dataloader cancel {job_id}`" in line["event"] for line in said)
    )
    assert database.psql("SELECT status, waits_for FROM dl_jobs") == "queued|"


@pytest.mark.full
@pytest.mark.requirement("E9", "E10", "E11")
def test_a_service_runs_a_load_and_answers_as_the_database_does(call, serve, source, database):
    url = serve(SOURCE_URL=source.url)
    code, stdout, _ = call("etl", "run", "days", *THREE_DAYS, *QUICK, "--json", "--url", url)
    assert code == 0, stdout
    days = json.loads(stdout)
    assert (days["result"]["counts"]["inserted"], days["lock_key"]) == (3, "load:days")
    assert call("etl", "run", "people")[0] == 0

    for question in (("status",), ("status", "days"), ("failures", "people"), ("failures", "--run", days["job_id"])):
        for form in ((), ("--json",)):
            answer = call("etl", *question, *form)
            assert answer == call("etl", *question, *form, "--url", url)
            assert answer[0] == 0
    for question in (
        ("status", "none"),
        ("failures", "none"),
        ("failures", "--run", "01900000-0000-7000-8000-000000000000"),
    ):
        answer = call("etl", *question)
        assert answer == call("etl", *question, "--url", url)
        assert (answer[0], answer[1]) == (4, "")

    known = {load["load"]: load for load in json.loads(call("etl", "status", "--json")[1])}
    assert (known["days"]["upto"], known["days"]["unsolved"]) == ("2026-01-04T00:00:00Z", 0)
    assert (known["people"]["upto"], known["people"]["unsolved"]) == (None, 1)
    assert known["days"]["last_run"]["run_id"] == days["job_id"]
    [failure] = json.loads(call("etl", "failures", "people", "--json")[1])
    assert (failure["phase"], failure["key"], failure["load"]) == ("record", "x", "people")
    lines = call("etl", "failures", "people")[1].splitlines()
    assert lines[1].split()[0] == str(failure["failure_id"])

    with httpx2.Client(base_url=f"{url}/api/v1", timeout=20) as client:
        log = client.get(f"/jobs/{days['job_id']}/logs").json()["lines"]
        requests = [line["fields"] for line in log if line["message"] == "request"]
        assert [(fields["load"], fields["phase"], fields["status"]) for fields in requests] == [
            ("days", "requests", 200)
        ] * 3
        run = client.get(f"/runs/{days['job_id']}/timeline").json()
        [task] = run["tasks"]
        assert (run["name"], run["status"], task["task"], task["status"]) == ("days", "succeeded", "days", "succeeded")
        assert task["counts"]["inserted"] == 3
        assert list(task["phases"]) == ["requests", "processing", "writing"] or len(task["phases"]) == 3
        for phase in task["phases"].values():
            assert task["started_at"] <= phase["began_at"] <= phase["ended_at"] <= task["finished_at"]


@pytest.mark.full
@pytest.mark.requirement("E10")
def test_a_single_failure_can_be_retried(call, database, tmp_path):
    call("etl", "run", "people", *HERE)
    [failure] = json.loads(call("etl", "failures", "people", "--json")[1])
    assert call("etl", "retry", "people", "--failure", failure["failure_id"], *HERE)[0] == 0
    former = failure
    [failure] = json.loads(call("etl", "failures", "people", "--json")[1])
    shown = call("etl", "failures", "--run", former["run_id"])[1]
    assert f"replaced by failure {failure['failure_id']}" in shown
    (tmp_path / "data" / "a.csv").write_text("id,name\n1,Ada\n2,Bob\n")
    (tmp_path / "data" / "b.csv").unlink()
    code, _, stderr = call("etl", "retry", "people", "--failure", failure["failure_id"], *HERE)
    assert code == 0, stderr
    assert database.psql("SELECT id, name FROM people ORDER BY id") == "1|Ada\n2|Bob\n3|Eve"
    assert call("etl", "failures", "people") == (0, "", "no failures\n")
    assert database.psql("SELECT args FROM dl_jobs ORDER BY created_at DESC LIMIT 1") == (
        f'{{"failures": [{failure["failure_id"]}]}}'
    )


@pytest.mark.full
@pytest.mark.requirement("E12")
def test_a_flow_runs_its_loads_in_order_and_ends_with_a_line_for_each(call, source, database):
    code, stdout, stderr = call("etl", "flow", "nightly", *HERE, *QUICK, *THREE_DAYS, SOURCE_URL=source.url)
    assert code == 0, stderr
    fields, tasks, failures = stdout.split("\n\n")
    assert "status  succeeded_with_failures" in fields
    assert [line.split()[:2] for line in tasks.splitlines()] == [
        ["TASK", "STATUS"],
        ["people", "succeeded_with_failures"],
        ["days", "succeeded"],
    ]
    assert '"inserted":3' in tasks.splitlines()[2]
    assert failures.splitlines()[1].split()[:3] == ["data/a.csv", "record", "x"]
    known = {load["load"]: load for load in json.loads(call("etl", "status", "--json")[1])}
    run_id = database.psql("SELECT job_id FROM dl_jobs")
    assert {name: load["last_run"]["run_id"] for name, load in known.items()} == {"days": run_id, "people": run_id}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "job"),
    [
        (("run", "days", "--from", "2026-01-01"), 'days|load:days|{"from": "2026-01-01"}'),
        (("run", "days", "--to", "2026-01-01T06:00Z"), 'days|load:days|{"to": "2026-01-01T06:00Z"}'),
        (
            ("run", "days", "--pipeline-workers", 3, "--pipeline-batch-size", 9, "--pipeline-rate-max", 0.5),
            'days|load:days|{"pipeline": {"workers": 3, "rate_max": 0.5, "batch_size": 9}}',
        ),
        (("retry", "days"), 'days|load:days|{"failures": "all"}'),
        (("retry", "days", "--failure", 7, "--failure", 8), 'days|load:days|{"failures": [7, 8]}'),
        (("flow", "nightly"), "nightly|flow:nightly|{}"),
    ],
)
def test_the_options_of_a_command_are_the_args_of_its_job(on_database, database, arguments, job):
    result = on_database("etl", *arguments, "--no-wait", "--queue", "etl")
    assert result.returncode == 0, result.stderr
    assert database.psql("SELECT task, lock_key, args FROM dl_jobs WHERE queue = 'etl'") == job


@pytest.mark.slow
@pytest.mark.requirement("E5")
def test_a_load_begins_a_duration_before_now(on_database, database):
    result = on_database("etl", "run", "days", "--from", "60d", "--to", "2h", "--no-wait", "--queue", "etl")
    assert result.returncode == 0, result.stderr
    apart = "now() - (args ->> '{}')::timestamptz - interval '{}'"
    for name, duration in (("from", "60 d"), ("to", "2 h")):
        assert abs(float(database.psql(f"SELECT extract(epoch FROM {apart.format(name, duration)}) FROM dl_jobs"))) < 60


@pytest.mark.slow
@pytest.mark.requirement("E5")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("run", "days", "--from", "yesterday"),
            "must be a date or a timestamp, such as 2026-01-31 or 2026-01-31T06:00Z, or a duration before now: 90s, ",
        ),
        (("run", "days", "--pipeline-workers", 0), "pipeline.workers: must be "),
        (("run", "days", "--pipeline-batch-size", -1), "pipeline.batch_size: must be "),
        (("run", "days", "--pipeline-rate-min", 9, "--pipeline-rate-max", 3), "not greater than rate_max (3)"),
        (("run", "days", "--pipeline-rate-max", "nan"), "pipeline.rate_max: must be "),
        (("run", "days", *HERE, "--queue", "q"), "--tasks runs it in this process"),
        (("run", "days", *HERE, "--no-wait"), "--tasks runs it in this process"),
        (("run", "days", *HERE, "--url", "http://127.0.0.1:1"), "--tasks runs it in this process"),
        (("failures",), "give either a LOAD or a run"),
        (("failures", "days", "--run", "01900000-0000-7000-8000-000000000000"), "give either a LOAD or a run"),
        (("run", ""), "task: must have 1 to 200 characters, not 0"),
    ],
)
def test_invalid_options_exit_with_2_and_add_no_job(on_database, database, arguments, said):
    result = on_database("etl", *arguments)
    assert (result.returncode, said in result.stderr) == (2, True), result.stderr
    assert database.psql("SELECT count(*) FROM dl_jobs") == "0"


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "none", *HERE),
        ("plan", "none", *HERE),
        ("plan", "no load", *HERE),
        ("run", "no load", *HERE),
        ("retry", "nightly", *HERE),
    ],
)
def test_an_unknown_load_of_a_module_is_one_line_with_the_known_ones(call, database, arguments):
    code, stdout, stderr = call("etl", *arguments)
    assert (code, stdout) == (2, "")
    assert "days, " in stderr
    assert "people" in stderr
    assert database.psql("SELECT count(*) FROM dl_jobs") == "0"


@pytest.mark.slow
@pytest.mark.requirement("E1", "E5", "E6")
def test_a_plan_has_the_windows_the_requests_and_the_pauses_and_asks_nothing(call, source, database, tmp_path):
    settings = {"SOURCE_URL": source.url, "DL_PIPELINE__RATE_MIN": "2", "DL_PIPELINE__DAYS__RATE_MAX": "6"}
    code, stdout, stderr = call("etl", "plan", "days", *HERE, *THREE_DAYS, **settings)
    assert (code, stderr) == (0, "")
    table, _, fields = stdout.partition("\n\n")
    day = "2026-01-0{} 00:00:00Z"
    assert [line.split(maxsplit=4) for line in table.splitlines()[1:]] == [
        [*day.format(n).split(), *day.format(n + 1).split(), f"1         GET /days?from=2026-01-0{n}"]
        for n in (1, 2, 3)
    ]
    shown = dict(line.split(maxsplit=1) for line in fields.splitlines() if " " in line)
    assert shown["requests"] == "3"
    # Two pauses of 2 to 6 seconds.
    assert shown["pauses"] == "mean 0:00:08, minimum 0:00:04, maximum 0:00:12"
    code, stdout, _ = call("etl", "plan", "days", *HERE, *THREE_DAYS, "--pipeline-rate-min", 4, "--json", **settings)
    plan = json.loads(stdout)
    assert plan["pauses"] == {"least_s": 8.0, "mean_s": 10.0, "most_s": 12.0}
    assert [window["start"] for window in plan["windows"]] == [f"2026-01-0{day}T00:00:00Z" for day in (1, 2, 3)]
    assert not source.requests
    assert database.psql("SELECT count(*) FROM dl_jobs") == "0"


@pytest.mark.full
@pytest.mark.requirement("E6")
def test_a_plan_begins_where_the_load_has_come_to_and_makes_no_database(call, database, tmp_path):
    until = ("--to", "2026-01-09")
    database.psql(
        "INSERT INTO dl_load_state (load, state, run_id) VALUES"
        """ ('days', '{"kind": "window", "upto": "2026-01-07T00:00:00Z"}', gen_random_uuid())"""
    )
    plan = json.loads(call("etl", "plan", "days", *HERE, *until, "--json")[1])
    assert (plan["upto"], plan["requests"]) == ("2026-01-07T00:00:00Z", 2)
    plan = json.loads(call("etl", "plan", "days", *HERE, *until, "--json", DL_DB_DSN="")[1])
    assert (plan["upto"], plan["requests"]) == (None, 8)
    assert not (tmp_path / ".dataloader").exists()
    code, _, stderr = call("etl", "plan", "days", *HERE, "--from", "2026-01-09", "--to", "2026-01-09")
    assert (code, "--from must be before --to: 2026-01-09 is not before 2026-01-09" in stderr) == (2, True)
    code, _, stderr = call("etl", "run", "days", "--from", "2026-01-09", "--to", "2026-01-08T00:00")
    assert (code, "--from must be before --to" in stderr) == (2, True)
    code, _, stderr = call("etl", "retry", "days", "--failure", 0)
    assert (code, "--failure" in stderr) == (2, True)
    assert database.psql("SELECT count(*) FROM dl_jobs") == "0"
    assert "watermark  never loaded" in call("etl", "plan", "days", *HERE, *until, DL_DB_DSN="")[1]
    code, _, stderr = call("etl", "plan", "days", *HERE, *until, "--data-dir", tmp_path / "none", DL_DB_DSN="")
    assert (code, f"{tmp_path / 'none'} has no embedded database" in stderr) == (2, True)


@pytest.mark.full
@pytest.mark.requirement("E6", "E8")
def test_a_backfill_of_a_history_sends_the_requests_of_its_plan(call, source, database):
    for rate, requests in ((7, 3), (8, 3), (8, 3)):
        source.put("/days", Answer(json.dumps([{"rate": rate}]).encode()))
        source.requests.clear()
        plan = json.loads(call("etl", "plan", "versions", *HERE, *THREE_DAYS, "--json", SOURCE_URL=source.url)[1])
        code, stdout, stderr = call("etl", "run", "versions", *HERE, *THREE_DAYS, *QUICK, SOURCE_URL=source.url)
        assert (code, plan["requests"], len(source.requests)) == (0, requests, requests), stdout + stderr
        assert database.psql("SELECT rate, valid_from, valid_to FROM versions") == f"{rate}|2026-01-01|"


@pytest.mark.full
@pytest.mark.requirement("E6")
def test_a_plan_is_refused_where_its_run_is_and_says_why_nothing_is_requested(call, database):
    code, _, stderr = call("etl", "plan", "people", *HERE, *THREE_DAYS)
    told = "from: must be omitted, not 2026-01-01: people has no windows, so each run loads everything"
    assert (code, told in stderr) == (2, True), stderr
    code, stdout, stderr = call("etl", "run", "people", *HERE, *THREE_DAYS)
    assert (code, told in stdout) == (3, True), stdout + stderr
    database.psql(
        "INSERT INTO dl_load_state (load, state, run_id) VALUES"
        """ ('days', '{"kind": "window", "upto": "2026-01-07T00:00:00Z"}', gen_random_uuid())"""
    )
    told = "there is nothing to load before 2026-01-05: data before 2026-01-07T00:00:00+00:00 is loaded"
    code, stdout, stderr = call("etl", "plan", "days", *HERE, "--to", "2026-01-05")
    assert (code, told in stdout + stderr) == (0, True)
    code, stdout, _ = call("etl", "run", "days", *HERE, "--to", "2026-01-05")
    assert (code, told in " ".join(stdout.split())) == (0, True)


@pytest.mark.slow
@pytest.mark.requirement("E6")
def test_a_plan_of_files_lists_them_and_has_no_pauses(call):
    code, stdout, _ = call("etl", "plan", "people", *HERE)
    assert (code, "everything      2         GET data/a.csv" in stdout) == (0, True)
    assert "none (this source has no rate limit)" in stdout


@pytest.mark.slow
@pytest.mark.requirement("E5")
def test_the_command_line_of_serve_is_stronger_than_the_environment(call, serve, source):
    slow = {"DL_PIPELINE__RATE_MIN": "600", "DL_PIPELINE__RATE_MAX": "600"}
    serve(*QUICK, SOURCE_URL=source.url, **slow)
    code, _, stderr = call("etl", "run", "days", *THREE_DAYS)
    assert (code, len(source.requests)) == (0, 3), stderr


@pytest.mark.full
@pytest.mark.requirement("E9")
def test_a_terminal_of_80_columns_shows_rows_requests_and_what_is_waited_for(command, source, database):
    keyboard, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    pauses = ("--pipeline-rate-min", 4, "--pipeline-rate-max", 4)
    running = command(
        *("etl", "run", "days", *HERE, *pauses, "--from", "2026-01-01", "--to", "2026-01-03"),
        SOURCE_URL=source.url,
        stderr=terminal,
        TERM="xterm",
        COLUMNS="80",
    )
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # Linux reports in this way that no process has the terminal open any more
        while more := os.read(keyboard, 10_000):
            shown += more
    os.close(keyboard)
    stdout, _ = running.communicate(timeout=WAIT_S)
    assert running.returncode == 0, stdout
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    lines = {line.strip() for line in re.split(r"[\r\n]+", text)}
    assert max(map(len, lines)) <= 80
    # All values are shown together, each in a separate line.
    assert any(re.fullmatch(r"days [━╸╺]{20} 0:00:\d\d running", line) for line in lines), lines
    counts = r"rows made 1 \(\d+/s\)  requests 1  segments 1 of 2  2026-01-02 to 2026-01-03"
    assert any(re.fullmatch(counts, line) for line in lines), lines
    assert any(re.fullmatch(r"waits for the pause of 127.0.0.1 until \d\d:\d\d:\d\dZ", line) for line in lines), lines
    assert "status      succeeded" in stdout
