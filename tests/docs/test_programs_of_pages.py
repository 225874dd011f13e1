"""Programs of the pages that need only Python and a database run as they are shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trio
from conditions import patience_s

from dataloader import Job, Settings, Tasks, Worker, open_supervisor

DOCS = Path(__file__).parents[2] / "docs"


def programs(page: str, section: str = "") -> list[str]:
    """Return the blocks of Python of a page, or of one of its sections."""
    text = (DOCS / page).read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("page", ["limits.md", "scheduling.md", "process-isolation.md"])
def test_the_first_program_of_a_page_declares_its_tasks(page):
    module: dict = {}
    exec(compile(programs(page)[0], page, "exec"), module)
    assert module["tasks"]


@pytest.mark.slow
async def test_the_tests_of_the_page_on_processes_pass():
    module: dict = {}
    exec(compile(programs("processes.md")[0], "processes.md", "exec"), module)
    [tests] = programs("processes.md", "Testing")
    exec(compile(tests, "processes.md", "exec"), module)
    shown = [value for name, value in module.items() if name.startswith("test_")]
    for test in shown:
        await test()
    assert len(shown) == 2


@pytest.mark.slow
async def test_the_programs_of_the_page_on_python_add_a_job_and_retry_failed_ones(database, capsys):
    tasks = Tasks()

    @tasks.task("load.year", max_attempts=1)
    async def load_year(job: Job) -> int:
        if job.args["year"] == 1998:
            raise ValueError("no rates")
        return job.args["year"]

    over_http, over_database = programs("python.md")
    assert "http://127.0.0.1:8080" in over_http
    settings = Settings(db_dsn=database.dsn, workers=(Worker("load", 1),), port=0)
    async with open_supervisor(settings, tasks, with_web=True) as supervisor:
        program = over_http.replace("http://127.0.0.1:8080", supervisor.url)
        with trio.fail_after(patience_s()):
            await trio.to_thread.run_sync(exec, compile(program, "python.md", "exec"), {})
            failed = await supervisor.jobs.enqueue("load.year", {"year": 1998}, queue="load")
            await supervisor.jobs.wait(failed.job_id)
            await supervisor.jobs.pause("load")
            module: dict = {}
            program = over_database.replace("postgresql://jobs@localhost/jobs", database.dsn)
            exec(compile(program.removesuffix("trio.run(main)\n"), "python.md", "exec"), module)
            await module["main"]()
    first, error, *_, retried = capsys.readouterr().out.splitlines()
    assert first == "succeeded 1999"
    assert error.startswith(f"{failed.job_id} load.year ValueError: no rates")
    assert retried == "1 jobs are queued again"
