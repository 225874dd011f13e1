"""Outages of the database, whole or in part, cause latency, but never a loss of jobs."""

from __future__ import annotations

import httpx2
import pytest
import trio
from conditions import patience_s, until, when_ended
from logged import capture_logs
from proxy import open_proxy

from dataloader import ActorGaveUp, NewJob, Settings, StoreError, StoreUnavailable, Tasks, Worker
from dataloader.actors.outage import Outage
from dataloader.store.queue.plain_claim import PlainClaims
from dataloader.supervisor.supervisor import open_starting

LISTENERS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '% listener'"


def quick_tasks():
    tasks = Tasks()

    @tasks.task("quick")
    async def quick(job):
        return None

    return tasks


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_with_the_listener_dead_jobs_are_found_by_polling(open_worker, resting, database, raw):
    async with (
        open_proxy(database.dsn) as proxy,
        open_worker(quick_tasks(), dsn=proxy.dsn, poll_s=0.2) as supervisor,
    ):
        await resting(supervisor)
        proxy.freeze("listener")
        # The first poll of a process wakes all queues; later ones only where a job is ready.
        for _ in range(3):
            job_id = await raw.fetchval("SELECT dl_enqueue('quick', queue => 'q')")
            assert (await when_ended(supervisor, job_id)).status == "succeeded"
        assert supervisor.signals.listening.count == 1


@pytest.mark.slow
@pytest.mark.requirement("Q6")
async def test_a_disconnected_listener_reconnects_and_finds_missed_jobs(open_worker, raw):
    async with open_worker(quick_tasks()) as supervisor:
        await supervisor.signals.listening.wait()
        ended = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE '% listener'"
        assert await raw.fetchval(ended)
        # No notification arrives for this one; polls are an hour apart.
        job = await supervisor.jobs.enqueue("quick", queue="q")
        assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
        await supervisor.signals.listening.wait(2)
        assert supervisor.state.listener_connected
        assert await raw.fetchval(LISTENERS) == 1


async def _now(value):
    return value


@pytest.mark.requirement("Q6")
async def test_a_meaningless_notification_has_no_effect(open_worker, raw):
    async with open_worker(quick_tasks()) as supervisor:
        await supervisor.signals.listening.wait()
        for channel in ("dl_jobs", "dl_due", "dl_stop", "dl_changed"):
            for payload in ("", "no such queue", "NaN", "'; DROP TABLE dl_jobs", "x" * 7_000):
                await raw.execute("SELECT pg_notify($1, $2)", channel, payload)
        job = await supervisor.jobs.enqueue("quick", queue="q")
        assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
        assert (supervisor.state.listener_connected, supervisor.signals.listening.count) == (True, 1)


@pytest.mark.slow
@pytest.mark.requirement("Q12")
async def test_every_connection_that_is_ended_under_load_costs_no_job(open_worker, raw):
    tasks = Tasks()

    @tasks.task("work")
    async def work(job):
        await trio.sleep(0.01)

    jobs = [NewJob(queue="q", task="work") for _ in range(400)]
    with trio.fail_after(patience_s()):
        async with open_worker(tasks, {"q": 8}, poll_s=0.5, heartbeat_s=1, reaper_period_s=1) as supervisor:
            await supervisor.jobs.enqueue_many(jobs)
            done = "SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'"
            while await raw.fetchval(done) < len(jobs):
                await raw.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name LIKE 'dataloader%' AND pid <> pg_backend_pid() AND random() < 0.5"
                )
                await trio.sleep(0.2)
        assert await raw.fetchval("SELECT max(attempt) FROM dl_jobs") <= 2


@pytest.mark.slow
@pytest.mark.requirement("Q5")
async def test_a_supervisor_started_before_its_database_serves_when_that_is_up(database):
    with trio.fail_after(patience_s()):
        async with open_proxy(database.dsn) as proxy:
            proxy.cut()
            settings = Settings(db_dsn=proxy.dsn, workers=(Worker("q", 2),), port=0, drain_timeout_s=5)
            async with (
                open_starting(settings, quick_tasks(), with_web=True) as supervisor,
                httpx2.AsyncClient(base_url=supervisor.url, timeout=10, verify=False) as client,
            ):
                assert (await client.get("/health")).status_code == 200
                assert (await client.get("/ready")).status_code == 503
                status = (await client.get("/status")).json()
                assert (status["database"], status["listener"]) == ("unreachable", "polling")
                refused = await client.post(
                    "/api/v1/jobs/trigger", json={"queue": "q", "task": "quick", "lock_key": "k"}
                )
                assert refused.status_code == 503
                proxy.mend()
                await supervisor.ready()
                assert (await client.get("/ready")).status_code == 200
                job = await supervisor.jobs.enqueue("quick", queue="q")
                assert (await when_ended(supervisor, job.job_id)).status == "succeeded"


@pytest.mark.requirement("Q5", "Q15")
async def test_a_supervisor_that_waits_for_its_database_can_be_ended(database):
    with trio.fail_after(patience_s()):
        async with open_proxy(database.dsn) as proxy:
            proxy.freeze()
            settings = Settings(db_dsn=proxy.dsn, workers=(Worker("q", 2),), port=0)
            async with open_starting(settings, Tasks(), with_web=False) as supervisor:
                await trio.sleep(0.3)
                supervisor.request_drain()
                assert (await supervisor.wait_drained()).is_clean


@pytest.mark.requirement("Q5")
async def test_outcomes_wait_for_a_database_that_is_away_for_a_moment(open_worker, database, row_of):
    tasks, started, release = Tasks(), trio.Event(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        started.set()
        await release.wait()
        return "kept"

    with trio.fail_after(patience_s()):
        async with open_proxy(database.dsn) as proxy, open_worker(tasks, dsn=proxy.dsn) as supervisor:
            job = await supervisor.jobs.enqueue("wait", queue="q")
            await started.wait()
            proxy.cut()
            release.set()
            with capture_logs() as lines:
                await until(lambda: _now([line for line in lines if line.get("part") == "recorder"]))
            assert (await row_of(job.job_id))["status"] == "running"
            proxy.mend()
            await until(lambda: row_of(job.job_id), lambda row: row["status"] == "succeeded")
            assert (await row_of(job.job_id))["attempt"] == 1


@pytest.mark.slow
@pytest.mark.requirement("Q15")
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("reaper", "reaper.Reaper"),
        ("stager", "stager.Stager"),
        ("keeper", "lock_session_keeper.Keeper"),
        ("heartbeat", "heartbeat.Heartbeat"),
    ],
)
async def test_a_part_that_keeps_failing_is_named_and_the_jobs_are_given_back(
    open_worker, monkeypatch, name, part, row_of
):
    async def broken(*_args, **_kwargs):
        raise LookupError("a bug")

    monkeypatch.setattr(f"dataloader.actors.{part}.run", broken)
    monkeypatch.setattr("dataloader.supervisor.restarts.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("dataloader.supervisor.restarts.MAX_PAUSE_S", 0.01)
    tasks = Tasks()

    @tasks.task("wait")
    async def wait(job):
        await trio.sleep_forever()

    with (  # noqa: PT012
        capture_logs(),
        trio.fail_after(60),
        pytest.raises(ActorGaveUp, match=f"{name} gave up after .*LookupError: a bug"),
    ):
        async with open_worker(tasks, drain_timeout_s=0.1) as supervisor:
            job = await supervisor.jobs.enqueue("wait", queue="q")
            assert not (await supervisor.wait_drained()).stuck
    row = await row_of(job.job_id)
    assert (row["status"], row["attempt"]) == ("queued", 0)


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_claims_that_keep_failing_end_the_process_and_not_its_jobs(open_worker, monkeypatch, raw, row_of):
    monkeypatch.setattr("dataloader.supervisor.restarts.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("dataloader.supervisor.restarts.MAX_PAUSE_S", 0.01)
    monkeypatch.setattr(PlainClaims, "may_serve", lambda *_: False)
    tasks, started, release = Tasks(), trio.Event(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        started.set()
        await release.wait()

    with (  # noqa: PT012
        capture_logs(),
        trio.fail_after(60),
        pytest.raises(ActorGaveUp, match=r"the claims of q gave up .*dl_claim_known"),
    ):
        async with open_worker(tasks, {"q": 2}) as supervisor:
            job = await supervisor.jobs.enqueue("wait", queue="q")
            await started.wait()
            await raw.execute("ALTER FUNCTION dl_claim_known RENAME TO dl_claim_lost")
            # Not by another job: a claim that is still in progress may take that one.
            await raw.execute("SELECT pg_notify('dl_jobs', 'q')")
            await supervisor.wait_draining()
            release.set()
            await supervisor.wait_drained()
    assert (await row_of(job.job_id))["status"] == "succeeded"


@pytest.mark.slow
@pytest.mark.requirement("Q5")
async def test_an_outage_is_logged_at_its_start_and_end_and_each_try_at_debug(open_worker, database):
    async with open_proxy(database.dsn) as proxy:
        with capture_logs() as lines, trio.fail_after(90):
            settings = {"heartbeat_s": 0.5, "reaper_period_s": 0.5, "poll_s": 0.5, "connect_timeout_s": 2}
            async with open_worker(quick_tasks(), {"q": 2, "r": 2}, dsn=proxy.dsn, **settings):
                proxy.cut()
                await until(lambda: _parts_of(lines), lambda parts: len(parts) >= 7)
                await until(lambda: _now(lines), lambda lines: len(lines) >= 30)
                proxy.mend()
                await until(lambda: _now([line for line in lines if "again" in line["event"]]))
    told = [line for line in lines if line["log_level"] not in {"debug", "info"} and line["event"] not in UNASKED]
    assert [line["event"] for line in told] == ["the database is unavailable", "the database is available again"]
    assert told[-1]["after_s"] > 0
    assert told[-1]["tries"] >= 20


async def _parts_of(lines):
    return {line["part"] for line in lines if line["event"] == "an attempt failed"}


UNASKED = {
    "the lock session was lost; acquiring its locks again",
    "repaired after an interrupted claim",
    "the event loop is blocked",  # by a busy machine
}


@pytest.mark.requirement("Q5")
async def test_a_lasting_outage_is_logged_each_minute_and_other_errors_per_part(autojump_clock):
    outage = Outage()
    with capture_logs() as lines:
        for _ in range(2 * 130):
            outage.failed("heartbeat", StoreUnavailable("gone"))
            outage.failed("claims of q", StoreUnavailable("gone"))
            await trio.sleep(0.5)
        assert outage.lasts
        outage.failed("stager", StoreError("permission denied"))
        outage.worked("reaper")  # had no trouble: it may use another database
        assert outage.lasts
        outage.worked("heartbeat")
        assert not outage.lasts
        outage.failed("claims of q", StoreUnavailable("too late"))  # of a statement that was sent before
        outage.worked("claims of q")
        outage.worked("claims of q")
        outage.worked("stager")
    told = [(line["event"], line.get("part"), line.get("for_s", line.get("after_s"))) for line in lines]
    assert [line for line in told if line[0] != "an attempt failed"] == [
        ("the database is unavailable", "heartbeat", None),
        ("the database is still unavailable", None, 60),
        ("the database is still unavailable", None, 120),
        ("a part cannot do its work", "stager", None),
        ("the database is available again", "heartbeat", 130),
        ("a part has recovered", "stager", 0),
    ]
    assert [line["parts"] for line in lines if "parts" in line] == [["claims of q", "heartbeat"]] * 2


@pytest.mark.requirement("Q5")
async def test_a_failure_after_an_outage_is_logged_as_new_if_the_part_had_recovered(
    autojump_clock,
):
    outage = Outage()
    with capture_logs() as lines:
        for part in ("heartbeat", "claims of q"):
            outage.failed(part, StoreUnavailable("gone"))
        outage.worked("heartbeat")
        for _ in range(61):
            await trio.sleep(1)
            outage.worked("heartbeat")
            outage.failed("claims of q", StoreUnavailable("no connection is free"))
        assert outage.lasts
        outage.worked("claims of q")
        outage.failed("heartbeat", StoreUnavailable("gone"))
        outage.worked("heartbeat")
        outage.failed("heartbeat", StoreUnavailable("gone again"))
    assert [(line["event"], line.get("part")) for line in lines if line["event"] != "an attempt failed"] == [
        ("the database is unavailable", "heartbeat"),
        ("the database is available again", "heartbeat"),
        ("the database is still unavailable", None),
        ("the database is available again", "claims of q"),
        ("the database is unavailable", "heartbeat"),
        ("the database is available again", "heartbeat"),
        ("the database is unavailable", "heartbeat"),
    ]
    assert [line["parts"] for line in lines if "parts" in line] == [["claims of q"]]


@pytest.mark.requirement("Q5")
async def test_a_part_leaves_the_outage_when_the_database_refuses_it_or_it_ends(autojump_clock):
    outage = Outage()
    with capture_logs() as lines:
        outage.failed("stager", StoreUnavailable("gone"))
        outage.failed("stager", StoreError("permission denied"))  # the server refuses, so it is reachable
        assert not outage.lasts
        outage.failed("claims of q", StoreUnavailable("gone again"))
        outage.failed("stager", StoreUnavailable("gone again"))  # which does not say anything about its own failure
        assert outage.lasts
        outage.left("claims of q")
        assert outage.lasts
        outage.left("stager")
        assert not outage.lasts
        outage.failed("stager", StoreError("permission denied"))
        outage.worked("stager")
    assert [(line["event"], line.get("part")) for line in lines if line["event"] != "an attempt failed"] == [
        ("the database is unavailable", "stager"),
        ("the database is available again", "stager"),
        ("a part cannot do its work", "stager"),
        ("the database is unavailable", "claims of q"),
        ("a part cannot do its work", "stager"),
        ("a part has recovered", "stager"),
    ]


@pytest.mark.requirement("Q5")
async def test_claims_that_end_by_a_drain_while_they_fail_leave_the_outage(open_worker, database):
    with trio.fail_after(patience_s()):
        async with open_proxy(database.dsn) as proxy:
            settings = {"poll_s": 0.2, "connect_timeout_s": 1, "drain_timeout_s": 0.1}
            async with open_worker(quick_tasks(), dsn=proxy.dsn, **settings) as supervisor:
                proxy.cut()
                # This reads private fields: the parts of an outage are not visible until it has lasted for a minute.
                [trouble] = await until(lambda: _troubles_of(supervisor, "claims of q"))
                supervisor.request_drain()
                await supervisor._parts.dispatchers[0].closed.wait()
                assert "claims of q" not in trouble.parts


async def _troubles_of(supervisor, part):
    return [trouble for trouble in supervisor._parts.outage._troubles.values() if part in trouble.parts]


@pytest.mark.requirement("Q3")
async def test_an_outcome_that_a_users_trigger_refuses_holds_up_no_other(open_worker, raw):
    tasks = quick_tasks()
    async with open_worker(tasks) as supervisor:
        await raw.execute("""
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
              IF NEW.args ? 'refused' AND NEW.status = 'succeeded' THEN RAISE EXCEPTION 'not this one'; END IF;
              RETURN NEW;
            END $$;
            CREATE TRIGGER refuse BEFORE UPDATE ON dl_jobs FOR EACH ROW EXECUTE FUNCTION refuse();
        """)
        jobs = [NewJob(task="quick", args={"refused": 1} if number == 1 else {}, queue="q") for number in range(4)]
        added = await supervisor.jobs.enqueue_many(jobs)
        for number, one in enumerate(added):
            if number != 1:
                assert (await when_ended(supervisor, one.job_id)).status == "succeeded"
        assert await raw.fetchval("SELECT status FROM dl_jobs WHERE args ? 'refused'") == "running"
