"""`trigger`, `status`, `jobs` and `events`, on a real database."""

from __future__ import annotations

import json
import re
import time

import pytest

MISSING = "01900000-0000-7000-8000-000000000000"
NO_WORKER = "no worker serves the queue 'q'; list the served queues with `dataloader workers`"
PAUSED = "the queue 'q' is paused; resume it with `dataloader resume q`"
FULL = "all slots of the queue 'q' are taken"


def end(database, job_id, status):
    """End a job like another service that does not know our columns."""
    database.psql(f"update dl_jobs set status = '{status}', finished_at = now(), error = 'x' where job_id = '{job_id}'")


@pytest.mark.requirement("Q2")
def test_trigger_puts_every_option_into_the_row(add, on_database, database):
    options = {
        "--args": '{"year": 2024}',
        "--lock-key": "k",
        "--partition-key": "p",
        "--priority": 7,
        "--available-at": "2040-01-02T03:04:05+02:00",
        "--idempotency-key": "i",
        "--max-attempts": 3,
        "--lease": 44,
    }
    job_id = add("load.ecb", "load", *(word for option in options.items() for word in option))
    row = database.psql(
        "select job_id, queue, task, args, lock_key, partition_key, priority, available_at at time zone 'utc',"
        " idempotency_key, max_attempts, lease_ttl_sec, status from dl_jobs"
    )
    assert row == f'{job_id}|load.ecb|load|{{"year": 2024}}|k|p|7|2040-01-02 01:04:05|i|3|44|queued'
    dependent = add("load.ecb", "load", "--after", job_id, "--when-failed", "run", "--root", job_id)
    row = database.psql(
        "select a.after_id, j.when_failed, j.root_id, j.waits_for from dl_job_after a join dl_jobs j using (job_id)"
    )
    assert row == f"{job_id}|run|{job_id}|after"
    found = json.loads(on_database("jobs", "--root", job_id, "--json").stdout)["jobs"]
    assert [job["job_id"] for job in found] == [dependent, job_id]


@pytest.mark.requirement("Q2")
def test_a_trigger_without_a_queue_goes_to_the_task_s_own(on_database, database):
    database.psql(
        "INSERT INTO dl_tasks (task, queue, priority, lock_key, layout, declared_by)"
        " VALUES ('load', 'own', 7, '\"year:{year}\"', 1, 'w')"
    )
    assert on_database("trigger", "load", "--args", '{"year": 2024}').returncode == 0
    assert database.psql("SELECT queue, priority, lock_key FROM dl_jobs") == "own|7|year:2024"
    refused = on_database("trigger", "unknown")
    assert (refused.returncode, database.psql("SELECT count(*) FROM dl_jobs")) == (2, "1")
    assert 'queue: is required, because the task "unknown" has no queue' in refused.stderr


def test_arguments_come_from_the_command_line_a_file_or_standard_input(on_database, tmp_path):
    (tmp_path / "args.json").write_text('{"from": "file"}')
    for text, stdin in (('{"from": "line"}', ""), ("@args.json", ""), ("-", '{"from": "stdin"}')):
        assert on_database("trigger", "q", "t", "--args", text, stdin=stdin).returncode == 0
    jobs = json.loads(on_database("jobs", "--json").stdout)["jobs"]
    assert [job["args"]["from"] for job in jobs] == ["stdin", "file", "line"]


NOT_ALLOWED = [
    (("--args", "[1]"), "must be a JSON object"),
    (("--args", "@none.json"), "none.json"),
    (("--args", '{"a": "\\u0000"}'), "args: "),
    (("--priority", "-1"), "priority: must be an integer from 0 to 2,147,483,647, not -1"),
    (("--available-at", "2040-01-02T03:04:05"), "time zone"),
    (("--available-at", "tomorrow"), ", not 'tomorrow'"),
    (("--available-at", "9999999d"), ", not '9999999d'"),
    (("--args", "@deep.json"), "nested too deeply"),
    (("--wait", "--timeout", "nan"), ", not 'nan'"),
    (("--timeout", "4"), "--timeout needs --wait"),
    (("--after", "0197a1b2-c3d4-7e5f-8a6b-9c0d1e2f3a4b"), "after: must have IDs of existing jobs"),
    (("--lease", "1"), "lease_ttl_sec: must be an integer from 3 to 86,400, not 1"),
]


def test_an_invalid_request_exits_with_2_and_names_the_allowed_values(on_database, database, tmp_path):
    (tmp_path / "deep.json").write_text('{"a":' * 3_000 + "1" + "}" * 3_000)
    for options, said in NOT_ALLOWED:
        result = on_database("trigger", "q", "t", *options)
        assert result.returncode == 2, options
        assert said in result.stderr
        assert "Traceback" not in result.stderr
    assert database.psql("select count(*) from dl_jobs") == "0"


@pytest.mark.requirement("Q2")
def test_the_same_idempotency_key_gives_the_first_job_and_another_request_is_refused(on_database):
    first = json.loads(on_database("trigger", "q", "t", "--idempotency-key", "k", "--json").stdout)
    again = json.loads(on_database("trigger", "q", "t", "--idempotency-key", "k", "--json").stdout)
    assert again == first | {"created": False, "did": "again"}
    other = on_database("trigger", "q", "other", "--idempotency-key", "k")
    assert (other.returncode, first["job_id"] in other.stderr) == (1, True)


@pytest.mark.requirement("Q3")
def test_status_shows_a_job_as_text_and_as_json(on_database, add):
    job_id = add("q", "t", "--available-at", "1h")
    text = dict(line.split(maxsplit=1) for line in on_database("status", job_id).stdout.splitlines())
    assert text["job_id"] == job_id
    assert text["status"] == "queued (waits for time)"
    assert "available_at" in text
    assert text["waits_for"].startswith("time: It is not due until 20")
    assert text["queue_state"] == f"no_worker: {NO_WORKER}"
    fields = json.loads(on_database("status", job_id, "--json").stdout)
    assert (fields["job_id"], fields["status"], fields["waits_for"]) == (job_id, "queued", "time")
    names = [line.split()[0] for line in on_database("status", job_id, "--all-fields").stdout.splitlines()]
    assert sorted(names) == sorted(fields)


def test_a_job_that_is_not_there_ends_with_4(on_database):
    for command in ("status", "events", "logs", "cancel", "retry"):
        result = on_database(command, MISSING)
        assert (result.returncode, result.stderr) == (4, f"no job has the ID {MISSING}\n"), command


def test_an_id_or_a_number_that_is_none_ends_with_2(on_database):
    assert on_database("status", "17").returncode == 2
    assert "integer of at least 0" in on_database("events", MISSING, "--after", 2**63).stderr


@pytest.mark.slow
@pytest.mark.parametrize(("status", "code"), [("succeeded", 0), ("failed", 3), ("canceled", 3), ("lost", 3)])
def test_the_exit_code_of_wait_says_how_the_job_ended(on_database, add, database, status, code):
    job_id = add("q", "t")
    end(database, job_id, status)
    result = on_database("status", job_id, "--wait")
    assert result.returncode == code
    assert f"status       {status}" in result.stdout


@pytest.mark.slow
def test_wait_returns_when_the_job_ends(start, database):
    waiting = start("trigger", "q", "t", "--wait", "--json", DL_DB_DSN=database.dsn)
    deadline = time.monotonic() + 20
    while not (job_id := database.psql("select job_id from dl_jobs")):
        assert time.monotonic() < deadline
    end(database, job_id, "failed")
    stdout, stderr = waiting.communicate(timeout=20)
    assert (waiting.returncode, stderr) == (3, f"the job waits: {NO_WORKER}\n")
    assert json.loads(stdout)["status"] == "failed"


def serve(database, queues):
    """Register a worker that serves these queues, like a live process that knows the task `t`."""
    database.psql(
        "insert into dl_workers (worker, host, pid, version, queues, tasks)"
        f" values ('w', 'h', 1, '1', '{json.dumps(queues)}', '{{t}}')"
    )


@pytest.mark.requirement("Q3")
def test_a_trigger_and_a_status_say_why_the_queue_does_not_take_the_job(on_database, add, database):
    unserved = on_database("trigger", "q", "t")
    assert (unserved.returncode, unserved.stderr) == (0, f"the job waits: {NO_WORKER}\n")
    job_id = unserved.stdout.split()[0]
    shown = dict(line.split(maxsplit=1) for line in on_database("status", job_id).stdout.splitlines())
    assert shown["queue_state"] == f"no_worker: {NO_WORKER}"
    assert not {"waits", "waits_because", "waits_for"} & set(shown)  # the reason is there once
    on_database("pause", "q")
    as_json = on_database("trigger", "q", "t", "--json")
    assert (json.loads(as_json.stdout)["queue_state"], as_json.stderr) == ("paused", f"the job waits: {PAUSED}\n")
    assert json.loads(on_database("status", job_id, "--json").stdout)["queue_state"] == "paused"
    on_database("resume", "q")
    serve(database, {"q": 1})
    assert on_database("trigger", "q", "t").stderr == ""
    misspelt = on_database("trigger", "q", "tt")
    said = "the job waits: no worker of the queue 'q' has the task 'tt'; check its name\n"
    assert (misspelt.returncode, misspelt.stdout.split()[1], misspelt.stderr) == (0, "queued", said)
    assert "queue_state" not in on_database("status", job_id).stdout


@pytest.mark.full
@pytest.mark.requirement("Q3")
def test_wait_says_why_the_job_waits_and_says_it_again_when_that_changes(start, database):
    waiting = start("trigger", "q", "t", "--wait", DL_DB_DSN=database.dsn)
    assert waiting.stderr.readline() == f"the job waits: {NO_WORKER}\n"
    database.psql("insert into dl_queues (queue, paused) values ('q', true)")
    assert waiting.stderr.readline() == f"the job waits: {PAUSED}\n"
    database.psql(
        "insert into dl_jobs (job_id, queue, task, lock_key, status, claimed_by, token)"
        " values (gen_random_uuid(), 'q', 't', 'x', 'running', 'w', 1)"
    )
    serve(database, {"q": 1})
    database.psql("update dl_queues set paused = false")
    assert waiting.stderr.readline() == f"the job waits: {FULL}\n"
    end(database, database.psql("select job_id from dl_jobs where status = 'queued'"), "succeeded")
    _, stderr = waiting.communicate(timeout=20)
    assert (waiting.returncode, stderr) == (0, "")


@pytest.mark.full
@pytest.mark.requirement("Q3")
def test_status_wait_prints_why_a_job_waits(start, add, on_database, database):
    job_id = add("q", "t")
    serve(database, {"q": 1})
    database.psql(
        "update dl_jobs set attempt = 1, waits_for = 'time', available_at = '2040-01-02T03:04:05Z',"
        " error = E'ValueError: token=sesame \\n\\nTraceback'"
    )
    waiting = start("status", job_id, "--wait", DL_DB_DSN=database.dsn)
    said = "the job waits: attempt 2 of 5 is due at 2040-01-02 03:04:05Z, after: ValueError: token=***"
    assert waiting.stderr.readline().rstrip() == said
    database.psql("update dl_workers set tasks = '{}'")
    unknown = "no worker of the queue 'q' has the task 't'; check its name"
    assert waiting.stderr.readline() == f"the job waits: {unknown}\n"
    assert f"task: {unknown}\n" in on_database("status", job_id).stdout
    database.psql("update dl_workers set tasks = '{t}'; update dl_jobs set waits_for = 'lock'")
    assert waiting.stderr.readline() == "the job waits: another job with the same lock_key is running\n"
    database.psql(
        "update dl_jobs set attempt = 3, status = 'running', waits_for = null, heartbeat_at = now(),"
        " error = 'worker lost: x'"
    )
    assert waiting.stderr.readline() == "attempt 2 of 5 failed: worker lost: x; attempt 3 runs\n"
    # Separate statements: between them the job runs, and the state of its queue is not read.
    database.psql("insert into dl_queues values ('q', true); update dl_jobs set status = 'queued', error = 'E: y'")
    assert waiting.stderr.readline() == "attempt 3 of 5 failed: E: y; the job is queued again\n"
    assert waiting.stderr.readline() == f"the job waits: {PAUSED}\n"
    end(database, job_id, "succeeded")
    _, stderr = waiting.communicate(timeout=20)
    assert (waiting.returncode, stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.requirement("Q10")
def test_status_shows_whether_the_lease_of_a_running_job_is_renewed(on_database, add, database):
    job_id = add("q", "t")
    database.psql(
        "update dl_jobs set status = 'running', attempt = 2, claimed_by = 'w', heartbeat_at = now(),"
        " lease_ttl_sec = 60, lease_expires_at = now() + interval '60 s', error = E'worker lost: x\\nmore'"
    )

    def shown(change):
        database.psql(f"update dl_jobs set {change}")
        status = on_database("status", job_id).stdout
        return status, on_database("jobs").stdout.splitlines()[1]

    # The error belongs to the former attempt: this one has none.
    status, row = shown("progress = '{}'")
    assert "\nlast_error\n  worker lost: x\n  more" in status
    assert "no heartbeat" not in status
    assert "worker lost" not in row
    status, row = shown("heartbeat_at = now() - interval '31 s', lease_expires_at = '2040-01-02T03:04:05Z'")
    for text in (status, row):
        assert re.search(
            r"no heartbeat for 3\d s \(its lease expires at 2040-01-02 03:04:05Z, then the job is recovered\)", text
        )
    assert "(its lease expired at 2026-01-02 00:00:00Z; the next" in shown("lease_expires_at = '2026-01-02Z'")[0]
    for endless in ("null", "'infinity'"):
        assert "(its lease never expires; use `dataloader" in shown(f"lease_expires_at = {endless}")[0]
    assert "no heartbeat" not in shown("status = 'failed', finished_at = now()")[0]


def test_a_wait_that_times_out_exits_with_1_and_shows_the_jobs_status(on_database):
    result = on_database("trigger", "q", "t", "--wait", "--timeout", "0.1")
    assert result.returncode == 1
    assert result.stderr.endswith("has not ended yet\n")
    assert "queued" in result.stdout


def test_jobs_are_found_by_each_filter(on_database, add, database):
    old = add("a", "t1", "--lock-key", "k")
    new = add("b", "t2")
    database.psql(f"update dl_jobs set created_at = now() - interval '1 day' where job_id = '{old}'")
    end(database, new, "failed")

    def found(*options):
        return [job["job_id"] for job in json.loads(on_database("jobs", "--json", *options).stdout)["jobs"]]

    assert found() == [new, old]
    assert found("--queue", "a") == found("--task", "t1") == found("--lock-key", "k") == found("--until", "1h") == [old]
    assert found("--status", "failed") == found("--since", "1h") == [new]
    assert found("--status", "failed", "--status", "queued") == found("--status", "failed,queued") == [new, old]
    refused = on_database("jobs", "--status", "failed,quued")
    said = "must be one of queued, running, succeeded, failed, canceled, lost, or several separated by commas"
    assert (refused.returncode, said in refused.stderr) == (2, True)
    assert found("--ended-since", "1h") == [new]
    assert found("--ended-until", "1h") == found("--ended-since", "1h", "--status", "succeeded") == []
    assert found("--queue", "a", "--status", "failed") == []


def test_pages_follow_each_other_by_the_cursor(on_database, add):
    ids = [add("q", "t") for _ in range(3)]
    first = on_database("jobs", "--limit", 2)
    assert [line.split()[0] for line in first.stdout.splitlines()] == ["JOB_ID", ids[2], ids[1]]
    more = first.stderr.removeprefix("more: ").split()
    last = on_database("jobs", "--limit", 2, *more)
    assert [line.split()[0] for line in last.stdout.splitlines()] == ["JOB_ID", ids[0]]
    assert not last.stderr
    assert on_database("jobs", "--after", "nonsense").returncode == 2


def test_a_pipe_gets_plain_columns_all_of_them_and_the_first_line_of_an_error(on_database, add, database):
    job_id = add("a-queue-with-a-rather-long-name", "t", "--max-attempts", 3)
    database.psql(
        "update dl_jobs set status = 'failed', finished_at = now(), error = E'ValueError: token=sesame \\n\\nTraceback'"
    )
    header, row = on_database("jobs").stdout.splitlines()
    assert header.split() == ["JOB_ID", "STATUS", "TASK", "QUEUE", "ATTEMPT", "CREATED", "DETAIL"]
    assert row.startswith(f"{job_id}  failed  t     a-queue-with-a-rather-long-name  0/3      ")
    assert row.endswith("Z  ValueError: token=***")
    database.psql(f"update dl_jobs set error = 'ValueError: ' || repeat('long ', 1000) where job_id = '{job_id}'")
    assert len(on_database("jobs").stdout.splitlines()[1]) < 400


@pytest.mark.requirement("Q16")
def test_job_data_is_shown_without_secrets_and_control_characters(on_database, add, database):
    unseen = "\x1b\x9b\u202e\u2066\u2028\u200b\ufeff"
    job_id = add("q", "t", "--args", json.dumps({"password": "sesame", "rows": unseen}))
    # Another service may use such names.
    database.psql(f"update dl_jobs set queue = 'q{unseen}', task = 't{unseen.replace(chr(0x2028), '')}'")
    database.psql(f"update dl_job_events set payload = jsonb_build_object('said', 'x{unseen}')")
    database.psql(f"update dl_jobs set error = E'at postgresql://me:sesame@db/x\\n\\x1b[2J' where job_id = '{job_id}'")
    for command in (("jobs",), ("status", job_id), ("status", "--all-fields", job_id), ("events", job_id)):
        for form in ((), ("--json",)):
            result = on_database(*command, *form)
            assert result.returncode == 0
            assert "sesame" not in result.stdout
            assert not {*unseen} & {*result.stdout}
            if form and command[0] != "events":
                shown = json.loads(result.stdout)
                assert (shown[0] if isinstance(shown, list) else shown.get("jobs", [shown])[0])["queue"] == f"q{unseen}"


@pytest.mark.requirement("Q11")
def test_events_are_listed_from_the_oldest_on(on_database, add):
    job_id = add("q", "t")
    on_database("cancel", job_id)
    events = json.loads(on_database("events", job_id, "--json").stdout)
    assert [event["kind"] for event in events] == ["queued", "canceled"]
    lines = on_database("events", job_id, "--after", events[0]["event_id"]).stdout.splitlines()
    assert [line.split()[3] for line in lines[1:]] == ["canceled"]


def say(database, job_id, level, message, **fields):
    """Log a line of a job, like a worker."""
    line = json.dumps({"level": level, "message": message, "fields": fields})
    database.psql(
        "insert into dl_job_events (job_id, queue, kind, payload)"
        f" select job_id, queue, 'log', $${line}$$ from dl_jobs where job_id = '{job_id}'"
    )


@pytest.mark.requirement("E11")
def test_log_lines_of_a_job_are_read_masked_and_in_pages(on_database, add, database):
    job_id = add("q", "t")
    assert on_database("logs", job_id).stderr == "no lines\n"
    say(database, job_id, "info", "read", rows=3, load="a")
    say(database, job_id, "error", "token=sesame\nbroken")
    lines = on_database("logs", job_id).stdout.splitlines()
    assert [line.split("Z  ")[1] for line in lines] == [
        'info     read  {"load":"a","rows":3}',
        r"error    token=***\nbroken",
    ]
    assert on_database("logs", job_id, "--level", "error").stdout.splitlines() == lines[1:]
    assert on_database("logs", job_id, "--load", "a").stdout.splitlines() == lines[:1]
    first = on_database("logs", job_id, "--limit", 1)
    assert on_database("logs", job_id, *first.stderr.removeprefix("more: ").split()).stdout.splitlines() == lines[1:]
    page = json.loads(on_database("logs", job_id, "--json").stdout)
    assert ([line["message"] for line in page["lines"]], page["next"]) == (["read", "token=***\nbroken"], None)
    assert on_database("logs", job_id, "--follow", "--json").returncode == 2


def happen(database, job_id, kind, payload):
    """Add an event to a job's history, at midnight."""
    database.psql(
        "insert into dl_job_events (job_id, queue, ts, kind, payload)"
        f" values ('{job_id}', 'q', '2026-01-02Z', '{kind}', $${json.dumps(payload)}$$)"
    )


@pytest.mark.requirement("E11")
def test_a_log_marks_where_attempts_begin_and_how_they_ended(on_database, add, database):
    job_id = add("q", "t")
    for kind, payload in (
        ("picked", {"attempt": 1, "worker": "w"}),
        ("requeue", {"attempt": 1, "reason": "retry", "error": "E: token=sesame \n\nTraceback", "delay_s": 3.1}),
        ("picked", None),
        ("requeue", {"attempt": 2, "reason": "lease expired", "worker": "w"}),
        ("requeue", {"delay_s": 1e300}),
        ("requeue", [1]),
        ("failed", {"attempt": 3, "reason": "fail", "error": "boom"}),
        ("canceled", {"reason": "after", "failed": {"a": "failed", "b": "lost", "c": "failed", "d": "failed"}}),
        ("canceled", {"reason": "after", "failed": {"a": "canceled"}}),
        ("canceled", {"reason": "after", "failed": {}}),
        ("canceled", {"reason": "after", "failed": 1}),
    ):
        happen(database, job_id, kind, payload)
    lines = on_database("logs", job_id).stdout.splitlines()
    assert [line.removeprefix("2026-01-02 00:00:00Z  ") for line in lines] == [
        "info     — attempt 1 began on w —",
        "error    — attempt 1 failed: E: token=***; next at 2026-01-02 00:00:03Z —",
        "info     — the attempt began —",
        "error    — attempt 2 ended: worker lost; next at 2026-01-02 00:00:00Z —",
        "info     — the job was queued again —",
        "info     — the job was queued again; next at 2026-01-02 00:00:00Z —",
        "error    — attempt 3 failed for good: boom —",
        "info     — the job was canceled, because of jobs that it depends on: a failed, b was lost, c failed, … —",
        "info     — the job was canceled, because of jobs that it depends on: a was canceled —",
        "info     — the job was canceled —",
        "info     — the job was canceled —",
    ]
    assert on_database("logs", job_id, "--level", "error").stdout.splitlines() == [lines[1], lines[3], lines[6]]
    page = json.loads(on_database("logs", job_id, "--json").stdout)
    assert page["lines"][3]["fields"] == {"attempt": 2, "reason": "lease expired", "worker": "w"}


@pytest.mark.slow
@pytest.mark.requirement("E11")
def test_a_log_is_followed_until_the_job_has_ended(start, add, database):
    job_id = add("q", "t")
    say(database, job_id, "info", "first")
    following = start("logs", job_id, "--follow", DL_DB_DSN=database.dsn)
    assert following.stdout.readline().rstrip().endswith("info     first")
    say(database, job_id, "info", "second")
    assert following.stdout.readline().rstrip().endswith("info     second")
    happen(database, job_id, "lost", {"attempt": 5, "reason": "lease expired"})
    assert following.stdout.readline().rstrip().endswith("error    — attempt 5 ended for good: worker lost —")
    say(database, job_id, "info", "last")
    end(database, job_id, "failed")
    stdout, stderr = following.communicate(timeout=20)
    assert (following.returncode, stdout.count("\n"), stdout.rstrip()[-4:], stderr) == (0, 1, "last", "")


def test_the_error_comes_early_in_a_line_of_the_journal_which_a_terminal_cuts(on_database, add, database):
    job_id = add("q", "t")
    database.psql(
        'update dl_job_events set kind = \'requeue\', payload = \'{"error": "x", "attempt": 1, "delay_s": 3.14678}\''
    )
    assert on_database("events", job_id).stdout.rstrip().endswith('{"attempt":1,"error":"x","delay_s":3.1}')
