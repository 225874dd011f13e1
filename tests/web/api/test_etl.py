"""A job's log, runs, timelines, loads and failures over HTTP; the rows that loads write are written by SQL here.

tests/cli/test_etl.py has the same answers for real loads.
"""

from __future__ import annotations

import json
from uuid import uuid4

import attrs
import pytest

from dataloader import Tasks
from dataloader.flows.etl import Flow, Http, Load, Table, add_flows, add_loads

BEGIN = "2026-11-20T12:00:00Z"
SUMMARY = {
    "status": "succeeded_with_failures",
    "reason": "1 of 7 records failed, at postgresql://me:sesame@db/x",
    "counts": {"records": 7, "inserted": 5},
    "phases": {"requests": {"began_at": BEGIN, "ended_at": "2026-11-20T12:00:09Z", "busy_s": 1.5}},
    "tables": {"dim_day": {"status": "failed", "counts": {}, "error": "no such column"}},
    "failures": [],
}
REASON = "1 of 7 records failed, at postgresql://***@db/x"
NOBODY = "0197a1b2-c3d4-7e5f-8a6b-9c0d1e2f3a4b"
SECRET = "postgresql://me:sesame@db/x"


def literal(value):
    if value is None:
        return "NULL"
    return "'" + (value if isinstance(value, str) else json.dumps(value)) + "'"


@pytest.fixture
def insert(database):
    """Return a function that adds a row, and returns its column `returning`."""

    def insert(table, returning, **columns):
        values = ", ".join(map(literal, columns.values()))
        return database.psql(
            f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({values}) RETURNING {returning}"
        ).split()[0]

    return insert


@pytest.fixture
def add_run(insert):
    """Return a function that adds a run with its tasks (name, status) like a load, and returns its ID."""

    def add_run(tasks=(("rates", "succeeded"),), *, name="rates", kind="load", status="succeeded", job="succeeded"):
        job_ended_at = None if job in {"queued", "running"} else "2026-11-20 13:00Z"
        run_id = str(uuid4())
        job_columns = {"queue": "q", "task": name, "lock_key": "k", "status": job, "finished_at": job_ended_at}
        insert("dl_jobs", "job_id", job_id=run_id, **job_columns)
        end = {} if status == "running" else {"finished_at": BEGIN, "summary": SUMMARY}
        insert("dl_etl_runs", "run_id", run_id=run_id, name=name, kind=kind, status=status, started_at=BEGIN, **end)
        for ordinal, (task, how) in enumerate(tasks, 1):
            end = (
                {"finished_at": BEGIN, "summary": SUMMARY}
                if how in {"succeeded", "succeeded_with_failures", "failed"}
                else {}
            )
            began = {} if how == "waiting" else {"started_at": BEGIN}
            task_columns = {"ordinal": ordinal, "layer": "ODS", "task": task, "status": how, **began, **end}
            insert("dl_etl_tasks", "run_id", run_id=run_id, **task_columns)
        return run_id

    return add_run


@pytest.fixture
def add_failure(insert):
    """Return a function that adds a failure, and returns its number."""

    def add_failure(run_id, **columns):
        known = {"load": "rates", "segment": "all", "phase": "record", "key": "row 7", "error": "no such currency"}
        sample = '{"password": "sesame"}'
        return int(insert("dl_etl_failures", "failure_id", run_id=run_id, sample=sample, **(known | columns)))

    return add_failure


async def get(web, path, status=200, **query):
    answer = await web.client.get(f"/api/v1{path}", params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.fixture
def write_lines(database):
    """Return a function that writes events of a job: log lines as (level, load, message), or payloads of any kind."""

    def write_lines(job_id, *lines, kind="log"):
        for line in lines:
            payload = line
            if isinstance(line, tuple):
                level, load, message = line
                payload = {"level": level, "message": message, "fields": {"load": load, "token": "sesame"}}
            database.psql(
                "INSERT INTO dl_job_events (job_id, queue, kind, payload)"
                f" VALUES ('{job_id}', 'q', '{kind}', {literal(payload)})"
            )

    return write_lines


@pytest.mark.requirement("E11")
async def test_a_jobs_log_is_read_in_order_in_pages_without_its_other_events(open_web, write_lines):
    async with open_web() as web:
        job_id, other = await web.trigger(), await web.trigger()
        write_lines(other, ("info", "a", "of another job"))
        for number in range(3):
            write_lines(job_id, ("info", "a", f"line {number}"))
            write_lines(job_id, {"attempt": number}, kind="progress")
        first = await get(web, f"/jobs/{job_id}/logs", limit=2)
        assert [line["message"] for line in first["lines"]] == ["line 0", "line 1"]
        assert set(first["lines"][0]) == {"event_id", "ts", "kind", "level", "message", "fields"}
        second = await get(web, f"/jobs/{job_id}/logs", limit=2, after=first["next"])
        assert [line["message"] for line in second["lines"]] == ["line 2"]
        assert second["next"] is None
        seen = second["lines"][-1]["event_id"]
        assert await get(web, f"/jobs/{job_id}/logs", after=seen) == {"lines": [], "next": None}
        write_lines(job_id, ("info", "a", "later"))
        assert [line["message"] for line in (await get(web, f"/jobs/{job_id}/logs", after=seen))["lines"]] == ["later"]


@pytest.mark.requirement("E11")
async def test_a_log_is_filtered_by_how_serious_it_is_and_by_load(open_web, write_lines):
    async with open_web() as web:
        job_id = await web.trigger()
        write_lines(job_id, ("info", "a", "1"), ("warning", "b", "2"), ("error", "a", "3"), {"what": "is this"})

        async def found(**query):
            return [line["message"] for line in (await get(web, f"/jobs/{job_id}/logs", **query))["lines"]]

        assert await found() == ["1", "2", "3", ""]
        assert await found(level="info") == ["1", "2", "3"]
        assert await found(level="warning") == ["2", "3"]
        assert await found(level="error") == ["3"]
        assert await found(load="a") == ["1", "3"]
        assert await found(load="b", level="error") == []


@pytest.mark.requirement("E11", "Q16")
async def test_a_log_shows_no_secrets_and_lines_that_are_none_as_they_are(open_web, write_lines):
    async with open_web() as web:
        job_id = await web.trigger()
        write_lines(job_id, ("info", "a", f"at {SECRET}"), [1], {"message": "x", "level": 7, "fields": [2]})
        lines = (await get(web, f"/jobs/{job_id}/logs"))["lines"]
        assert (lines[0]["message"], lines[0]["fields"]) == ("at postgresql://***@db/x", {"load": "a", "token": "***"})
        assert (lines[1]["level"], lines[1]["message"], lines[1]["fields"]) == (None, "", {"payload": [1]})
        assert (lines[2]["level"], lines[2]["message"], lines[2]["fields"]) == (None, "x", {"fields": [2]})


async def test_a_page_of_a_log_looks_at_so_many_events_and_the_next_one_goes_on(open_web, database, write_lines):
    async with open_web() as web:
        job_id = await web.trigger()
        database.psql(
            f"INSERT INTO dl_job_events (job_id, queue, kind, payload) SELECT '{job_id}', 'q', 'log',"
            ' \'{"level": "info", "message": "x"}\' FROM generate_series(1, 10001)'
        )
        write_lines(job_id, ("error", "a", "at last"))
        first = await get(web, f"/jobs/{job_id}/logs", level="error")
        assert first["lines"] == []
        second = await get(web, f"/jobs/{job_id}/logs", level="error", after=first["next"])
        assert ([line["message"] for line in second["lines"]], second["next"]) == (["at last"], None)


async def test_a_log_of_no_job_is_a_404_and_a_level_that_is_none_a_422(open_web):
    async with open_web() as web:
        assert (await get(web, f"/jobs/{NOBODY}/logs", 404))["detail"].startswith("No job has this ID")
        job_id = await web.trigger()
        for wrong in ({"level": "loud"}, {"limit": 0}, {"limit": 1001}, {"after": -1}, {"colour": "red"}, {"load": ""}):
            problem = await get(web, f"/jobs/{job_id}/logs", 422, **wrong)
            assert [error["path"] for error in problem["errors"]] == list(wrong)


@pytest.mark.requirement("E11", "E12")
async def test_a_timeline_has_the_tasks_in_order_with_their_times_phases_and_counts(open_web, add_run):
    run_id = add_run(
        [("b", "succeeded_with_failures"), ("a", "waiting")],
        name="nightly",
        kind="flow",
        status="running",
        job="running",
    )
    async with open_web() as web:
        run = await get(web, f"/runs/{run_id}/timeline")
    tasks = run.pop("tasks")
    assert run.pop("next") is None
    assert run == {
        "run_id": run_id,
        "name": "nightly",
        "kind": "flow",
        "status": "running",
        "started_at": BEGIN,
        "finished_at": None,
        "reason": None,
        "counts": {},
    }
    assert tasks == [
        {
            "ordinal": 1,
            "layer": "ODS",
            "task": "b",
            "status": "succeeded_with_failures",
            "started_at": BEGIN,
            "finished_at": BEGIN,
            "reason": REASON,
            "phases": SUMMARY["phases"],
            "tables": SUMMARY["tables"],
            "counts": SUMMARY["counts"],
        },
        {
            "ordinal": 2,
            "layer": "ODS",
            "task": "a",
            "status": "waiting",
            "started_at": None,
            "finished_at": None,
            "reason": None,
            "phases": {},
            "tables": {},
            "counts": {},
        },
    ]


@pytest.mark.slow
@pytest.mark.requirement("E11")
@pytest.mark.parametrize("job", ["queued", "canceled", "lost", "failed"])
async def test_a_run_whose_job_has_ended_without_a_word_shows_the_jobs_status(open_web, add_run, job):
    run_id = add_run([("a", "succeeded"), ("b", "running"), ("c", "waiting")], status="running", job=job)
    ended = None if job == "queued" else "2026-11-20T13:00:00Z"
    async with open_web() as web:
        run = await get(web, f"/runs/{run_id}/timeline")
        assert (run["status"], run["finished_at"]) == (job, ended)
        assert [(task["status"], task["finished_at"]) for task in run["tasks"]] == [
            ("succeeded", BEGIN),
            (job, ended),
            ("waiting", None),
        ]
        assert (await get(web, "/runs"))["runs"][0]["status"] == job
        assert (await get(web, "/loads/b"))["last_run"]["status"] == job


async def test_a_timeline_shows_no_secret_that_the_name_of_a_task_has(open_web, add_run):
    run_id = add_run([(SECRET, "succeeded")])
    async with open_web() as web:
        [task] = (await get(web, f"/runs/{run_id}/timeline"))["tasks"]
    assert task["task"] == "postgresql://***@db/x"


async def test_a_run_shows_its_own_end_even_if_its_job_is_queued_again(open_web, add_run):
    run_id = add_run(status="failed", job="queued")
    async with open_web() as web:
        run = await get(web, f"/runs/{run_id}/timeline")
        assert (run["status"], run["finished_at"]) == ("failed", BEGIN)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["timeline", "failures"])
async def test_an_id_that_is_no_run_is_a_404(open_web, path):
    async with open_web() as web:
        job_id = await web.trigger()
        for run_id in (job_id, NOBODY):
            problem = await get(web, f"/runs/{run_id}/{path}", 404)
            assert problem["detail"].startswith(f"no run has the ID {run_id}: its job is not a load or flow")
        assert (await get(web, f"/runs/17/{path}", 404))["status"] == 404


@pytest.mark.requirement("E12")
async def test_runs_are_listed_newest_first_by_name_in_pages(open_web, add_run, database):
    ids = [add_run(name=name) for name in ("a", "b", "a", "b", "a")]
    for number, run_id in enumerate(ids[:3]):  # the last three began at the same time
        database.psql(f"UPDATE dl_etl_runs SET started_at = '2026-11-0{number + 1}' WHERE run_id = '{run_id}'")
    newest = sorted(ids[3:], reverse=True) + ids[2::-1]
    async with open_web() as web:

        async def pages(**query):
            found, after = [], {}
            while after is not None:
                page = await get(web, "/runs", limit=2, **query, **after)
                assert len(page["runs"]) <= 2
                found += [run["run_id"] for run in page["runs"]]
                after = page["next"] and {"after": page["next"]}
            return found

        assert await pages() == newest
        assert await pages(name="a") == [run_id for run_id in newest if run_id in ids[::2]]
        assert await pages(name="none") == []
        assert [error["path"] for error in (await get(web, "/runs", 422, after="x"))["errors"]] == ["after"]


@pytest.mark.requirement("E10", "Q16")
async def test_failures_of_a_run_are_all_listed_and_those_of_a_load_until_they_are_solved(
    open_web, add_run, add_failure
):
    first, second = add_run(), add_run()
    solved = add_failure(first, solved_at=BEGIN)
    open_ = [add_failure(first, error=f"at {SECRET}"), add_failure(second), add_failure(second)]
    add_failure(second, load="other")
    async with open_web() as web:

        async def found(path, **query):
            return [failure["failure_id"] for failure in (await get(web, path, **query))["failures"]]

        assert await found(f"/runs/{first}/failures") == [solved, open_[0]]
        assert await found("/loads/rates/failures") == open_
        assert await found("/loads/rates/failures", limit=2) == open_[:2]
        assert await found("/loads/rates/failures", after=open_[1]) == open_[2:]
        assert await found("/loads/rates/failures", after=open_[2]) == []
        shown = (await get(web, f"/runs/{first}/failures"))["failures"][1]
        assert shown | {"failed_at": ""} == {
            "failure_id": open_[0],
            "run_id": first,
            "load": "rates",
            "segment": "all",
            "phase": "record",
            "key": "row 7",
            "error": "at postgresql://***@db/x",
            "sample": '{"password": "***"}',
            "failed_at": "",
            "resolved_at": None,
            "solved_at": None,
            "replaced_by": None,
        }
        assert (await get(web, "/loads/none/failures", 404))["detail"] == "no load 'none' has run in this database."


@pytest.mark.requirement("E6", "E10")
async def test_a_load_shows_its_cursor_its_last_run_and_its_failures(open_web, add_run, add_failure, database):
    add_run(job="failed", status="failed")
    last = add_run([("rates", "running")], status="running", job="running")
    database.psql(f"UPDATE dl_etl_tasks SET started_at = now() WHERE run_id = '{last}'")
    add_run([("rates", "waiting")], name="nightly", status="running", job="running")
    add_failure(last)
    add_failure(last, solved_at=BEGIN)
    database.psql(
        "INSERT INTO dl_load_state (load, state, run_id) VALUES"
        f""" ('rates', '{{"kind": "window", "upto": "2026-11-01T00:00:00+00:00"}}', '{last}')"""
    )
    async with open_web() as web:
        load = await get(web, "/loads/rates")
        assert (load["load"], load["watermark"], load["unresolved"]) == ("rates", "2026-11-01T00:00:00Z", 1)
        assert (load["upto"], load["unsolved"]) == (load["watermark"], load["unresolved"])
        assert (load["last_run"]["run_id"], load["last_run"]["status"]) == (last, "running")
        assert (await get(web, "/loads/none", 404))["detail"] == "no load 'none' has run in this database."
        database.psql("UPDATE dl_etl_runs SET kind = 'flow' WHERE name = 'nightly'")
        flow = (await get(web, "/loads/nightly", 404))["detail"]
        assert flow.startswith("'nightly' is a flow, not a load; `dataloader jobs ")
        assert (await get(web, "/loads/a%00b", 422))["errors"][0]["path"] == "load"


async def test_failures_are_counted_up_to_a_thousand(open_web, add_run, database):
    database.psql(
        "INSERT INTO dl_etl_failures (run_id, load, segment, phase, key, error)"
        f" SELECT '{add_run()}', 'rates', 'all', 'record', i, 'x' FROM generate_series(1, 1005) AS i"
    )
    async with open_web() as web:
        assert (await get(web, "/loads/rates"))["unsolved"] == 1_000


@pytest.mark.slow
async def test_loads_are_listed_by_name_whether_they_have_runs_a_cursor_or_both(open_web, add_run, database):
    add_run([("a/b ü", "succeeded"), ("c", "succeeded")])
    add_run([("c", "succeeded"), ("e", "waiting")], status="running", job="running")
    for load in ("c", "d"):
        database.psql(
            "INSERT INTO dl_load_state (load, state, run_id)"
            f" SELECT '{load}', jsonb_build_object('kind', 'window', 'upto', now()), gen_random_uuid()"
        )
    async with open_web() as web:
        loads = (await get(web, "/loads"))["loads"]
        assert [load["load"] for load in loads] == ["a/b ü", "c", "d", "e"]
        assert [load["last_run"] is not None for load in loads] == [True, True, False, False]
        assert [load["upto"] is not None for load in loads] == [False, True, True, False]
        for load in loads:
            assert await get(web, f"/loads/{load['load']}".replace("a/b ü", "a%2Fb%20%C3%BC")) == load
        first = await get(web, "/loads", limit=3)
        assert [load["load"] for load in first["loads"]] == ["a/b ü", "c", "d"]
        second = await get(web, "/loads", limit=3, after=first["next"])
        assert ([load["load"] for load in second["loads"]], second["next"]) == (["e"], None)
        assert [error["path"] for error in (await get(web, "/loads", 422, limit=201))["errors"]] == ["limit"]


@pytest.mark.parametrize("kind", ["load", "flow"])
async def test_args_that_a_load_refuses_are_refused_in_each_request(open_web, kind):
    tasks = Tasks()
    load = Load("rates", Http("http://127.0.0.1:9"), Table("rate", key="day"))
    if kind == "load":
        add_loads(tasks, load)
    else:
        add_flows(tasks, Flow(name="rates", layers={"ods": [attrs.evolve(load, name="ods.rates")]}))
    bad = {"from": "2026-13-01"}
    message = "must be a date or a timestamp, such as 2026-01-31, not '2026-13-01'"
    job = {"task": "rates", "lock_key": None, "args": bad}
    good = job | {"args": {"from": "2026-12-01", "pipeline": {"rate_min": 1}}}
    async with open_web(tasks=tasks) as web:
        for method, path, body, field in (
            ("POST", "/api/v1/jobs/trigger", job, "args.from"),
            ("POST", "/api/v1/jobs/trigger/batch", {"jobs": [good, job]}, "jobs[1].args.from"),
            ("POST", "/api/v1/tasks/rates/trigger", bad, "from"),
            ("PUT", "/api/v1/schedules/rates", {"task": "rates", "every_s": 60, "args": bad}, "args.from"),
        ):
            answer = await web.client.request(method, path, json=body)
            assert (answer.status_code, answer.json()["errors"]) == (422, [{"path": field, "message": message}])
