"""Notices for operators (S6): written where a failure happens, gathered in groups, sent once by the first process."""

from __future__ import annotations

import json

import pytest
import trio
from databases import raw_connection
from roles import a_role

from dataloader.jobs.notices import CommandTarget, WebhookTarget
from dataloader.jobs.states import Step
from dataloader.store.queue.leases import reap
from dataloader.store.queue.notices import tell

pytestmark = pytest.mark.requirement("S6")

OPS = WebhookTarget(name="ops", url="http://127.0.0.1:1/", secret="sesame open now 1")
PAGE = CommandTarget(name="page", argv=("true",), kinds=("lost",))


@pytest.fixture
async def watched(raw):
    """Make a process notify of failures."""
    await raw.execute("INSERT INTO dl_notice_watch (until) VALUES (now() + interval '1 hour')")


async def noted(raw):
    rows = await raw.fetch("SELECT kind, name, error, times FROM dl_notices ORDER BY notice_id")
    return [tuple(row) for row in rows]


async def told(raw):
    """Return the notifying jobs as (task, target, notice), the oldest first, and delete them."""
    rows = await raw.fetch(
        "SELECT task, queue, args FROM dl_jobs WHERE task LIKE 'notify.%' ORDER BY created_at, job_id"
    )
    await raw.execute("DELETE FROM dl_jobs WHERE task LIKE 'notify.%'")
    assert {row["queue"] for row in rows} <= {"notifications"}
    jobs = [(row["task"], json.loads(row["args"])) for row in rows]
    return [(task, args["target"], args["notice"]) for task, args in jobs]


async def fail(raw, add_job, error, task="t"):
    job_id = await add_job(task=f"'{task}'", status="'running'", lease_expires_at="now()")
    # As another service does it.
    await raw.execute("UPDATE dl_jobs SET status = 'failed', error = $2 WHERE job_id = $1", job_id, error)
    return job_id


async def test_a_final_failure_written_by_any_service_is_noted(watched, raw, store, add_job, start_worker):
    for task in ("t", "notify.webhook", "notify.command"):
        await fail(raw, add_job, "of another service", task)
    await add_job(max_attempts="1")
    await add_job(max_attempts="1")
    worker = start_worker()
    first, second = await worker.claim()
    await worker.end(first, Step.RETRY, error="ours")
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE job_id = $1", second.job_id)
    await reap(store, 10)
    await raw.execute(
        "INSERT INTO dl_schedule_events (name, kind, payload) VALUES"
        """ ('s', 'paused', '{"why": "its job has failed"}'), ('s', 'paused', '{"by": "chief"}'),"""
        """ ('s', 'left_out', '{"why": "missed", "times": 7}'), ('s', 'changed', '{"by": "w"}')"""
    )
    found = await noted(raw)
    assert found[0] == ("failed", "t", "of another service", 1)
    assert found[1] == ("failed", "t", "ours", 1)
    assert (found[2][0], found[2][2].startswith("worker lost")) == ("lost", True)
    assert found[3:] == [("schedule_paused", "s", "its job has failed", 1), ("left_out", "s", "missed", 7)]
    # Only the increase of a counting record.
    await raw.execute(
        """UPDATE dl_schedule_events SET payload = payload || '{"times": 9}' WHERE payload ->> 'why' = 'missed'"""
    )
    assert (await noted(raw))[5:] == [("left_out", "s", "missed", 2)]


async def test_a_service_that_has_no_right_on_our_tables_fails_its_jobs_and_is_noted(watched, raw, database, add_job):
    job_id = await add_job(status="'running'", lease_expires_at="now()")
    with a_role(database, "GRANT SELECT, UPDATE ON dl_jobs TO jobs_service") as role:
        async with raw_connection(role.dsn) as foreign:
            await foreign.execute("UPDATE dl_jobs SET status = 'failed', error = 'theirs' WHERE job_id = $1", job_id)
    assert await noted(raw) == [("failed", "t", "theirs", 1)]


async def test_nothing_is_noted_while_no_notifier_runs(raw, add_job):
    await fail(raw, add_job, "e")
    await raw.execute("INSERT INTO dl_notice_watch (until) VALUES (now() - interval '1 s')")
    await fail(raw, add_job, "e")
    assert await noted(raw) == []


async def test_each_target_gets_a_group_of_failures_once_and_then_not_for_a_while(watched, raw, store, add_job):
    jobs = [await fail(raw, add_job, f"no file 'x{n}' in step {n}\nTraceback 1") for n in range(12)]
    await fail(raw, add_job, "password=sesame refused")
    first = await tell(store, [OPS, PAGE])
    assert (first.added, await noted(raw), await told(raw)) == (0, [], [])
    assert 5 < first.next_in_s <= 10
    assert (await tell(store, [OPS, PAGE], gather_s=0)).added == 2
    (task, target, many), (_, _, secret) = sorted(await told(raw), key=lambda one: -one[2]["times"])
    assert (task, target, many["kind"], many["name"], many["times"]) == ("notify.webhook", "ops", "failed", "t", 12)
    assert (many["group"], many["error"]) == ("no file … in step #", "no file 'x11' in step 11")
    assert many["job_ids"] == list(map(str, jobs[:10]))
    assert "sesame" not in json.dumps(secret)
    # The next notification of the group waits, and covers all failures since then.
    for n in range(3):
        await fail(raw, add_job, f"no file 'y{n}' in step {n}")
    waits = await tell(store, [OPS], gather_s=0)
    assert (waits.added, 200 < waits.next_in_s <= 300) == (0, True)
    assert (await tell(store, [OPS], gather_s=0, again_s=0)).added == 1
    [(_, _, again)] = await told(raw)
    assert (again["times"], len(again["job_ids"]), again["told_before_at"] is not None) == (3, 3, True)
    assert (await tell(store, [OPS], gather_s=0, again_s=0)).next_in_s is None


async def test_a_failure_with_an_endless_name_does_not_block_other_notices(watched, raw, store, add_job):
    # Another service writes names of any length; random ones cannot be compressed.
    name = "".join(chr(0x4E00 + number * 37 % 20_000) for number in range(5_000))
    await fail(raw, add_job, "too long", name)
    await fail(raw, add_job, "of t")
    assert (await tell(store, [OPS], gather_s=0)).added == 2
    assert sorted(notice["name"] for *_, notice in await told(raw)) == ["t", name[:200]]


async def test_a_target_receives_only_its_kinds(watched, raw, store, add_job):
    await raw.execute(
        "INSERT INTO dl_notices (kind, name, error) VALUES ('lost', 't', 'gone'), ('left_out', 's', 'missed')"
    )
    await tell(store, [OPS, PAGE], gather_s=0)
    assert sorted((target, notice["kind"]) for _, target, notice in await told(raw)) == [
        ("ops", "left_out"),
        ("ops", "lost"),
        ("page", "lost"),
    ]


async def test_concurrent_notifiers_report_each_failure_once(watched, raw, store):
    await raw.execute(
        "INSERT INTO dl_notices (kind, name, error)"
        " SELECT 'failed', 't' || n % 40, 'e' FROM generate_series(1, 2000) AS n"
    )
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(lambda: tell(store, [OPS], gather_s=0))
    await tell(store, [OPS], gather_s=0, again_s=0)
    notices = [notice for _, _, notice in await told(raw)]
    assert sum(notice["times"] for notice in notices) == 2_000
    assert {notice["name"] for notice in notices} == {f"t{n}" for n in range(40)}


async def test_a_notice_that_cannot_be_enqueued_is_sent_later(watched, raw, store, add_job):
    """A process that dies before the commit changes nothing."""
    await fail(raw, add_job, "e")
    await raw.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$;"
        "CREATE TRIGGER refuse BEFORE INSERT ON dl_jobs FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    with pytest.raises(Exception, match="no"):
        await tell(store, [OPS], gather_s=0)
    await raw.execute("DROP TRIGGER refuse ON dl_jobs")
    assert (await tell(store, [OPS], gather_s=0)).added == 1
    [(_, _, notice)] = await told(raw)
    assert notice["times"] == 1
