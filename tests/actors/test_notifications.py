"""A process with targets notifies them of failures, also of those that a killed process has left (S6)."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest
import trio
from conditions import until

from dataloader import GiveUp, Tasks
from dataloader.actors.notifier import Notifier
from dataloader.store.queue import notices
from dataloader.supervisor import helper_parts

pytestmark = pytest.mark.requirement("S6")


@pytest.mark.slow
async def test_failures_are_notified_except_those_of_notification_jobs(open_worker, raw, tmp_path, monkeypatch):
    monkeypatch.setattr(helper_parts, "Notifier", partial(Notifier, gather_s=0.2))
    out = tmp_path / "out"
    code = f"import sys; open({str(out)!r}, 'a').write(sys.stdin.read() + '\\n')"
    targets = [
        {"name": "page", "argv": [sys.executable, "-c", code]},
        {"name": "broken", "argv": ["/no/such/program"], "kinds": ["failed"]},
        {"name": "hook", "url": "http://127.0.0.1:1/sesame", "secret": "sesame sesame 1234".replace(" ", "-")},
    ]
    # The notes of a process that was killed then.
    await raw.execute(
        "INSERT INTO dl_notices (at, kind, name, error) VALUES (now() - interval '1 h', 'lost', 'old', 'e')"
    )
    tasks = Tasks()

    @tasks.task("fails")
    async def fails(job):
        return GiveUp(f"no row {job.args['n']}")

    async with open_worker(tasks, notify=json.dumps(targets)) as supervisor:

        async def watches():
            return await raw.fetchval("SELECT count(*) FROM dl_notice_watch")

        await until(watches)
        for n in range(3):
            await supervisor.jobs.enqueue("fails", {"n": n}, queue="q")

        async def told():
            notices = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
            return sum(notice["times"] for notice in notices) == 4 and notices

        notices = await until(told)

        async def given_up():
            return await raw.fetchval("SELECT status FROM dl_jobs WHERE task = 'notify.command' AND status = 'failed'")

        await until(given_up)

        async def waits_for_the_hook():
            return await raw.fetchval("SELECT error FROM dl_jobs WHERE task = 'notify.webhook' AND waits_for = 'time'")

        error = await until(waits_for_the_hook)
    assert "the webhook hook cannot be reached" in error
    assert "sesame" not in error
    assert {(one["kind"], one["name"], one["group"]) for one in notices} == {
        ("lost", "old", "e"),
        ("failed", "fails", "no row #"),
    }
    names = await raw.fetch("SELECT name FROM dl_notice_groups UNION ALL SELECT name FROM dl_notices")
    assert {row["name"] for row in names} == {"old", "fails"}


async def test_without_targets_nothing_is_written_asked_or_served(open_worker, raw, sent):
    tasks, ended = Tasks(), trio.Event()

    @tasks.task("fails")
    async def fails(job):
        ended.set()
        return GiveUp("no")

    async with open_worker(tasks) as supervisor:
        await supervisor.jobs.enqueue("fails", queue="q")
        await ended.wait()
        await supervisor.signals.listening.wait()  # it would wake the notifier
        await supervisor.signals.recorded.wait()
        assert list(supervisor.state.queues) == ["q"]
        [worker] = await supervisor.jobs.workers()
        assert (worker.queues, list(worker.tasks)) == ({"q": 4}, ["fails"])
    assert sent
    assert notices._WATCH not in sent
    rows = "SELECT (SELECT count(*) FROM dl_notices) + (SELECT count(*) FROM dl_notice_watch)"
    assert await raw.fetchval(rows) == 0
