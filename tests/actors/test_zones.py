"""Time zones: this machine and the database each have their own data, which may differ (S4)."""

from __future__ import annotations

import zoneinfo
from importlib.resources import files
from pathlib import Path

import httpx2
import pytest
import trio
from conditions import patience_s, when_ended
from logged import capture_logs

from dataloader import RateLimit, Supplier, Tasks
from dataloader.jobs.error_groups import single_errors
from dataloader.jobs.errors import BadRequest

pytestmark = pytest.mark.requirement("S4")

UNKNOWN = "Nowhere/Land"
ALL_WEEK = ["DAILY 00:00-24:00"]


async def noop(_job): ...


def rules_of(name):
    """Return the data of a zone."""
    for folder in zoneinfo.TZPATH:
        if (path := Path(folder, name)).is_file():
            return path.read_bytes()
    return files("tzdata").joinpath("zoneinfo", *name.split("/")).read_bytes()


@pytest.fixture
def put_zone(tmp_path):
    """Return a function that gives this process, but not the database, a zone with the rules of another one."""
    paths = zoneinfo.TZPATH

    def put_zone(name, like):
        path = tmp_path / "zones" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rules_of(like))
        zoneinfo.reset_tzpath([tmp_path / "zones", *paths])
        zoneinfo.ZoneInfo.clear_cache()

    yield put_zone
    zoneinfo.reset_tzpath(paths)
    zoneinfo.ZoneInfo.clear_cache()


@pytest.fixture
def tasks():
    tasks = Tasks()
    supplier = Supplier("s", rate_limits=(RateLimit(1_000, per_s=60),))
    tasks.task("t", queue="q", supplier=supplier, work_periods=ALL_WEEK)(noop)
    return tasks


@pytest.mark.slow
async def test_a_zone_that_the_database_does_not_know_is_refused(open_worker, put_zone, tasks, raw):
    put_zone(UNKNOWN, "Europe/Berlin")
    refusal = rf"^{{0}}: must be a time zone that the database server knows, not '{UNKNOWN}'"
    day = {"requests": 10, "per": "day", "zone": UNKNOWN}
    async with open_worker(tasks, with_web=True) as supervisor, httpx2.AsyncClient() as client:
        with pytest.raises(BadRequest, match=refusal.format("zone")):
            await supervisor.limits.set_tasks({"t": {"zone": UNKNOWN}})
        with pytest.raises(BadRequest, match=refusal.format("zone")):
            await supervisor.limits.set_supplier("s", {"zone": UNKNOWN})
        with pytest.raises(BadRequest, match=refusal.format(r"rate_limits\[1\]\.zone")):
            await supervisor.limits.set_supplier("s", {"rate_limits": [[10, 60], day]})
        for path in ("tasks/t", "suppliers/s"):
            answer = await client.patch(f"{supervisor.url}/api/v1/{path}", json={"zone": UNKNOWN})
            assert (answer.status_code, UNKNOWN in answer.text, "zone" in answer.text) == (422, True, True)
        # All changes are applied, or none.
        assert await raw.fetchval("SELECT count(*) FROM dl_tasks WHERE override IS NOT NULL") == 0
        await supervisor.limits.set_tasks({"t": {"zone": "Europe/Berlin"}})
        job = await supervisor.jobs.enqueue("t")
        assert (await when_ended(supervisor, job.job_id)).status == "succeeded"


async def test_a_start_with_a_zone_that_the_database_does_not_know_ends_with_one_error(open_worker, put_zone):
    put_zone(UNKNOWN, "Europe/Berlin")
    tasks = Tasks()
    tasks.task("t", queue="q", work_periods=ALL_WEEK, zone=UNKNOWN)(noop)
    with pytest.raises(BaseExceptionGroup) as refused:  # noqa: ASYNC401 - groups are nested by the parts of the tree
        async with open_worker(tasks):
            pass
    [error] = single_errors(refused.value)
    assert isinstance(error, BadRequest)
    assert str(error).startswith("task 't': zone: must be a time zone that the database server knows")


@pytest.mark.slow
async def test_a_zone_that_became_unknown_later_keeps_no_service_from_starting(open_worker, tasks, raw, put_zone):
    put_zone(UNKNOWN, "Europe/Berlin")
    tasks.task("of a former server", queue="q", work_periods=ALL_WEEK)(noop)
    async with open_worker(tasks):
        pass
    declared = """limits = jsonb_set(limits, '{zone}', to_jsonb($1::text)), zone = $1"""
    await raw.execute(f"UPDATE dl_tasks SET {declared} WHERE task = 'of a former server'", UNKNOWN)
    again = Tasks()
    again.task("t", queue="q", work_periods=ALL_WEEK)(noop)
    again.task("of a former server", queue="q", work_periods=ALL_WEEK, zone=UNKNOWN, at_period_end="finish")(noop)
    async with open_worker(again) as supervisor:
        job = await supervisor.jobs.enqueue("t")
        assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
        assert (await supervisor.limits.task("of a former server")).closed == "error"


@pytest.mark.slow
async def test_a_zone_that_the_database_reads_as_an_abbreviation_is_refused(open_worker, tasks):
    """For Python, CET is a region with summer time; for PostgreSQL, it is one hour ahead of UTC in the whole year."""
    async with open_worker(tasks) as supervisor:
        with pytest.raises(BadRequest, match=r"^zone: must be .* treats 'CET' as an abbreviation"):
            await supervisor.limits.set_tasks({"t": {"zone": "CET"}})
        await supervisor.limits.set_tasks({"t": {"zone": "GMT"}})


@pytest.mark.slow
async def test_a_zone_with_other_rules_than_the_databases_is_warned_of(open_worker, put_zone, tasks):
    put_zone("Europe/Berlin", "Asia/Tokyo")
    async with open_worker(tasks) as supervisor:
        with capture_logs() as lines:
            await supervisor.limits.set_tasks({"t": {"zone": "Europe/Berlin"}})
            await supervisor.limits.set_tasks({"t": {"zone": "Europe/Paris"}})
    warned = [line for line in lines if "different rules for a time zone" in line["event"]]
    assert [(line["zone"], line["own_offset_s"]) for line in warned] == [("Europe/Berlin", 32_400)]
    assert warned[0]["database_offset_s"] in {3_600, 7_200}


@pytest.mark.slow
async def test_runs_that_stop_at_a_close_go_by_the_databases_clock_of_a_zone(open_worker, put_zone, raw):
    """By this machine's data the period is over: a run would be stopped, and claimed again, continuously."""
    put_zone("Etc/GMT+1", "Asia/Tokyo")
    # Open now and for hours by the clock of GMT+1; in Tokyo it is ten hours later.
    open_now = await raw.fetchrow(
        "SELECT to_char(now() AT TIME ZONE 'Etc/GMT+1' - interval '2 hours', 'HH24:MI') AS begins,"
        " to_char(now() AT TIME ZONE 'Etc/GMT+1' + interval '2 hours', 'HH24:MI') AS ends"
    )
    tasks = Tasks()
    period = f"DAILY {open_now['begins']}-{open_now['ends']}"

    @tasks.task("t", queue="q", work_periods=[period], zone="Etc/GMT+1", at_period_end="stop")
    async def run(job):
        await trio.sleep(0.3)

    async with open_worker(tasks) as supervisor:
        await supervisor.signals.period_ends.wait_until(lambda tasks: "t" in tasks)
        job = await supervisor.jobs.enqueue("t")
        assert (await when_ended(supervisor, job.job_id, within_s=patience_s())).status == "succeeded"
        assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'requeue'") == 0
        task = await supervisor.limits.task("t")
        assert (task.closed, task.left) == (None, None)
