"""A Trio program with a durable queue inside: it triggers jobs, runs them, waits for their results, and drains.

Run it with `python examples/embedding.py`. With DL_DB_DSN it uses that database, else an embedded PostgreSQL in
.dataloader. `main` runs inside any Trio program, also one that has a trio-asyncio loop; it touches no signals. A
program that people stop by ^C should cancel a scope on it (`trio.open_signal_receiver`): left to itself Python raises
KeyboardInterrupt wherever it strikes, though not within the database driver. docs/embedding.md says more, of logs too.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import trio

from dataloader import Job, Settings, Tasks, Worker, embedded_postgres, open_supervisor

tasks = Tasks()


@tasks.task("text.measure", timeout_s=10)
async def measure(job: Job) -> dict[str, int]:
    words = job.args["text"].split()
    for n, _ in enumerate(words):
        await job.progress({"words": n + 1, "of": len(words)})
    return {"words": len(words)}


async def main(dsn: str) -> int:
    settings = Settings(db_dsn=dsn, workers=(Worker("text", 4),))
    async with open_supervisor(settings, tasks) as supervisor:
        jobs = [
            await supervisor.jobs.enqueue("text.measure", {"text": text}, queue="text")
            for text in ("one", "one two", "one two three")
        ]
        total = 0
        with trio.fail_after(30):
            for job in jobs:
                ended = await supervisor.jobs.wait(job.job_id)
                total += ended.result["words"]
        print(f"{total} words in {len(jobs)} jobs")
        report = await supervisor.drain()  # leaving the block does it too; this way one sees what came of it
        print("drained" if report.is_clean else f"did not stop: {report.stuck}")
    return total


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        dsn = os.environ.get("DL_DB_DSN") or stack.enter_context(embedded_postgres(Path(".dataloader"))).dsn
        trio.run(main, dsn)
