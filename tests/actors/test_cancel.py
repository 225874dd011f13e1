"""A cancel reaches the handler by notification, and ends the job in every state (Q4)."""

from __future__ import annotations

import threading

import pytest
import trio
from conditions import patience_s, until, when_ended
from databases import raw_connection
from logged import capture_logs
from roles import a_role

from dataloader import Tasks
from dataloader.jobs.contract import Operator
from dataloader.store.queue.control import cancel

DAY_S = 86_400
HOUR_S = 3_600
OPERATOR = Operator("test", None)


@pytest.mark.requirement("Q4")
async def test_a_cancel_reaches_a_running_handler_by_notification_alone(open_worker, settled, journal_of):
    tasks, started = Tasks(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        started.set()
        await trio.sleep_forever()

    async with open_worker(tasks, heartbeat_s=HOUR_S, default_lease_s=DAY_S) as supervisor:
        with trio.fail_after(patience_s()):
            await settled(supervisor)
            job = await supervisor.jobs.enqueue("wait", queue="q")
            await started.wait()
            await cancel(supervisor.database, job.job_id, OPERATOR)
            ended = await when_ended(supervisor, job.job_id)
        assert ended.status == "canceled"
        # The next heartbeat and the next poll are an hour away: the notification has caused a heartbeat.
        assert await journal_of(job.job_id) == ["queued", "picked", "canceled: cancel"]


@pytest.mark.requirement("Q4")
async def test_a_late_cancel_notification_does_not_cancel_a_run_after_a_retry(open_worker, settled, raw, row_of):
    tasks, started, end = Tasks(), trio.Event(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        started.set()
        await end.wait()

    async with open_worker(tasks, heartbeat_s=HOUR_S, default_lease_s=DAY_S) as supervisor:
        with trio.fail_after(patience_s()):
            await settled(supervisor)
            job = await supervisor.jobs.enqueue("wait", queue="q")
            await started.wait()
            before = (await row_of(job.job_id))["heartbeat_at"]
            await raw.execute("SELECT pg_notify('dl_stop', $1::text)", str((await row_of(job.job_id))["token"]))
            await until(lambda: row_of(job.job_id), lambda row: row["heartbeat_at"] > before)
            end.set()
            ended = await when_ended(supervisor, job.job_id)
    assert ended.status == "succeeded"


@pytest.mark.requirement("Q4")
async def test_a_cancel_request_by_plain_sql_stops_only_its_own_run(open_worker, settled, raw, row_of):
    tasks, started, beside_started = Tasks(), trio.Event(), trio.Event()

    @tasks.task("beside")
    async def beside(job):
        beside_started.set()
        await trio.sleep_forever()

    @tasks.task("wait")
    async def wait(job):
        started.set()
        await trio.sleep_forever()

    async with open_worker(tasks, heartbeat_s=HOUR_S, default_lease_s=DAY_S) as supervisor:
        with trio.fail_after(patience_s()):
            await settled(supervisor)
            other = await supervisor.jobs.enqueue("beside", queue="q")
            job = await supervisor.jobs.enqueue("wait", queue="q")
            await started.wait()
            await beside_started.wait()
            before = await row_of(other.job_id)
            await raw.execute("UPDATE dl_jobs SET cancel_requested = true WHERE job_id = $1", job.job_id)
            assert (await when_ended(supervisor, job.job_id)).status == "canceled"
            # Only its own row was read: no lease of another run was renewed.
            assert await row_of(other.job_id) == before
            await raw.execute("UPDATE dl_jobs SET cancel_requested = true")


@pytest.mark.slow
@pytest.mark.requirement("Q4")
async def test_a_cancel_without_a_notification_is_found_by_the_next_heartbeat(open_worker, raw):
    tasks, started = Tasks(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        started.set()
        await trio.sleep_forever()

    async with open_worker(tasks, heartbeat_s=0.3) as supervisor:
        with trio.fail_after(patience_s()):
            job = await supervisor.jobs.enqueue("wait", queue="q")
            await started.wait()
            await raw.execute("SET session_replication_role = replica")  # no trigger, so no notification
            await raw.execute("UPDATE dl_jobs SET cancel_requested = true WHERE job_id = $1", job.job_id)
            assert (await when_ended(supervisor, job.job_id)).status == "canceled"


@pytest.mark.requirement("Q4")
async def test_a_thread_stops_at_its_next_checkpoint(open_worker):
    tasks, started = Tasks(), trio.Event()

    @tasks.task("loop")
    def loop(job):
        trio.from_thread.run_sync(started.set)
        while True:
            job.checkpoint()
            threading.Event().wait(0.01)

    async with open_worker(tasks) as supervisor:
        with trio.fail_after(patience_s()):
            job = await supervisor.jobs.enqueue("loop", queue="q")
            await started.wait()
            await cancel(supervisor.database, job.job_id, OPERATOR)
            assert (await when_ended(supervisor, job.job_id)).status == "canceled"


@pytest.mark.requirement("Q4")
async def test_a_queued_job_is_canceled_immediately_and_never_runs(open_worker, journal_of):
    tasks, release, ran = Tasks(), trio.Event(), []

    @tasks.task("wait")
    async def wait(job):
        ran.append(job.job_id)
        await release.wait()

    async with open_worker(tasks, {"q": 1}) as supervisor:
        with trio.fail_after(patience_s()):
            first = await supervisor.jobs.enqueue("wait", queue="q")
            await until(lambda: _now(ran))
            second = await supervisor.jobs.enqueue("wait", queue="q")
            assert (await cancel(supervisor.database, second.job_id, OPERATOR)).status == "canceled"
            release.set()
            await when_ended(supervisor, first.job_id)
            third = await supervisor.jobs.enqueue("wait", queue="q")
            await when_ended(supervisor, third.job_id)
        assert ran == [first.job_id, third.job_id]
        assert await journal_of(second.job_id) == ["queued", "canceled: operator"]


async def _now(value):
    return list(value)


@pytest.mark.requirement("Q4")
async def test_a_cancel_of_a_finished_job_says_so_and_changes_nothing(open_worker, journal_of):
    tasks = Tasks()

    @tasks.task("quick")
    async def quick(job):
        return 1

    async with open_worker(tasks) as supervisor:
        job = await supervisor.jobs.enqueue("quick", queue="q")
        await when_ended(supervisor, job.job_id)
        answer = await cancel(supervisor.database, job.job_id, OPERATOR)
        assert (answer.status, answer.cancel_requested) == ("succeeded", False)
        assert await journal_of(job.job_id) == ["queued", "picked", "done"]


@pytest.mark.requirement("Q4")
async def test_a_shielded_clean_up_is_let_finish_before_the_job_is_canceled(open_worker, raw, row_of):
    tasks, started, cleaning, cleaned = Tasks(), trio.Event(), trio.Event(), trio.Event()

    @tasks.task("tidy")
    async def tidy(job):
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(10, shield=True):
                cleaning.set()
                await cleaned.wait()

    async with open_worker(tasks) as supervisor:
        with trio.fail_after(patience_s()):
            job = await supervisor.jobs.enqueue("tidy", queue="q")
            await started.wait()
            await cancel(supervisor.database, job.job_id, OPERATOR)
            await cleaning.wait()
            # The cancel is not confirmed before the handler has ended.
            assert (await row_of(job.job_id))["status"] == "running"
            cleaned.set()
            assert (await when_ended(supervisor, job.job_id)).status == "canceled"


@pytest.mark.requirement("Q4")
async def test_a_body_that_returned_before_it_noticed_has_succeeded(open_worker):
    tasks, started, release = Tasks(), trio.Event(), trio.Event()

    @tasks.task("deaf")
    async def deaf(job):
        started.set()
        with trio.CancelScope(shield=True):
            await release.wait()
        return "done all the same"

    async with open_worker(tasks) as supervisor:
        with trio.fail_after(patience_s()):
            job = await supervisor.jobs.enqueue("deaf", queue="q")
            await started.wait()
            await cancel(supervisor.database, job.job_id, OPERATOR)
            release.set()
            ended = await when_ended(supervisor, job.job_id)
        assert (ended.status, ended.result, ended.cancel_requested) == ("succeeded", "done all the same", True)


@pytest.mark.slow
@pytest.mark.requirement("Q4")
async def test_a_handler_that_ignores_its_cancel_is_reported_and_keeps_lease_and_key(open_worker, raw, row_of):
    tasks, started, release = Tasks(), trio.Event(), trio.Event()

    @tasks.task("deaf")
    async def deaf(job):
        started.set()
        with trio.CancelScope(shield=True):
            await release.wait()

    @tasks.task("next")
    async def following(job):
        assert release.is_set()

    with capture_logs() as lines:
        async with open_worker(tasks, heartbeat_s=0.2, default_lease_s=3, cancel_grace_s=0.1) as supervisor:
            with trio.fail_after(patience_s()):
                job = await supervisor.jobs.enqueue("deaf", queue="q", lock_key="k")
                await started.wait()
                following_job = await supervisor.jobs.enqueue("next", queue="q", lock_key="k")
                await cancel(supervisor.database, job.job_id, OPERATOR)
                await until(lambda: _now(line for line in lines if "does not stop" in line["event"]))
                lease = (await row_of(job.job_id))["lease_expires_at"]
                await until(lambda: row_of(job.job_id), lambda row: row["lease_expires_at"] > lease)
                waiting = await row_of(following_job.job_id)
                assert (waiting["status"], waiting["waits_for"]) == ("queued", "lock")
                release.set()
                assert (await when_ended(supervisor, following_job.job_id)).status == "succeeded"
    [stuck] = [line for line in lines if "does not stop" in line["event"]]
    assert (stuck["job_id"], stuck["task"], stuck["why"]) == (str(job.job_id), "deaf", "cancel_requested")


@pytest.mark.requirement("Q4")
async def test_a_cancel_that_came_during_a_failing_run_ends_the_job_instead_of_a_retry(open_worker, raw):
    tasks, started, release = Tasks(), trio.Event(), trio.Event()

    @tasks.task("fail")
    async def fail(job):
        started.set()
        with trio.CancelScope(shield=True):
            await release.wait()
        raise ValueError("too late")

    async with open_worker(tasks) as supervisor:
        with trio.fail_after(patience_s()):
            job = await supervisor.jobs.enqueue("fail", queue="q")
            await started.wait()
            await cancel(supervisor.database, job.job_id, OPERATOR)
            release.set()
            ended = await when_ended(supervisor, job.job_id)
        assert ended.status == "canceled"
        assert ended.error.startswith("ValueError: too late")


@pytest.mark.requirement("Q16")
async def test_notifications_of_a_role_without_rights_stop_no_job_and_no_listener(open_worker, database, row_of):
    """Channels have no rights: every role may notify. The tables are read before a notification has an effect."""
    tasks, started, release = Tasks(), trio.Event(), trio.Event()

    @tasks.task("long")
    async def long(job):
        started.set()
        await release.wait()

    @tasks.task("quick")
    async def quick(job):
        pass

    with a_role(database) as role:
        async with open_worker(tasks) as supervisor, raw_connection(role.dsn) as outsider:
            with trio.fail_after(patience_s()):
                job = await supervisor.jobs.enqueue("long", queue="q")
                await started.wait()
                token = (await row_of(job.job_id))["token"]
                for channel in ("dl_jobs", "dl_due", "dl_stop", "dl_changed"):
                    for payload in (str(job.job_id), str(token), "nan", "1e999", "\u202e" * 1000, ""):
                        await outsider.execute("SELECT pg_notify($1, $2)", channel, payload)
                # Polls are an hour apart, so the listener has caused this run.
                other = await supervisor.jobs.enqueue("quick", queue="q")
                assert (await when_ended(supervisor, other.job_id)).status == "succeeded"
                release.set()
                assert (await when_ended(supervisor, job.job_id)).status == "succeeded"


@pytest.mark.slow
@pytest.mark.requirement("Q16")
async def test_a_flood_of_notifications_costs_their_latency_and_no_lease(open_worker, database, monkeypatch):
    monkeypatch.setattr("dataloader.actors.listener.PING_EVERY_S", 0.2)
    tasks, started, release = Tasks(), trio.Event(), trio.Event()
    flood = "SELECT count(pg_notify('dl_stop', gen_random_uuid()::text)) FROM generate_series(1, 200000)"

    @tasks.task("long")
    async def long(job):
        started.set()
        await release.wait()

    @tasks.task("quick")
    async def quick(job):
        pass

    with a_role(database) as role, capture_logs() as lines:
        async with (
            open_worker(tasks, heartbeat_s=0.2, default_lease_s=3) as supervisor,
            raw_connection(role.dsn) as outsider,
        ):
            with trio.fail_after(patience_s()):
                job = await supervisor.jobs.enqueue("long", queue="q")
                await started.wait()
                await outsider.execute(flood)
                await until(lambda: _now(line for line in lines if "cannot do its work" in line["event"]))
                # Notifications work again: polls are an hour apart, so the listener has caused this run.
                await until(lambda: _now(line for line in lines if "a part has recovered" in line["event"]))
                other = await supervisor.jobs.enqueue("quick", queue="q")
                assert (await when_ended(supervisor, other.job_id)).status == "succeeded"
                release.set()
                ended = await when_ended(supervisor, job.job_id)
    assert (ended.status, ended.attempt) == ("succeeded", 1)
    [told] = [line for line in lines if "cannot do its work" in line["event"]]
    assert told["part"] == "listener"
    assert told["error"].startswith("more than 5000 notifications arrived within 0.5 s")
