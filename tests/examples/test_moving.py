"""The examples of docs/moving, run: the features of another tool work here as the pages say."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import trio
from conditions import patience_s, until
from source_app import Answer, open_source_app

from dataloader import JobFilter, Settings, Worker, open_client, open_supervisor
from dataloader.testing import drain_queue, run_task

ROOT = Path(__file__).parents[2]
MOVING = ROOT / "examples" / "moving"
PAGES = ROOT / "docs" / "moving"
PROCRASTINATE = """
CREATE TYPE procrastinate_job_status
  AS ENUM ('todo', 'doing', 'succeeded', 'failed', 'cancelled', 'aborting', 'aborted');
CREATE TABLE procrastinate_jobs (
  id bigserial PRIMARY KEY, queue_name varchar(128) NOT NULL, task_name varchar(128) NOT NULL,
  priority int NOT NULL DEFAULT 0, lock text, queueing_lock text, args jsonb NOT NULL DEFAULT '{}',
  status procrastinate_job_status NOT NULL DEFAULT 'todo', scheduled_at timestamptz, attempts int NOT NULL DEFAULT 0);
INSERT INTO procrastinate_jobs (queue_name, task_name, priority, lock, args, status, scheduled_at) VALUES
  ('sync', 'sync', 0, 'account:7', '{"account": 7}', 'todo', NULL),
  ('sync', 'sync', 5, NULL, '{"account": -1}', 'todo', NULL),
  ('sync', 'cleanup', 0, NULL, '{}', 'todo', now() + interval '1 day'),
  ('sync', 'sync', 0, NULL, '{"account": 9}', 'succeeded', NULL);
"""


def load(name):
    spec = importlib.util.spec_from_file_location(f"moving_{name}", MOVING / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(MOVING.glob("from_*")), ids=lambda path: path.name)
def test_the_page_shows_the_example_as_it_is(path):
    text = path.read_text()
    language, code = ("sql", text) if path.suffix == ".sql" else ("python", text.split('"""\n', 1)[1].lstrip())
    assert f"```{language}\n{code}```" in (PAGES / f"{path.stem.replace('_', '-')}.md").read_text()


@pytest.mark.slow
async def test_what_was_celerys_chord_chain_and_countdown_comes_to_the_same(database):
    moved = load("from_celery")
    await drain_queue(database.dsn, moved.tasks)  # declares the tasks
    with open_source_app() as source:
        for number in range(3):
            source.put(f"/{number}", Answer(b"." * number))
        async with open_client(database.dsn) as client:
            jobs = client.jobs
            await jobs.enqueue(moved.load_album, {"urls": [f"{source.url}/{number}" for number in range(3)]})
            await jobs.enqueue("document", {"path": "a.txt"})
            [later] = await jobs.enqueue_many([moved.later(f"{source.url}/0")])
            runs = await drain_queue(database.dsn, moved.tasks)
            [summary] = (await jobs.find(JobFilter(task="album.summary"))).jobs
            waiting = await jobs.get(later.job_id)
    assert summary.result == {"images": 3, "bytes": 3}
    [document] = [run.result for run in runs if run.task == "document.store"]
    assert document == {"path": "a.txt", "text": "TEXT OF A.TXT"}
    assert (waiting.status, waiting.waits_for, waiting.priority) == ("queued", "time", 10)
    with open_source_app() as source:
        source.put("/", Answer(status=503))
        run = await run_task(moved.tasks, moved.fetch, moved.Image(f"{source.url}/"), attempt=3)
    assert run.status == "queued"
    assert 4 <= run.delay_s <= 4.4


async def test_procrastinates_waiting_jobs_are_moved_once_and_run_here(database, raw):
    moved = load("from_procrastinate")
    await drain_queue(database.dsn, moved.tasks)
    await raw.execute(PROCRASTINATE)
    script = (MOVING / "from_procrastinate.sql").read_text()
    for _ in range(2):
        database.psql(script)
    rows = await raw.fetch(
        "SELECT task, priority, lock_key, args, waits_for::text FROM dl_jobs ORDER BY created_at, job_id"
    )
    assert [(row["task"], row["priority"], json.loads(row["args"])) for row in rows] == [
        ("sync", 100, {"account": 7}),
        ("sync", 95, {"account": -1}),
        ("cleanup", 100, {}),
    ]
    assert [rows[0]["lock_key"], rows[1]["lock_key"], rows[2]["waits_for"]] == ["account:7", "account:-1", "time"]
    assert await raw.fetchval("SELECT count(*) FROM procrastinate_jobs WHERE status = 'cancelled'") == 3
    runs = await drain_queue(database.dsn, moved.tasks)
    assert sorted((run.status, run.result or run.error) for run in runs) == [
        ("failed", "there is no such account"),
        ("succeeded", "account 7 is in sync"),
    ]
    assert (await run_task(moved.tasks, "cleanup")).result.startswith("all before ")


@pytest.mark.slow
async def test_what_was_a_script_of_cron_keeps_its_output_and_is_stopped_with_its_job(database, tmp_path):
    moved = load("from_cron")

    def python(code):
        return moved.Script([sys.executable, "-c", code])

    run = await run_task(moved.tasks, moved.run_script, python("print('loaded 3'); print('done')"))
    assert (run.status, [line.message for line in run.log]) == ("succeeded", ["loaded 3", "done"])
    run = await run_task(moved.tasks, moved.run_script, python("raise SystemExit(3)"))
    assert run.status == "queued"
    assert run.error.startswith(f"RuntimeError: {sys.executable} ended with 3\n")
    run = await run_task(moved.tasks, moved.run_script, python("raise SystemExit(64)"))
    assert run.status == "failed"
    begun, stopped = tmp_path / "begun", tmp_path / "stopped"
    code = f"""
import signal, sys, time
def stop(*_):
    open({str(stopped)!r}, "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, stop)
open({str(begun)!r}, "w").close()
time.sleep(60)"""
    settings = Settings(db_dsn=database.dsn, workers=(Worker("scripts", 1),))
    async with open_supervisor(settings, moved.tasks) as supervisor:
        added = await supervisor.jobs.enqueue(moved.run_script, python(code))

        async def has_begun():
            return begun.exists()

        await until(has_begun)
        await supervisor.jobs.cancel(added.job_id)
        with trio.fail_after(patience_s()):
            assert (await supervisor.jobs.wait(added.job_id)).status == "canceled"
    assert stopped.exists()


def test_each_line_of_the_crontab_is_a_schedule():
    text = (MOVING / "from_cron.py").read_text()
    lines = [line.split("#")[0].split() for line in re.findall(r"^# ([\d*].*)$", text, re.MULTILINE)]
    schedules = load("from_cron").tasks.schedules
    assert len(lines) == len(schedules) == 3
    for line, schedule in zip(lines, schedules, strict=True):
        assert schedule.cron.replace("MON-FRI", "1-5").split() == line[:5]
        assert shlex.join(schedule.args["argv"]) in " ".join(line)
