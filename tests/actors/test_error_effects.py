"""Each meaning of a database error has one effect in each part of a service, as docs/outages.md says."""

from __future__ import annotations

from functools import partial

import httpx2
import pytest
from conditions import until, when_ended
from logged import capture_logs

from dataloader import RetryPolicy, Tasks

OUTAGE, CONFLICT, BAD_VALUE, BUG = "57P03", "40001", "22003", "42501"
PASSING = [OUTAGE, CONFLICT, "53100", "25006", "08006"]
REFUSING = """
CREATE TABLE refusing (event text, code text);
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql SET search_path = public AS $$
DECLARE v_code text;
BEGIN
  SELECT code INTO v_code FROM refusing WHERE event = CASE TG_OP WHEN 'INSERT' THEN 'added' ELSE NEW.status::text END;
  IF v_code IS NOT NULL AND NEW.args ? 'refused' THEN
    RAISE EXCEPTION USING ERRCODE = v_code, MESSAGE = 'refused by a test';
  END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON dl_jobs FOR EACH ROW EXECUTE FUNCTION refuse();
"""


@pytest.fixture
async def refusing(raw):
    """Return a function that makes statements about a job with the argument `refused` fail with a SQLSTATE."""
    await raw.execute(REFUSING)

    async def refusing(event, code):
        await raw.execute("DELETE FROM refusing")
        if code is not None:
            await raw.execute("INSERT INTO refusing VALUES ($1, $2)", event, code)

    return refusing


@pytest.fixture
def tasks():
    tasks = Tasks()

    @tasks.task("quick", queue="q")
    async def quick(job):
        return None

    return tasks


@pytest.mark.slow
@pytest.mark.requirement("Q2")
async def test_a_trigger_is_answered_by_the_meaning_of_the_error(open_worker, tasks, refusing):
    expected = dict.fromkeys(PASSING, 503) | dict.fromkeys([BAD_VALUE, "23514", "54000", "P0001"], 422)
    expected |= dict.fromkeys([BUG, "XX001", "0A000"], 500)
    async with open_worker(tasks, with_web=True) as supervisor, httpx2.AsyncClient(timeout=30) as client:
        for code, status in expected.items():
            await refusing("added", code)
            body = {"task": "quick", "queue": "q", "lock_key": code, "args": {"refused": code}}
            answer = await client.post(f"{supervisor.url}/api/v1/jobs/trigger", json=body)
            assert (code, answer.status_code) == (code, status), answer.text
            assert ("retry-after" in answer.headers) == (status == 503)


@pytest.mark.slow
@pytest.mark.requirement("Q8")
@pytest.mark.parametrize("code", [*PASSING, BUG])
async def test_an_outcome_waits_until_it_can_be_written(open_worker, tasks, refusing, raw, code):
    with capture_logs() as lines:
        async with open_worker(tasks) as supervisor:
            await refusing("succeeded", code)
            job = await supervisor.jobs.enqueue("quick", {"refused": 1})
            await until(partial(tries, lines, "recorder"))
            assert await raw.fetchval("SELECT status FROM dl_jobs") == "running"
            await refusing("succeeded", None)
            ended = await when_ended(supervisor, job.job_id)
            assert (ended.status, ended.attempt) == ("succeeded", 1)


async def tries(lines, part):
    """Return the logged failures of a part."""
    return [line for line in lines if line["event"] == "an attempt failed" and line["part"] == part]


@pytest.mark.slow
@pytest.mark.requirement("Q12")
@pytest.mark.parametrize(
    ("code", "error"),
    [
        (OUTAGE, "StoreUnavailable"),
        (CONFLICT, "StoreUnavailable"),
        (BAD_VALUE, "Unstorable"),
        (BUG, "StoreError"),
        # A third server that the statement needs is not reachable.
        ("08001", "StoreError"),
    ],
)
async def test_a_handlers_transaction_raises_the_meaning_and_the_policy_retries_it(open_worker, raw, code, error):
    tasks, raised = Tasks(), []
    await raw.execute("CREATE TABLE ledger (n int)")

    @tasks.task("book", queue="q", max_attempts=2, retry=RetryPolicy(base_s=0, jitter=0))
    async def book(job):
        try:
            async with job.transaction() as transaction:
                await transaction.execute("INSERT INTO ledger VALUES (1)")
                if job.attempt == 1:
                    await transaction.execute(f"DO $$ BEGIN RAISE SQLSTATE '{code}'; END $$")
        except Exception as failure:
            raised.append(type(failure).__name__)
            raise

    async with open_worker(tasks) as supervisor:
        job = await supervisor.jobs.enqueue("book")
        ended = await when_ended(supervisor, job.job_id)
        assert (ended.status, ended.attempt, raised) == ("succeeded", 2, [error])
        assert await raw.fetchval("SELECT count(*) FROM ledger") == 1


@pytest.mark.full
@pytest.mark.requirement("R7")
@pytest.mark.parametrize("code", [*PASSING, BUG, "XX001", "42804"])
async def test_a_schedule_waits_for_the_end_of_an_outage_or_of_a_bug(open_worker, tasks, refusing, raw, code):
    tasks.schedule("often", task="quick", every_s=1, args={"refused": 1})
    await refusing("added", code)
    with capture_logs() as lines:
        async with open_worker(tasks):
            await until(partial(tries, lines, "scheduler"))
            assert await raw.fetchval("SELECT paused OR paused_why IS NOT NULL FROM dl_schedules") is False
            await refusing("added", None)
            await until(lambda: raw.fetchval("SELECT count(*) FROM dl_jobs"), within_s=20)


@pytest.mark.full
@pytest.mark.requirement("R7")
@pytest.mark.parametrize("code", [BAD_VALUE, "23514", "54000", "P0001"])
async def test_a_schedule_whose_job_is_a_bad_value_is_paused_with_it(open_worker, tasks, refusing, raw, code):
    tasks.schedule("often", task="quick", every_s=1, args={"refused": 1})
    tasks.schedule("well", task="quick", every_s=1)
    await refusing("added", code)
    async with open_worker(tasks):
        why = await until(lambda: raw.fetchval("SELECT paused_why FROM dl_schedules WHERE name = 'often'"), within_s=20)
        assert "refused by a test" in why
        await until(lambda: raw.fetchval("SELECT count(*) FROM dl_jobs WHERE NOT args ? 'refused'"), within_s=20)
