"""Commands for schedules, on a real database and through a service (R7)."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.requirement("R7")


@pytest.mark.slow
def test_a_schedule_from_its_set_to_its_removal(on_database, database):
    def schedule(*arguments):
        result = on_database("schedule", *arguments)
        pointed_out = "no process has declared the task 'report'; check its name\n"
        assert (result.returncode, result.stderr) == (0, pointed_out if arguments[0] == "set" else "")
        return result.stdout

    assert on_database("schedule", "list").stderr == "no schedules\n"
    said = schedule(
        "set", "nightly", "--task", "report", "--cron", "0 6 * * *", "--zone", "Europe/Moscow", "--queue", "q"
    )
    assert said.startswith("nightly  on  next ")
    assert "0 6 * * * Europe/Moscow" in schedule("list")
    paused = schedule("pause", "nightly")
    assert (paused.startswith("nightly  paused: by "), "next" in paused) == (True, False)
    database.psql("UPDATE dl_schedules SET next_at = '2020-01-01'")
    listed, shown = schedule("list"), schedule("show", "nightly")
    assert (listed.splitlines()[1].endswith("  paused"), "2020" in listed + shown) == (True, False)
    assert "state      paused: by " in shown
    resumed = schedule("resume", "nightly")
    assert (resumed.startswith("nightly  on  next 20"), "2020" in resumed) == (True, False)
    database.psql("UPDATE dl_schedules SET next_at = now() + interval '1 h'")
    assert len(schedule("next", "nightly", "--number", "3").splitlines()) == 3
    assert schedule("run", "nightly").endswith("  queued\n")
    tried = schedule("backfill", "nightly", "--from", "3d", "--to", "0s", "--dry-run")
    assert tried.splitlines()[-1] == "3 jobs would be enqueued; 0 times already have one"
    added = json.loads(schedule("backfill", "nightly", "--from", "3d", "--to", "0s", "--json"))
    assert len(added["times"]) == 3
    assert database.psql("select count(*) from dl_jobs where schedule = 'nightly'") == "4"
    shown = schedule("show", "nightly")
    assert "task       report (not declared by any process)" in shown
    assert "backfilled" in shown
    [one] = json.loads(schedule("list", "--json"))
    assert (one["name"], one["spec"]["cron"]) == ("nightly", "0 6 * * *")
    assert schedule("remove", "nightly") == "nightly  removed\n"
    assert on_database("schedule", "show", "nightly").returncode == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["set", "x", "--task", "t"], "every_s: must have either cron or every_s"),
        (["set", "x", "--task", "t", "--cron", "61 * * * *"], "cron: must have five fields"),
        (["set", "x", "--task", "t", "--every", "0"], "every_s: must be a number of seconds from 1"),
        (["set", "x", "--task", "t", "--every", "5", "--zone", "Mars"], "zone: must be a time zone of the IANA"),
    ],
)
def test_an_invalid_schedule_is_refused_in_one_line(on_database, arguments, says):
    result = on_database("schedule", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith(says)


def test_a_former_overlap_policy_is_refused_with_its_new_name(on_database):
    result = on_database("schedule", "set", "x", "--task", "t", "--every", "60", "--overlap", "parallel")
    assert (result.returncode, result.stdout) == (2, "")
    assert "Invalid value for '--overlap': the value 'parallel' is now named allow" in result.stderr


def test_an_unreadable_schedule_is_listed_with_its_error(on_database, database):
    database.psql(
        "INSERT INTO dl_schedules (name, spec, task, origin, stored_by, next_at)"
        """ VALUES ('odd', '{"task": "t", "every_s": "x"}', 't', 'code', 'test', now()),"""
        """ ('fine', '{"task": "t", "every_s": 60}', 't', 'code', 'test', now())"""
    )
    fine, odd = on_database("schedule", "list").stdout.splitlines()[1:]
    assert "every 60 s" in fine
    assert "unreadable" in odd
    shown = on_database("schedule", "show", "odd")
    assert (shown.returncode, "unreadable: every_s: must be a number" in shown.stdout) == (0, True)
