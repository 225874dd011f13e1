"""Only one request at a time, over all runs and processes, with pauses between them (E1)."""

from __future__ import annotations

import itertools
import random
from datetime import UTC, datetime

import pytest
import trio
from conditions import patience_s
from etl_tasks import item, items_load

from dataloader import Tasks
from dataloader.flows.etl import RateLimit, add_loads
from dataloader.flows.etl.fetch.rate_limiter import RateLimiter
from dataloader.flows.etl.run.load_progress import LoadProgress
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.etl.suppliers import aio_take_slot
from dataloader.testing import run_task

pytestmark = pytest.mark.requirement("E1")
PAUSED = {"rate_min": 0.2, "rate_max": 0.2}


async def test_requests_go_one_at_a_time_in_the_order_of_windows_and_pages(items, counts_of):
    items.records = [item(number, of_day) for number, of_day in enumerate([1, 1, 1, 2, 3, 3, 3, 3, 3])]
    counts = await counts_of(items_load(items.service.url, page_size=2), to="2026-01-04")
    asked = ["2026-01-01/1", "2026-01-01/2", "2026-01-02/1", "2026-01-03/1", "2026-01-03/2", "2026-01-03/3"]
    assert items.asked() == asked
    assert counts["requests"] == 6
    assert items.service.most_at_once() == 1


@pytest.mark.slow
async def test_a_pause_is_drawn_evenly_between_the_two_settings_for_each_request(database, items, counts_of):
    drawn = []

    class Draw(random.Random):
        def uniform(self, least, most):
            drawn.append((least, most))
            return super().uniform(least, most)

    pauses = []
    async with open_database(DatabaseOptions(dsn=database.dsn)) as opened:
        limiter = RateLimiter(
            database=opened,
            holder=1,
            progress=LoadProgress(load="items", max_failures=1),
            rate_min=7,
            rate_max=11,
            lease_s=60,
            draw=Draw(5),
        )
        for number in range(20):
            async with limiter.slot(f"source {number}", 1):
                pass
            pauses.append((await opened.run(aio_take_slot, f"source {number}", 2, 60.0)).wait_s)
    assert drawn == [(7, 11)] * 20
    assert 6 < min(pauses) < 8.5
    assert 9.5 < max(pauses) <= 11
    # A load passes its settings to it; the next caller keeps the last pause.
    await counts_of(items_load(items.service.url, pipeline={"rate_min": 0.15, "rate_max": 0.2}), to="2026-01-04")
    assert len(items.gaps()) == 2
    assert min(items.gaps()) >= 0.15


@pytest.mark.slow
async def test_a_slow_response_does_not_eat_the_pause(items, counts_of):
    items.service.misbehave(times=1, delay_s=0.3)
    await counts_of(items_load(items.service.url, pipeline=PAUSED), to="2026-01-03")
    assert items.gaps()[0] >= 0.2


@pytest.mark.slow
async def test_the_pause_after_the_last_request_of_a_run_holds_for_the_next_run(items, counts_of, raw):
    load = items_load(items.service.url, windows=None, pipeline=PAUSED)
    await counts_of(load)
    # As if the first run had ended a little earlier: the end of its pause, by the database, matters.
    await raw.execute("UPDATE dl_sources SET free_at = clock_timestamp() + interval '0.5 s'")
    free_at = await raw.fetchval("SELECT free_at FROM dl_sources")
    asked_at = []
    items.before = lambda _seen: asked_at.append(datetime.now(UTC))
    await counts_of(load)
    assert asked_at[0] >= free_at


async def test_a_pause_is_not_delayed_by_the_processing(items, counts_of):
    items.records = [item(1, 1), item(2, 2)]
    second = trio.Event()
    entry = trio.lowlevel.current_trio_token()

    def transform(record):
        # The first record's processing ends only when the second request has arrived.
        if record["id"] == 1:
            trio.from_thread.run(_watched, second, trio_token=entry)
        return record

    items.before = lambda seen: seen.query["from"] == "2026-01-02" and entry.run_sync_soon(second.set)
    counts = await counts_of(items_load(items.service.url, transform=transform), to="2026-01-03")
    assert (counts["inserted"], counts.get("records_failed")) == (2, None)


async def _watched(event):
    with trio.fail_after(patience_s()):
        await event.wait()


@pytest.mark.slow
async def test_runs_of_two_loads_never_have_two_requests_at_one_source_and_keep_its_pause(items, database):
    tasks = Tasks()
    add_loads(tasks, *(items_load(items.service.url, name=name, pipeline=PAUSED) for name in "ab"))
    items.service.misbehave(times=None, delay_s=0.03)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for name in "ab":
                nursery.start_soon(_succeed, tasks, name, database.dsn)
    assert len(items.service.requests) == 6
    assert items.service.most_at_once() == 1
    assert min(items.gaps()) >= 0.2


async def _succeed(tasks, name, dsn):
    outcome = await run_task(tasks, name, {"to": "2026-01-04"}, dsn=dsn)
    assert outcome.status == "succeeded", outcome.error


@pytest.mark.slow
@pytest.mark.requirement("E1", "S4")
async def test_several_rate_limits_apply_together_and_over_two_runs(items, counts_of, raw):
    # The third, which is never reached, keeps all calls recorded.
    rate_limits = (RateLimit(2, 0.4), RateLimit(3, 0.9), RateLimit(1_000, 3_600))
    for _ in range(2):
        load = items_load(items.service.url, rate_limits=rate_limits)
        await counts_of(load, **{"from": "2026-01-01", "to": "2026-01-04"})
    calls = [row["at"] for row in await raw.fetch("SELECT at FROM dl_source_calls ORDER BY at")]
    assert len(calls) == len(items.service.requests) == 6
    assert min((after - before).total_seconds() for before, after in zip(calls, calls[2:], strict=False)) >= 0.4
    assert min((after - before).total_seconds() for before, after in zip(calls, calls[3:], strict=False)) >= 0.9


@pytest.mark.slow
async def test_a_run_that_waits_for_its_rate_limit_says_so(items, outcome_of, soon):
    load = items_load(items.service.url, rate_limits=(RateLimit(1, 0.3),))
    outcome = await outcome_of(load, to="2026-01-03")
    assert "rate-limit" in {waiting["for"] for waiting in waits_of(outcome)}


def waits_of(outcome):
    """Return the waiting reasons of a run, from its progress."""
    return [progress["waiting"] for progress in outcome.progress if "waiting" in progress]


@pytest.mark.slow
async def test_the_place_of_a_run_that_died_in_a_request_is_free_after_its_time(items, outcome_of, raw, soon):
    await raw.execute("""
        INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, attempt, token, claimed_by, started_at,
          heartbeat_at, lease_expires_at)
        VALUES (gen_random_uuid(), 'q', 't', 'k', 'running', 1, 4711, 'w', now(), now(), now() + interval '1 hour')""")
    await raw.execute("""
        INSERT INTO dl_sources (source, holder, held_until)
        VALUES ('127.0.0.1', 4711, clock_timestamp() + interval '3 s')""")
    held_until = await raw.fetchval("SELECT held_until FROM dl_sources")
    asked_at = []
    items.before = lambda _seen: asked_at.append(datetime.now(UTC))
    outcome = await outcome_of(items_load(items.service.url, windows=None))
    assert outcome.status == "succeeded"
    assert asked_at[0] >= held_until
    [waiting] = {(waiting["for"], waiting["source"]) for waiting in waits_of(outcome)}
    assert waiting == ("request", "127.0.0.1")


@pytest.mark.slow
async def test_a_request_has_its_source_for_its_own_deadline_and_a_margin(items, counts_of, raw, database):
    held = []
    lease = "SELECT extract(epoch FROM held_until - clock_timestamp()) FROM dl_sources"
    items.before = lambda _seen: held.append(float(database.psql(lease)))
    await counts_of(items_load(items.service.url, windows=None, pipeline={"request_timeout": 30}))
    assert 30 < held[0] <= 45
    assert await raw.fetchval("SELECT holder IS NULL AND held_until IS NULL FROM dl_sources")


@pytest.mark.slow
async def test_a_429_with_retry_after_holds_the_next_request_back_and_the_run_says_so(items, outcome_of, soon, raw):
    items.service.misbehave(status=429, headers={"Retry-After": "1"})
    outcome = await outcome_of(items_load(items.service.url, windows=None))
    assert outcome.status == "succeeded"
    first, second = items.service.requests
    assert first.status == 429
    assert second.began_at - first.began_at >= 1
    [waiting] = {(waiting["for"], waiting["source"]) for waiting in waits_of(outcome)}
    assert waiting == ("retry-after", "127.0.0.1")
    assert all(datetime.fromisoformat(waiting["until"]).tzinfo for waiting in waits_of(outcome))
    assert "waiting" not in outcome.progress[-1]


async def test_a_source_s_own_words_hold_for_other_runs_too(items, outcome_of, raw, soon):
    items.service.misbehave(status=429, headers={"Retry-After": "60"}, times=None)
    load = items_load(items.service.url, windows=None, pipeline={"attempts": 1})
    assert (await outcome_of(load)).result["counts"]["requests_failed"] == 1
    free = await raw.fetchrow("SELECT free_at > now() + interval '50 s' AS late, waits_for FROM dl_sources")
    assert tuple(free) == (True, "retry-after")


async def test_each_request_is_logged_with_endpoint_segment_status_and_time(items, outcome_of, soon):
    items.service.misbehave("from=2026-01-02", status=503)
    outcome = await outcome_of(items_load(items.service.url), to="2026-01-03")
    lines = [line for line in outcome.log if line.message.startswith("request")]
    assert [(line.message, line.fields["endpoint"], line.fields["status"]) for line in lines] == [
        ("request", "/items", 200),
        ("request failed", "/items", 503),
        ("request", "/items", 200),
    ]
    days = [line.fields["segment"][:10] for line in lines]
    assert days == ["2026-01-01", "2026-01-02", "2026-01-02"]
    took = [line.fields["took_s"] for line in lines if line.message == "request"]
    assert [type(seconds) for seconds in took] == [float, float]
    assert [line.fields["attempt"] for line in lines if line.message == "request failed"] == ["1 of 3"]


@pytest.mark.slow
async def test_the_waits_between_tries_double(items, outcome_of, limits):
    limits.set(retry_s=(0.2, 30.0))
    items.service.misbehave(status=500, times=2)
    assert (await outcome_of(items_load(items.service.url, windows=None))).status == "succeeded"
    began_at = [seen.began_at for seen in items.service.requests]
    waits = [after - before for before, after in itertools.pairwise(began_at)]
    assert waits[0] >= 0.2
    assert waits[1] >= 0.4
