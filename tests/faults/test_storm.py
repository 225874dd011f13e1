"""Many clients change the same rows: no deadlock, and rolled-back statements are repeated, up to a limit (F21).

STORM_SECONDS is the duration of the storm: 15, or 300 for the full one.
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections import Counter
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import attrs
import pytest
import trio
from conditions import until
from databases import raw_connection
from journal import step_of
from services import FAST

from dataloader.jobs.states import TRANSITIONS, Status
from dataloader.store.connection.bridge import RETRIES, open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue.retention import prune

pytestmark = pytest.mark.full

STORM_S = float(os.environ.get("STORM_SECONDS", "15"))
QUEUES = ("s0", "s1", "s2")
KEYS = 60
MOST_OPEN = 1_500
ENDED = [status for status in Status if status.is_final]

EXPIRE = """
UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE job_id = ANY (ARRAY(
  SELECT job_id FROM dl_jobs WHERE status = 'running' ORDER BY random() LIMIT 3 FOR UPDATE SKIP LOCKED))
"""
AGE = """
UPDATE dl_jobs SET finished_at = finished_at - interval '2 days' WHERE job_id = ANY (ARRAY(
  SELECT job_id FROM dl_jobs WHERE finished_at > now() - interval '1 day' ORDER BY random() LIMIT 30
  FOR UPDATE SKIP LOCKED))
"""
DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
OTHERS = """
SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'dataloader%' AND datname = current_database()
"""


@attrs.define
class Storm:
    """Clients that work independently until it is over, and their answers."""

    clients: list
    dsn: str
    over_at: float
    jobs: list[str] = attrs.field(factory=list)
    answers: Counter = attrs.field(factory=Counter)
    wrong: list = attrs.field(factory=list)
    pruned: int = 0

    async def ask(self, method, path, **more):
        answer = await random.choice(self.clients).request(method, path, **more)
        self.answers[answer.status_code] += 1
        if answer.status_code not in {200, 201, 404, 409, 503}:
            self.wrong.append((method, path, answer.status_code, answer.text[:500]))
        return answer

    async def go_on(self, act, pause_s):
        while trio.current_time() < self.over_at:
            await act()
            await trio.sleep(random.uniform(0, 2 * pause_s))

    async def trigger(self):
        answer = await self.ask("GET", "/api/v1/queues")
        counts = answer.json().get("queues", ())
        if sum(queue[state] for queue in counts for state in ("ready", "delayed", "blocked")) > MOST_OPEN:
            return
        jobs = [self.a_job() for _ in range(random.randrange(1, 30))]
        answer = await self.ask("POST", "/api/v1/jobs/trigger/batch", json={"jobs": jobs})
        if answer.is_success:
            self.jobs.extend(job["job_id"] for job in answer.json()["jobs"])
            del self.jobs[:-100]

    @staticmethod
    def a_job():
        number = random.randrange(600)
        job = {"queue": QUEUES[number % 3], "task": "whim", "lock_key": f"key {number % KEYS}", "lease_ttl_sec": 5}
        if number < 150:
            # Many clients send the same ones concurrently, each batch in another order.
            return job | {"idempotency_key": f"request {number}"}
        if number < 250:
            return job | {"available_at": (datetime.now(UTC) + timedelta(seconds=0.3)).isoformat()}
        if number < 290:
            # Runs long enough to lose its lease.
            return job | {"task": "sleep", "args": {"s": 3}}
        return job | {"priority": number % 7}

    async def trigger_one(self):
        answer = await self.ask("POST", "/api/v1/jobs/trigger", json=self.a_job())
        if answer.is_success:
            self.jobs.append(answer.json()["job_id"])

    async def change_one(self):
        if self.jobs:
            path = f"/api/v1/jobs/{random.choice(self.jobs[-40:])}"
            match random.choice(["cancel", "retry", "run-now", "priority", "wait", "events"]):
                case "priority":
                    await self.ask("PATCH", path, json={"priority": random.randrange(9)})
                case "wait":
                    await self.ask("GET", f"{path}/status?wait=0.3")
                case "events":
                    await self.ask("GET", f"{path}/events")
                case "retry":
                    ended = {"status": "failed,canceled,lost", "limit": 20}
                    answer = await self.ask("GET", "/api/v1/jobs", params=ended)
                    for job in answer.json().get("jobs", ())[-1:]:
                        await self.ask("POST", f"/api/v1/jobs/{job['job_id']}/retry")
                case action:
                    await self.ask("POST", f"{path}/{action}")

    async def cancel_many(self):
        some = {"lock_key": f"key {random.randrange(KEYS)}"} if random.random() < 0.7 else {"queue": QUEUES[0]}
        await self.ask("POST", "/api/v1/jobs/cancel", json=some | {"limit": 40})

    async def retry_many(self):
        some = {"status": ["failed", "lost", "canceled"], "queue": random.choice(QUEUES), "limit": 60}
        await self.ask("POST", "/api/v1/jobs/retry", json=some)

    async def pause_and_resume(self):
        queue = random.choice(QUEUES)
        await self.ask("POST", f"/api/v1/queues/{queue}/pause")
        await trio.sleep(0.3)
        await self.ask("POST", f"/api/v1/queues/{queue}/resume")

    async def read(self):
        await self.ask("GET", "/api/v1/jobs", params={"queue": random.choice(QUEUES), "limit": 100})

    async def expire(self):
        async with raw_connection(self.dsn) as raw:
            await self.go_on(lambda: raw.execute(EXPIRE), 0.3)

    async def prune(self):
        days = dict.fromkeys(ENDED, 1)
        async with raw_connection(self.dsn) as raw, open_database(DatabaseOptions(dsn=self.dsn)) as database:

            async def age_and_prune():
                await raw.execute(AGE)
                self.pruned += await prune(database, days, batch=20)

            await self.go_on(age_and_prune, 0.2)

    async def rage(self):
        async with trio.open_nursery() as nursery:
            for act, pause_s in (
                (self.trigger, 0.1),
                (self.trigger, 0.1),
                (self.trigger_one, 0.03),
                (self.change_one, 0.01),
                (self.change_one, 0.01),
                (self.change_one, 0.01),
                (self.cancel_many, 0.1),
                (self.cancel_many, 0.1),
                (self.retry_many, 0.1),
                (self.retry_many, 0.1),
                (self.pause_and_resume, 0.3),
                (self.read, 0.2),
            ):
                nursery.start_soon(self.go_on, act, pause_s)
            nursery.start_soon(self.expire)
            nursery.start_soon(self.prune)
            nursery.start_soon(self.prune)


async def check_journal(raw):
    """Check that the events of each job lead to its status, by the table of transitions."""
    rows = {row["job_id"]: row["status"] for row in await raw.fetch("SELECT job_id, status::text FROM dl_jobs")}
    told = dict.fromkeys(rows, Status.QUEUED)
    for line in await raw.fetch(
        "SELECT job_id, kind, payload ->> 'reason' AS reason FROM dl_job_events"
        " WHERE kind NOT IN ('queued', 'heartbeat', 'log') ORDER BY event_id"
    ):
        step = step_of(line["kind"], line["reason"])
        told[line["job_id"]] = TRANSITIONS[told[line["job_id"]], step]
    assert told == rows


@pytest.mark.long
@pytest.mark.requirement("Q4", "Q6", "Q7", "Q10", "Q11")
async def test_f21_a_storm_of_concurrent_operations_has_no_deadlock_and_all_jobs_end(
    unmeasured, serve, raw, database, client_of
):
    services = [await serve(dict.fromkeys(QUEUES, 4), **FAST) for _ in range(4)]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(service)) for service in services]
        storm = Storm(clients, database.dsn, trio.current_time() + STORM_S)
        await storm.rage()
        for queue in QUEUES:
            assert (await clients[0].post(f"/api/v1/queues/{queue}/resume")).status_code == 200
        left = "SELECT count(*) FROM dl_jobs WHERE status IN ('queued', 'running')"
        await until(lambda: raw.fetchval(left), lambda count: count == 0, within_s=300 + STORM_S)
        assert [(await client.get("/ready")).status_code for client in clients] == [200] * 4
    assert storm.wrong == []
    for service in services:
        service.signal(signal.SIGTERM)
    assert [await service.exit_code(within_s=90) for service in services] == [0] * 4
    lines = [line for service in services for line in service.lines]
    rolled_back = re.compile(r"Deadlock|Serialization|\b40P01\b|\b40001\b|a request failed")
    assert [line for line in lines if rolled_back.search(str(line))] == []
    # Backends have reported their statistics when they have ended.
    await until(lambda: raw.fetchval(OTHERS), lambda count: count == 0)
    assert await raw.fetchval(DEADLOCKS) == 0, database.deadlocks()
    await check_journal(raw)
    unclean = "finished_at IS NULL OR lease_expires_at IS NOT NULL OR waits_for IS NOT NULL OR claimed_by IS NOT NULL"
    assert await raw.fetch(f"SELECT * FROM dl_jobs WHERE {unclean}") == []
    # Every kind of operation has occurred.
    actions = {row["action"] for row in await raw.fetch("SELECT DISTINCT action FROM dl_audit")}
    assert actions >= {"cancel", "retry", "set_priority", "run_now", "cancel_many", "retry_many", "pause", "resume"}
    reasons = await raw.fetch("SELECT DISTINCT payload ->> 'reason' AS reason FROM dl_job_events")
    assert {row["reason"] for row in reasons} >= {"lock_key", "operator", "retry", "snooze", "lease expired"}
    assert storm.pruned > 0
    assert storm.answers[200] + storm.answers[201] > 5 * STORM_S


@pytest.mark.requirement("Q4")
async def test_f21_a_deadlock_with_a_foreign_session_is_retried_unseen_by_clients(serve, add, raw, database, client_of):
    await raw.execute(f"ALTER DATABASE {database.name} SET deadlock_timeout = '1s'")
    service = await serve({"of nobody": 1})
    first, second = sorted([await add("quick"), await add("quick")])
    waiting = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE wait_event_type = 'Lock' AND application_name LIKE '% pool' AND datname = current_database()"
    )
    lock = "SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE"
    answers = []
    async with raw_connection(database.dsn) as other, client_of(service) as client, trio.open_nursery() as nursery:

        async def cancel_both():
            answers.append(await client.post("/api/v1/jobs/cancel", json={"queue": "q"}))

        # The server rolls back the session whose timeout ends first.
        await other.execute("SET deadlock_timeout = '1min'")
        await other.execute("BEGIN")
        await other.fetch(lock, second)
        nursery.start_soon(cancel_both)
        await until(lambda: raw.fetchval(waiting), lambda count: count == 1)
        await other.fetch(lock, first)
        await other.execute("ROLLBACK")
    [answer] = answers
    assert (answer.status_code, answer.json()) == (200, {"changed": 2})
    assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'canceled'") == 2
    assert await raw.fetchval("SELECT count(*) FROM dl_audit") == 1
    service.signal(signal.SIGTERM)
    assert await service.exit_code(within_s=20) == 0
    assert await until(lambda: raw.fetchval(DEADLOCKS)) == 1
    assert "still waits" not in database.deadlocks()
    assert "FOR UPDATE" in database.deadlocks()


@pytest.fixture
def roll_back(raw):
    """Return a function that makes the server roll back the first `times` job changes that match `when`."""

    async def roll_back(code, times, when):
        await raw.execute(f"""
            CREATE SEQUENCE changes;
            CREATE FUNCTION roll_back() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
              IF nextval('public.changes') <= {times} THEN
                RAISE EXCEPTION 'because of others' USING ERRCODE = '{code}';
              END IF;
              RETURN NEW;
            END $$;
            CREATE TRIGGER roll_back BEFORE UPDATE ON dl_jobs
              FOR EACH ROW WHEN ({when}) EXECUTE FUNCTION roll_back()""")

    return roll_back


CHANGES = "SELECT last_value FROM changes"


@pytest.mark.requirement("Q4")
@pytest.mark.parametrize("code", ["40P01", "40001"])
async def test_f21_rolled_back_requests_are_retried_a_limited_number_of_times(
    serve, add, raw, client_of, roll_back, code
):
    service = await serve({"of nobody": 1})
    job_id = await add("quick")
    await roll_back(code, 2 * RETRIES - 1, "OLD.status = 'queued' AND NEW.status = 'canceled'")
    async with client_of(service) as client:
        answer = await client.post(f"/api/v1/jobs/{job_id}/cancel")
        assert (answer.status_code, answer.json()["type"]) == (503, "/problems/store-unavailable")
        assert await raw.fetchval(CHANGES) == RETRIES
        assert await raw.fetchval("SELECT status::text FROM dl_jobs") == "queued"
        answer = await client.post(f"/api/v1/jobs/{job_id}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "canceled")
        assert await raw.fetchval(CHANGES) == 2 * RETRIES
    assert await raw.fetchval("SELECT count(*) FROM dl_audit") == 1


@pytest.mark.requirement("Q6", "Q9")
@pytest.mark.parametrize("code", ["40P01", "40001"])
@pytest.mark.parametrize(
    "when", ["OLD.status = 'queued' AND NEW.status = 'running'", "OLD.status = 'running'"], ids=["claim", "outcome"]
)
async def test_f21_claims_and_outcomes_rolled_back_beyond_the_limit_succeed_later(
    serve, add, raw, row_when, roll_back, code, when
):
    await roll_back(code, 2 * RETRIES + 1, when)
    service = await serve(**FAST)
    row = await row_when(await add("quick", lock_key="k"), "succeeded", within_s=30)
    assert (row["attempt"], row["crashes"], row["refunds"]) == (1, 0, 0)
    assert await raw.fetchval(CHANGES) > 2 * RETRIES + 1
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = hashtext('k')::bigint & 4294967295"
    await until(lambda: raw.fetchval(held), lambda count: count == 0)
    assert service.process.poll() is None
