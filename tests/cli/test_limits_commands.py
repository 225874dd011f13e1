"""Commands for tasks and suppliers, over the database and a service (S1, S4, S5)."""

from __future__ import annotations

import json

import pytest

TASKS = """
INSERT INTO dl_tasks (task, layout, declared_by, limits, max_running, cost)
VALUES ('employee', 1, 'w', '{"max_running": 3}', 3, 1), ('plain', 1, 'w', NULL, NULL, NULL)
"""
SEED = """
[{"task_type": "employee", "work_periods": ["MON-FRI 00:00-06:00", "SAT-SUN 00:00-23:59"],
  "task_max_batch_size": 1, "next_task_batch_delay_ms": 1500, "next_try_priority": 1000,
  "next_try_delay_ms": 60000, "max_try_count": 3},
 {"task": "plain", "max_running": 2}]
"""


@pytest.fixture
def ask(on_database, database):
    """Return a function that runs a command that succeeds, and returns its output."""
    database.psql(TASKS)

    def ask(*arguments, **more):
        result = on_database(*arguments, **more)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return ask


@pytest.mark.requirement("S1", "S5")
def test_tasks_are_listed_limited_paused_and_removed(ask, on_database):
    assert ask("task", "pause", "plain") == "plain  closed: paused\n"
    lines = ask("task", "list").splitlines()
    assert lines[0].split() == ["TASK", "WAITING", "RUNNING", "STATE", "OPENS", "LEFT", "LIMITS"]
    assert lines[1].split() == ["employee", "0", "0", "open", "3", '{"max_running":3}']
    assert lines[2].split()[:5] == ["plain", "0", "0", "closed:", "paused"]
    assert ask("task", "resume", "plain") == "plain  open\n"
    said = ask("task", "set", "employee", "--max-running", "5", "--batch-size", "2", "--batch-delay", "0.5")
    assert said == 'employee  open  {"max_running":5,"batch_size":2,"batch_delay_s":0.5}\n'
    shown = ask("task", "show", "employee")
    assert 'declared     {"max_running":3}' in shown
    assert 'override     {"batch_size":2,"max_running":5,"batch_delay_s":0.5}' in shown
    ask("task", "set", "employee", "--unset", "max_running", "--unset", "batch_size", "--unset", "batch_delay_s")
    said = ask("task", "set", "employee", "--at-period-end", "stop", "--unset", "max_running")
    assert said == 'employee  open  {"at_period_end":"stop","max_running":3}\n'
    ask("task", "set", "employee", "--unset", "at_period_end")
    assert json.loads(ask("task", "show", "employee", "--json"))["override"] == {}
    ask("trigger", "q", "employee")
    refused = on_database("task", "remove", "employee")
    assert refused.returncode == 1
    assert refused.stderr == "1 jobs of the task 'employee' have not ended; keep or cancel them with `jobs`\n"
    assert ask("task", "remove", "employee", "--jobs", "cancel") == "employee  removed\n"
    assert on_database("task", "show", "employee").returncode == 4
    actions = [row["action"] for row in json.loads(ask("audit", "--json"))]
    assert actions[0] == "remove_task"


@pytest.mark.requirement("S1")
def test_a_file_sets_limits_of_many_tasks_by_either_names_all_or_none(ask, on_database, tmp_path):
    file = tmp_path / "limits.json"
    file.write_text(SEED)
    found = json.loads(ask("task", "apply", str(file), "--json"))
    assert [one["override"] for one in found] == [
        {
            "work_periods": ["MON-FRI 00:00-06:00", "SAT-SUN 00:00-23:59"],
            "batch_size": 1,
            "batch_delay_s": 1.5,
            "retry_priority": 1000,
            "retry_delay_s": 60.0,
            "max_attempts": 3,
        },
        {"max_running": 2},
    ]
    for text, says in (
        ("{}", "file: must be a JSON list of objects"),
        ('[{"work_periods": []}]', "[0].task: must be the name of a task, not None"),
        ('[{"task": "plain"}, {"task": "plain"}]', "[1].task: is repeated"),
        (
            '[{"task": "plain", "batch_size": 1, "task_max_batch_size": 1}]',
            "[0].task_max_batch_size: has the same meaning as",
        ),
        ('[{"task": "plain", "next_task_batch_delay_ms": "1"}]', "[0].next_task_batch_delay_ms: must be a number"),
        ('[{"task": "plain", "max_try_count": 0}]', "[0].max_attempts: must be an integer from 1 to 1,000,000, not 0"),
        ('[{"task": "plain", "next_try_delay_ms": -1}]', "[0].retry_delay_s: must be a number of seconds from 0"),
        (
            '[{"task": "plain", "colour": 3}]',
            "[0].colour: is not a limit of a task; the limits are task, work_periods,",
        ),
        ('[{"task": "plain", "max_running": 9}, {"task": "employee", "cost": -1}]', "[1].cost: must be"),
    ):
        refused = on_database("task", "apply", "-", stdin=text)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith(says)
    unknown = on_database("task", "apply", "-", stdin='[{"task": "plain", "cost": 2}, {"task": "nobody", "cost": 2}]')
    assert unknown.returncode == 4
    assert json.loads(ask("task", "show", "plain", "--json"))["override"] == {"max_running": 2}


@pytest.mark.requirement("S4", "S5")
def test_suppliers_are_made_shown_shared_paused_and_removed(ask, on_database, database):
    daily = on_database("supplier", "set", "hr", "--rate-limit", "100/60", "--rate-limit", "5/day/Europe/Berlin")
    assert daily.stdout == "hr  open  100 of 100/60 s, 5 of 5/day/Europe/Berlin\n"
    assert ask("supplier", "show", "hr").splitlines()[-1].split()[:4] == ["5", "day/Europe/Berlin", "0", "5"]
    made = on_database("supplier", "set", "hr", "--rate-limit", "100/60", "--rate-limit", "5/5000")
    assert made.stdout == "hr  open  100 of 100/60 s, 5 of 5/5000 s\n"
    assert made.stderr == "no task uses the supplier 'hr'; loads may use it\n"
    ask("task", "set", "employee", "--supplier", "hr", "--cost", "2")
    database.psql("SELECT dl_take_units('hr', 98, 9000)")
    shown = ask("supplier", "show", "hr")
    assert "tasks     employee" in shown
    [_, large, small] = shown.splitlines()[-3:]
    assert large.split() == ["100", "60", "98", "2", "now"]
    assert small.split()[:4] == ["5", "5000", "98", "0"]
    assert on_database("supplier", "remove", "hr").stderr.startswith("the supplier 'hr' is used by the tasks employee;")
    assert ask("supplier", "pause", "hr").startswith("hr  closed: paused")
    assert "closed: supplier paused" in ask("task", "list")
    assert ask("supplier", "resume", "hr").startswith("hr  open")
    [one] = json.loads(ask("supplier", "list", "--json"))
    assert (one["supplier"], one["tasks"]) == ("hr", ["employee"])
    ask("task", "set", "employee", "--unset", "supplier", "--unset", "cost")
    assert ask("supplier", "remove", "hr") == "hr  removed\n"
    assert ask("supplier", "list") == ""
    assert on_database("supplier", "set", "hr", "--rate-limit", "100").returncode == 2
    former = on_database("supplier", "set", "hr", "--budget", "100/60", "--budget", "5/5000")
    assert (former.returncode, "Error: the option --budget is now named --rate-limit\n" in former.stderr) == (2, True)
    unset = on_database("supplier", "set", "hr", "--unset", "budgets")
    assert (unset.returncode, "the value 'budgets' is now named rate_limits" in unset.stderr) == (2, True)
    assert on_database("supplier", "set", "hr").returncode == 2
