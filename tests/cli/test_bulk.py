"""Commands for bulk operations, on a real database (U16)."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.requirement("E11")

ADD = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, finished_at)
SELECT gen_random_uuid(), 'q', 't', i::text, 'failed', now() FROM generate_series(1, 3) AS i
"""


@pytest.mark.slow
def test_an_act_is_begun_followed_and_stopped(on_database, database):
    def bulk(*arguments):
        result = on_database("bulk", *arguments)
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout

    assert on_database("bulk", "list").stderr == "no bulk operations\n"
    database.psql(ADD)
    begun = bulk("retry", "--queue", "q", "--status", "failed", "--yes")
    bulk_id, said = begun.split("  ")
    assert said == "3 jobs\n"
    shown = bulk("show", bulk_id)
    assert "act        retry" in shown
    assert "state      open" in shown
    assert json.loads(bulk("stop", bulk_id, "--json"))["state"] == "stopped"
    job_id = database.psql("SELECT job_id FROM dl_jobs LIMIT 1")
    second = json.loads(bulk("priority", "7", job_id, "--yes", "--json"))
    assert (second["action"], second["priority"], second["filter"]) == ("set_priority", 7, {"chosen": 1})
    [newer, older] = json.loads(bulk("list", "--json"))
    assert (newer["bulk_id"], older["bulk_id"]) == (second["bulk_id"], bulk_id)
    assert on_database("bulk", "show", job_id).returncode == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["cancel", "--yes"], "give either JOB_IDs or a filter"),
        (
            ["cancel", "01980000-0000-7000-8000-000000000001", "--queue", "q", "--yes"],
            "give either JOB_IDs or a filter",
        ),
        (["cancel", "--queue", "q"], "pass --yes"),
    ],
)
def test_invalid_arguments_of_a_bulk_operation_are_refused(on_database, arguments, says):
    result = on_database("bulk", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert says in result.stderr
