"""Commands that change jobs and queues, on a real database."""

from __future__ import annotations

import json
import os
import pty

import pytest

MISSING = "01900000-0000-7000-8000-000000000000"


def statuses(database):
    return database.psql("select status from dl_jobs order by created_at").splitlines()


@pytest.mark.requirement("Q4")
def test_several_jobs_are_canceled_though_one_is_missing(on_database, add, database):
    first, second = add("q", "t"), add("q", "t")
    result = on_database("cancel", first, MISSING, second)
    assert result.returncode == 4
    assert result.stdout == f"{first}  canceled\n{second}  canceled\n"
    assert result.stderr == f"no job has the ID {MISSING}\n"
    assert statuses(database) == ["canceled", "canceled"]


@pytest.mark.requirement("Q4")
def test_if_the_database_refuses_one_of_several_jobs_each_outcome_is_printed(on_database, add, database):
    first, second, third = add("q", "t"), add("q", "t"), add("q", "t")
    database.psql(
        "create function refuse() returns trigger language plpgsql as $$ begin raise 'refused on purpose'; end $$;"
        f"create trigger refuse before update on dl_jobs for each row when (old.job_id = '{second}')"
        " execute function refuse()"
    )
    result = on_database("cancel", first, second, third)
    assert (result.returncode, result.stdout) == (1, f"{first}  canceled\n")
    refused, untried = result.stderr.splitlines()
    assert refused.startswith(f"job {second}: ")
    assert "refused on purpose" in refused
    assert untried == f"job {third}: not changed"


@pytest.mark.requirement("Q4")
def test_a_job_that_has_ended_is_left_as_it_is(on_database, add, database):
    job_id = add("q", "t")
    database.psql("update dl_jobs set status = 'succeeded', finished_at = now()")
    result = on_database("cancel", job_id)
    assert (result.returncode, result.stdout) == (0, f"{job_id}  succeeded\n")


def test_retry_queues_an_ended_job_again_and_refuses_a_queued_one(on_database, add, database):
    job_id = add("q", "t")
    database.psql("update dl_jobs set status = 'failed', finished_at = now(), attempt = 5")
    assert json.loads(on_database("retry", job_id, "--json").stdout)[0]["attempt"] == 0
    assert statuses(database) == ["queued"]
    refused = on_database("retry", job_id)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"job {job_id} is queued")


@pytest.mark.requirement("Q4")
def test_jobs_with_an_endless_lease_can_be_retried_by_force_or_canceled(on_database, add, database):
    retried, canceled = add("q", "t"), add("q", "t")
    database.psql("update dl_jobs set status = 'running', heartbeat_at = now() - interval '1 hour'")
    refused = on_database("retry", retried)
    assert (refused.returncode, "its lease never expires; cancel it, or retry it with force" in refused.stderr) == (
        1,
        True,
    )
    assert on_database("retry", "--force", retried).stdout == f"{retried}  queued\n"
    assert on_database("cancel", canceled).stdout == f"{canceled}  canceled\n"
    refused = on_database("retry", "--force", "--all", "--queue", "q", "--yes")
    assert (refused.returncode, "--force needs JOB_IDs; it cannot be used with --all" in refused.stderr) == (2, True)


def test_a_filter_changes_the_jobs_that_it_finds_and_no_others(on_database, add, database):
    for queue in ("a", "b", "a"):
        add(queue, "t")
    assert on_database("cancel", "--all", "--queue", "a", "--yes").stdout == "2 jobs\n"
    assert statuses(database) == ["canceled", "queued", "canceled"]
    result = on_database("retry", "--all", "--status", "canceled", "--yes", "--json")
    assert json.loads(result.stdout) == {"changed": 2}
    assert statuses(database) == ["queued"] * 3


@pytest.mark.requirement("P12")
def test_jobs_that_wake_processes_are_none_of_many_that_are_canceled(on_database, add, database):
    add("process.pay", "t")
    assert on_database("process", "start", "pay", "1", "--timeout", "0").returncode == 0
    for arguments in (("cancel", "--all"), ("bulk", "cancel")):
        result = on_database(*arguments, "--queue", "process.pay", "--yes")
        assert result.stdout.endswith("1 job\n" if arguments[0] == "cancel" else "  0 jobs\n")
        assert result.stderr == "1 job that wakes a durable process is skipped: stop its step, or remove the process.\n"
    assert sorted(statuses(database)) == ["canceled", "queued"]


def test_queued_jobs_are_made_due_and_get_another_priority_by_their_ids_or_a_filter(on_database, add, database):
    first, second = [add("q", "t", "--available-at", "1d") for _ in range(2)]
    assert on_database("run-now", first).stdout == f"{first}  queued\n"
    assert on_database("priority", "7", first, second).stdout == f"{first}  queued\n{second}  queued (waits for time)\n"
    assert on_database("run-now", "--all", "--queue", "q", "--yes").stdout == "1 job\n"
    all_of_q = ("--all", "--queue", "q", "--yes", "--json")
    assert json.loads(on_database("priority", "3", *all_of_q).stdout) == {"changed": 2}
    assert database.psql("select distinct priority, available_at <= now() from dl_jobs") == "3|t"
    refused = on_database("priority", "9999999999", first)
    assert (refused.returncode, "range" in refused.stderr) == (2, True)


def test_run_now_prints_why_the_job_still_waits(on_database, add, database):
    locked, limited = add("q", "t"), add("q", "a task")
    database.psql("update dl_jobs set waits_for = 'lock', lock_key = 'k', keyed = true where task = 't'")
    database.psql("insert into dl_lanes (lane) values ('a task')")
    database.psql("update dl_jobs set waits_for = 'limit', lane = task where task = 'a task'")
    first, second = on_database("run-now", locked, limited).stdout.splitlines()
    assert first == f"{locked}  queued (waits for lock): another job with the same lock_key is running"
    why = "a limit of its task or supplier is reached; see `dataloader task show 'a task'`"
    assert second == f"{limited}  queued (waits for limit): {why}"
    assert "limit: No running worker of the queue q has the task a task.\n" in on_database("status", limited).stdout


@pytest.mark.slow
@pytest.mark.requirement("R2", "S6")
def test_failed_jobs_are_listed_by_error_retried_and_in_the_error_log(on_database, add, database):
    ids = [add("q", "t") for _ in range(3)]
    database.psql("update dl_jobs set status = 'running', claimed_by = 'w'")
    database.psql("update dl_jobs set status = 'failed', error = format(E'KeyError: %L\\n\\nTraceback', job_id)")

    def errors(*arguments):
        result = on_database("errors", *arguments)
        assert (result.returncode, result.stderr) == (0, ""), result.stderr
        return result.stdout

    [group] = json.loads(errors("list", "--json"))["groups"]
    assert (group["error"], group["jobs"]) == ("KeyError: …", 3)
    assert "KeyError: …" in errors("list", "--task", "t", "--state", "failed")
    assert f"KeyError: '{ids[0]}'" in errors("list", "--exact")
    assert len(on_database("jobs", "--error-group", group["group"]).stdout.splitlines()) == 4
    assert f"KeyError: '{ids[0]}'" in errors("log", "--job", ids[0])
    assert len(json.loads(errors("log", "--group", group["group"], "--json"))["errors"]) == 3
    unsure = on_database("errors", "retry", group["group"])
    assert (unsure.returncode, "pass --yes" in unsure.stderr) == (2, True)
    assert errors("retry", group["group"], "--state", "waiting", "--yes") == "0 jobs\n"
    assert errors("retry", group["group"], "--at", "1h", "--spread", "60", "--yes") == "3 jobs\n"
    assert database.psql("select count(*) from dl_jobs where available_at > now() + interval '50 min'") == "3"
    assert on_database("errors", "list").stderr == "no errors\n"
    unknown = on_database("errors", "retry", "00c8f1de4a91b37e", "--yes")
    none_failed = "the error log has no job with the error '00c8f1de4a91b37e'\n"
    assert (unknown.returncode, unknown.stdout, unknown.stderr) == (4, "", none_failed)


def test_a_change_without_a_clear_selection_of_jobs_is_refused(on_database, add, database):
    add("q", "t")
    for options in [
        (),
        ("--queue", "q"),
        ("--all", "--yes"),
        ("--all", "--queue", "q"),  # there is no terminal for the confirmation
        ("--all", "--queue", "q", "--yes", MISSING),
        ("--queue", "q", MISSING),
    ]:
        assert on_database("cancel", *options).returncode == 2, options
        assert statuses(database) == ["queued"], options


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "code", "after"), [("y", 0, "canceled"), ("n", 1, "queued")])
def test_a_terminal_is_asked_first(start, add, database, answer, code, after):
    add("q", "t")
    keyboard, terminal = pty.openpty()
    try:
        asking = start("cancel", "--all", "--queue", "q", stdin=terminal, DL_DB_DSN=database.dsn)
        os.write(keyboard, f"{answer}\n".encode())
        _, question = asking.communicate(timeout=20)
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert "cancel all jobs with queue q? [y/N]" in question
    assert asking.returncode == code
    assert statuses(database) == [after]


def test_the_audit_names_who_did_what_to_which_job(on_database, add):
    job_id = add("q", "t")
    on_database("cancel", job_id)
    on_database("pause", "q")
    latest, first = json.loads(on_database("audit", "--json").stdout)
    assert (latest["action"], latest["detail"]) == ("pause", {"queue": "q"})
    assert (first["action"], first["job_id"]) == ("cancel", job_id)
    user, _, host = first["actor"].partition("@")
    assert user
    assert host == os.uname().nodename
    older = json.loads(on_database("audit", "--json", "--before", latest["audit_id"]).stdout)
    assert older == [first]


def test_a_queue_is_paused_and_resumed_with_a_warning_if_it_has_no_worker(on_database, add, database):
    add("q", "t")

    def queues():
        return json.loads(on_database("queues", "--json").stdout)

    paused = on_database("pause", "q")
    assert paused.stdout == "q  paused\n"
    assert paused.stderr.startswith("no worker serves the queue 'q'")
    database.psql("insert into dl_workers (worker, host, pid, version, queues) values ('w', 'h', 1, '1', '{\"q\": 1}')")
    assert on_database("pause", "q").stderr == ""
    assert [(queue["queue"], queue["paused"], queue["ready"]) for queue in queues()] == [("q", True, 1)]
    assert on_database("resume", "q").stdout == "q  resumed\n"
    assert [queue["paused"] for queue in queues()] == [False]


def test_recently_seen_workers_are_listed(on_database, database):
    database.psql(
        "insert into dl_workers (worker, host, pid, version, queues, seen_at) values"
        """ ('w1', 'h', 7, '0', '{"q": 2}', now()), ('w2', 'h', 8, '0', '{}', now() - interval '1 hour')"""
    )
    assert [worker["worker"] for worker in json.loads(on_database("workers", "--json").stdout)] == ["w1"]
    header, row = on_database("workers").stdout.splitlines()
    assert header.split()[0] == "WORKER"
    assert row.split()[0] == "w1"


def test_an_empty_list_is_said_on_stderr_and_is_an_empty_document(on_database):
    text = on_database("queues")
    assert (text.stdout, text.stderr) == ("", "no queues\n")
    assert on_database("queues", "--json").stdout == "[]\n"


@pytest.mark.requirement("S6")
def test_duplicates_are_listed_and_canceled_but_for_the_best(on_database):
    for _ in range(3):
        on_database("trigger", "q", "t", "--args", '{"a": 1}')
    [group] = json.loads(on_database("duplicates", "--json").stdout)
    assert (group["jobs"], group["task"], group["args"]) == (3, "t", {"a": 1})
    assert group["best"] in on_database("duplicates").stdout
    refused = on_database("duplicates", "--cancel")
    assert (refused.returncode, "task: is required" in refused.stderr) == (2, True)
    assert json.loads(on_database("duplicates", "--task", "t", "--cancel", "--json").stdout) == {"canceled": 2}
    assert json.loads(on_database("duplicates", "--json").stdout) == []
