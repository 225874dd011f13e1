"""The stages of docs/stages.md, as pasted, take their jobs to the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dataloader import open_client
from dataloader.testing import drain_queue, run_task

[CODE] = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "stages.md").read_text(), re.DOTALL)


@pytest.mark.requirement("R6")
async def test_the_stages_of_the_page_work_as_it_says(database):
    module: dict = {}
    exec(compile(CODE, "stages.md", "exec"), module)
    tasks = module["tasks"]
    await drain_queue(database.dsn, tasks)  # declares them
    results = {}
    async with open_client(database.dsn) as client:
        jobs = client.jobs
        added = {page: (await jobs.enqueue("document", {"page": page})).job_id for page in ("1.png", "2.txt", "empty")}
        runs = await drain_queue(database.dsn, tasks)
        for page, job_id in added.items():
            job = await jobs.get(job_id)
            results[page] = (job.status, job.result, job.moves)
    assert results == {
        "1.png": ("succeeded", {"indexed": "the text of the picture of 1.png"}, 2),
        "2.txt": ("succeeded", {"indexed": "the text of 2.txt"}, 1),
        "empty": ("succeeded", "nothing to index", None),
    }
    assert sorted(run.task for run in runs) == ["document.fetch"] * 3 + ["document.index"] * 2 + ["document.ocr"]
    run = await run_task(tasks, "document.ocr", {}, previous="a picture")
    assert (run.status, run.result) == ("queued", "the text of a picture")
