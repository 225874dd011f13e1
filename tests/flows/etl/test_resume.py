"""An interrupted run continues where it was: no data is requested twice, lost, doubled or skipped (E6, E10)."""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from datetime import date, timedelta
from functools import partial

import pytest
import trio
from conditions import until
from etl_tasks import BEARS_ALL, COUNTED, day, detailed_load, item, items_load
from source_app import Answer

from dataloader import Tasks
from dataloader.flows.etl import Table, Windows, run_load
from dataloader.flows.etl.run.load_metrics import LoadMetrics
from dataloader.testing import drain_queue

pytestmark = pytest.mark.requirement("E6", "E10")
NEVER_S = 3_600
AT_ONCE_IN = {"batch_timeout": 0.001}
"""Details are merged as they arrive."""


class Stumble(Exception):  # noqa: N818 - not an error of the product
    """Ends an attempt in the middle."""


@pytest.fixture
def two_attempts_of(items, database, raw, limits):
    """Return a function that runs a job of a load.

    Its first attempt ends in the matching request, its second one normally.
    """

    # The run does not wait for the answer that never arrives.
    limits.set(linger_s=0)

    async def two_attempts_of(load, stumbles_at, until_day, ends="succeeded", metrics=None):
        tasks, run = Tasks(), partial(run_load, load, limits=limits.now)

        async def stumble():
            async def asked():
                return items.service.asked(stumbles_at)

            await until(asked)
            raise Stumble

        async def handler(job):
            if metrics is not None:
                metrics.append(job.resource(LoadMetrics))
            if job.attempt > 1:
                return await run(job)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stumble)
                await run(job)
            return None

        items.service.misbehave(stumbles_at, delay_s=NEVER_S)
        tasks.task(load.name)(handler)
        await raw.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, args, lock_key) VALUES (gen_random_uuid(), 'q', $1, $2, 'k')",
            load.name,
            json.dumps({} if until_day is None else {"to": day(until_day)}),
        )
        with trio.fail_after(60):
            [first] = await drain_queue(database.dsn, tasks)
            assert (first.status, "Stumble" in first.error) == ("queued", True)
            await raw.execute("UPDATE dl_jobs SET available_at = now()")
            [second] = await drain_queue(database.dsn, tasks)
        assert second.status == ends, second.error
        return first.result["counts"], second.result["counts"]

    return two_attempts_of


@pytest.fixture
def cursor(raw):
    """Return a function that reads the load's cursor as a day."""

    async def cursor():
        return await raw.fetchval(
            "SELECT to_char((state ->> 'upto')::timestamptz AT TIME ZONE 'UTC', 'YYYY-MM-DD') FROM dl_load_state"
        )

    return cursor


@pytest.mark.slow
async def test_the_next_attempt_asks_for_no_segment_that_is_committed(items, two_attempts_of, table, cursor):
    items.records = [item(number, number) for number in range(1, 6)]
    first, second = await two_attempts_of(items_load(items.service.url), f"from={day(3)}", 6)
    assert items.asked() == [day(number) for number in (1, 2, 3, 3, 4, 5)]
    assert (first["segments"], first["inserted"]) == (2, 2)
    # The job's result covers both attempts.
    assert (second["segments"], second["inserted"]) == (5, 5)
    assert await table("id") == ["1", "2", "3", "4", "5"]
    assert await cursor() == day(6)


@pytest.mark.slow
async def test_the_next_attempt_does_not_look_back_on_what_this_run_has_loaded(
    items, two_attempts_of, counts_of, cursor
):
    items.records = [item(number, number) for number in range(1, 9)]
    two_days = timedelta(days=2)
    windows = Windows(start=date(2026, 1, 1), segment=two_days, column="day", look_back=timedelta(days=1))
    load = items_load(items.service.url, windows=windows)
    await counts_of(load, to=day(5))
    asked = len(items.service.requests)
    await two_attempts_of(load, f"from={day(7)}", 9)
    assert items.asked()[asked:] == [day(number) for number in (4, 5, 7, 7)]
    assert await cursor() == day(9)


async def test_a_segment_that_was_not_whole_is_asked_for_again_and_not_passed_over(
    items, two_attempts_of, table, cursor, soon
):
    items.records = [item(number, number) for number in range(1, 5)]
    items.service.misbehave(f"from={day(1)}", status=404)
    first, second = await two_attempts_of(items_load(items.service.url), f"from={day(3)}", 5)
    assert (first["requests_failed"], first["inserted"]) == (1, 1)
    # All sent requests, including those without a record.
    assert (first["requests"], second["requests"]) == (3, 6)
    assert items.asked() == [day(number) for number in (1, 2, 3, 1, 3, 4)]
    assert second["inserted"] == 4
    assert await table("id") == ["1", "2", "3", "4"]
    assert await cursor() == day(5)


async def test_a_segment_that_is_not_whole_in_any_attempt_holds_the_cursor(items, two_attempts_of, table, cursor, soon):
    items.records = [item(number, number) for number in range(1, 5)]
    items.service.misbehave(f"from={day(2)}", times=None, status=404)
    await two_attempts_of(items_load(items.service.url), f"from={day(3)}", 5, ends="failed")
    assert await table("id") == ["1", "3", "4"]
    assert await cursor() == day(2)


@pytest.mark.requirement("E9")
async def test_work_of_an_earlier_attempt_is_counted_once_in_the_metrics(items, two_attempts_of):
    metrics, counted = [], Counter()
    items.records = [item(number, number) for number in range(1, 6)]
    await two_attempts_of(items_load(items.service.url), f"from={day(3)}", 6, metrics=metrics)
    for counts, _ in (one.measures for one in metrics):
        counted.update({name: number for (_, name), number in counts.counts.items()})
    # The request in which the first attempt ended was sent twice.
    assert (counted["inserted"], counted["segments"], counted["requests"]) == (5, 5, 6)


@pytest.mark.slow
async def test_rows_that_were_staged_when_an_attempt_ended_are_not_merged_twice(items, two_attempts_of, table):
    items.records = [item(number, 3) for number in range(1, 5)]
    load = items_load(items.service.url, page_size=2)
    first, second = await two_attempts_of(load, "page=2", 4)
    assert (first["inserted"], first["segments"]) == (2, 2)
    assert (second["inserted"], second["unchanged"], second["segments"]) == (2, 2, 3)
    assert await table("id") == ["1", "2", "3", "4"]


@pytest.mark.full
@pytest.mark.requirement("E6", "Q10")
async def test_after_a_kill_another_process_continues_and_the_table_is_complete(
    items, serve, add, row_when, raw, table, cursor
):
    items.records = [item(number, 1 + number % 30) for number in range(600)]
    environment = {"ITEMS_URL": items.service.url}
    fast = {"default_lease_ttl_sec": 5, "reaper_period_sec": 1, "heartbeat_sec": 1, "claim_backoff_sec": 2}
    service = await serve(tasks="etl_tasks:tasks", environment=environment, **fast)
    items.service.misbehave(f"from={day(16)}", delay_s=NEVER_S)
    job_id = await add("items", {"to": day(31)}, lease_ttl_sec=5)

    async def done():
        return await raw.fetchval("SELECT count(*) FROM dl_etl_segments")

    await until(done, lambda number: number == 15)
    service.signal(signal.SIGKILL)
    await service.exit_code(within_s=10)
    # The dead run has the source until the job's lease ends, not for the duration of a whole request.
    assert await raw.fetchval("SELECT holder IS NOT NULL AND held_until > now() + interval '30 s' FROM dl_sources")
    await serve(tasks="etl_tasks:tasks", environment=environment, **fast)
    row = await row_when(job_id, "succeeded", within_s=40)
    assert row["attempt"] == 2
    assert items.asked() == [day(number) for number in (*range(1, 17), *range(16, 31))]
    assert await table("id") == sorted(map(str, range(600)))
    # The killed process has recorded only the requests of its segments.
    counts = {"segments": 30, "inserted": 600, "requests": 30}
    assert json.loads(row["result"])["counts"].items() >= counts.items()
    assert await cursor() == day(31)
    assert await raw.fetchval("SELECT count(*) FROM pg_class WHERE relname LIKE 'dl_stage%'") == 0


@pytest.mark.full
@pytest.mark.requirement("E6", "Q10")
@pytest.mark.parametrize(
    ("load", "how"),
    [("counted", "SIGKILL"), ("counted", "SIGTERM"), ("counted", "SIGSTOP"), ("counted on trio", "SIGKILL")],
)
async def test_rows_of_a_function_are_written_once_whatever_ends_their_process(serve, add, row_when, raw, load, how):
    await raw.execute("CREATE TABLE event (id int)")
    fast = {"default_lease_ttl_sec": 5, "reaper_period_sec": 1, "heartbeat_sec": 1, "claim_backoff_sec": 2}
    first = await serve(tasks="etl_tasks:tasks", **fast)
    job_id = await add(load, {}, lease_ttl_sec=5)
    await until(partial(raw.fetchval, "SELECT count(*) FROM event"), lambda number: number >= 60)
    first.signal(getattr(signal, how))
    if how != "SIGSTOP":
        await first.exit_code(within_s=20)
    await serve(tasks="etl_tasks:tasks", **fast)
    if how == "SIGSTOP":  # beyond the lease: the first process continues beside the second one
        await until(partial(raw.fetchval, "SELECT attempt FROM dl_jobs"), lambda attempt: attempt == 2)
        first.signal(signal.SIGCONT)
    await row_when(job_id, "succeeded", within_s=60)
    assert await raw.fetchval("SELECT array_agg(id ORDER BY id) FROM event") == [*range(1, COUNTED + 1)]
    assert json.loads(await raw.fetchval("SELECT state FROM dl_load_state")) == {"kind": "checkpoint", "state": COUNTED}


@pytest.mark.full
@pytest.mark.requirement("E7", "Q10")
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
async def test_details_that_have_come_in_are_not_asked_for_again(items, details, serve, add, row_when, raw, table, how):
    items.records = [item(number) for number in range(40)]
    # A drain writes the received rows; before a kill they are written every 0.1 s.
    pipeline = {"batch_timeout": 3_600 if how == "SIGTERM" else 0.1}
    environment = {"ITEMS_URL": items.service.url, "ITEMS_PIPELINE": json.dumps(pipeline)}
    fast = {"default_lease_ttl_sec": 5, "reaper_period_sec": 1, "heartbeat_sec": 1, "claim_backoff_sec": 2}
    service = await serve(tasks="etl_tasks:tasks", environment=environment, drain_timeout_sec=1, **fast)
    items.service.misbehave("id=25", delay_s=NEVER_S)
    job_id = await add("detailed", {}, lease_ttl_sec=5)

    async def come_in():
        return len(details()) if how == "SIGTERM" else await raw.fetchval("SELECT count(*) FROM detail")

    await until(come_in, lambda number: number >= 25)
    service.signal(getattr(signal, how))
    await service.exit_code(within_s=20)
    assert await raw.fetchval("SELECT array_agg(id ORDER BY id) FROM detail") == [*range(25)]
    await serve(tasks="etl_tasks:tasks", environment=environment, **fast)
    row = await row_when(job_id, "succeeded", within_s=60)
    assert details() == [*range(26), *range(25, 40)]
    counts = json.loads(row["result"])["counts"]
    assert (counts["details"], counts["segments"], counts.get("details_failed")) == (40, 1, None)
    assert how == "SIGKILL" or counts["requests"] == len(items.service.requests)
    assert await raw.fetchval("SELECT count(*) FROM detail") == 40
    assert await raw.fetchval("SELECT count(*) FROM dl_etl_details") == 0


@pytest.mark.slow
@pytest.mark.requirement("E3", "E7")
async def test_details_that_have_come_in_are_merged_though_the_next_one_takes_long(items, details, outcome_of, raw):
    released = threading.Event()

    def slow(seen):
        assert seen.query["id"] != "1" or released.wait(60)
        return Answer(json.dumps({"id": int(seen.query["id"])}).encode())

    items.service.put("/detail", slow)
    items.records = [item(number) for number in range(2)]
    # Each row is a batch: nothing remains to be written when the time is over, but the details are not merged yet.
    load = detailed_load(items.service.url, pipeline={"batch_size": 1, "batch_timeout": 1})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, load)
        try:
            await until(partial(raw.fetchval, "SELECT count(*) FROM detail"), lambda number: number == 1)
        finally:
            released.set()
    assert await raw.fetchval("SELECT count(*) FROM detail") == 2


@pytest.mark.slow
@pytest.mark.parametrize("broken", [0, 1], ids=["first answer", "after an unreadable answer"])
async def test_a_detail_is_merged_whose_rows_were_staged_before_its_slot_was_returned(
    items, details, outcome_of, raw, broken
):
    """The fetcher returns the slot only after that, and no other rows arrive that would make the writer merge."""
    answered, released, seen_of_first = threading.Event(), threading.Event(), []
    last = 1 + broken

    def slow(seen):
        number = int(seen.query["id"])
        if number == 0:
            seen_of_first.append(seen)
            if len(seen_of_first) <= broken:
                return Answer(b"{")  # it is requested again before the last one
            assert answered.wait(60)
        assert number < last or released.wait(60)
        return Answer(json.dumps({"id": number}).encode())

    async def staged():
        tables = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname LIKE 'dl\\_stage\\_%\\_1'"
        names = [row["relname"] for row in await raw.fetch(tables)]
        return sum([await raw.fetchval(f'SELECT count(*) FROM "{name}"') for name in names])

    async def asked():
        return len(seen_of_first) > broken

    items.service.put("/detail", slow)
    items.records = [item(number) for number in range(last + 1)]
    load = detailed_load(items.service.url, pipeline={"batch_size": 1, "batch_timeout": 0.2})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outcome_of, load)
        try:
            await until(asked)
            await raw.execute("BEGIN; LOCK TABLE dl_sources IN SHARE MODE")
            answered.set()
            await until(staged, lambda number: number == 1)
            await raw.execute("COMMIT")
            await until(partial(raw.fetchval, "SELECT count(*) FROM detail"), lambda number: number == last)
        finally:
            answered.set()
            released.set()
    assert await raw.fetchval("SELECT count(*) FROM detail") == last + 1


@pytest.mark.slow
@pytest.mark.requirement("E7")
async def test_a_failed_detail_is_requested_again_and_its_failure_is_then_solved(items, details, two_attempts_of, raw):
    items.records = [item(number) for number in range(8)]
    items.service.misbehave("id=3", status=404)
    load = detailed_load(items.service.url, pipeline=AT_ONCE_IN)
    first, second = await two_attempts_of(load, "id=6", None)
    assert (first["details"], first["details_failed"]) == (5, 1)
    assert details() == [0, 1, 2, 3, 4, 5, 6, 3, 6, 7]
    assert (second["details"], second.get("details_failed")) == (8, None)
    assert await raw.fetchval("SELECT count(*) FROM dl_etl_failures WHERE solved_at IS NULL") == 0


@pytest.mark.slow
@pytest.mark.requirement("E7", "E10")
async def test_failures_in_a_loaded_detail_count_until_they_are_solved(items, details, two_attempts_of, raw):
    def transform(_number, record):
        if record["id"] == 3:
            raise ValueError("bad")
        return record

    items.records = [item(number) for number in range(8)]
    load = detailed_load(items.service.url, detail_transform=transform, pipeline=AT_ONCE_IN | BEARS_ALL)
    first, second = await two_attempts_of(load, "id=6", None)
    assert details() == [*range(7), 6, 7]
    assert (first["records_failed"], second["records_failed"], second["details"]) == (1, 1, 8)
    assert await raw.fetchval("SELECT status FROM dl_etl_runs") == "succeeded_with_failures"
    assert await raw.fetchval("SELECT array_agg(phase) FROM dl_etl_failures WHERE solved_at IS NULL") == ["record"]


@pytest.mark.slow
@pytest.mark.requirement("E7")
async def test_details_whose_table_marks_what_is_gone_are_all_asked_for_again(items, details, two_attempts_of, raw):
    await raw.execute("ALTER TABLE detail ADD gone bool NOT NULL DEFAULT false; INSERT INTO detail VALUES (99, 'a')")
    items.records = [item(number) for number in range(4)]
    table = Table("detail", key="id", delete_missing="gone")
    load = detailed_load(items.service.url, table=table, pipeline=AT_ONCE_IN)
    await two_attempts_of(load, "id=2", None)
    assert details() == [0, 1, 2, 0, 1, 2, 3]
    assert await raw.fetchval("SELECT array_agg(id) FROM detail WHERE gone") == [99]


@pytest.mark.slow
@pytest.mark.requirement("E10")
async def test_failures_of_an_earlier_attempt_count_unless_they_were_solved_since(items, two_attempts_of, raw):
    items.records = [item(number, 1 + number // 50) for number in range(200)]
    items.records[7]["id"] = None
    first, second = await two_attempts_of(items_load(items.service.url), f"from={day(3)}", 5)
    assert (first["records_failed"], second["records_failed"], second["records"]) == (1, 1, 200)
    assert await raw.fetchval("SELECT status FROM dl_etl_runs") == "succeeded_with_failures"


@pytest.mark.slow
@pytest.mark.requirement("E10")
@pytest.mark.parametrize("asked", ["all", [1, 2]])
async def test_a_failed_retry_stays_open_if_the_attempt_ends_before_its_job(items, database, raw, outcome_of, asked):
    items.records = [{**item(number), "id": None} for number in range(2)]
    load = items_load(items.service.url, pipeline=BEARS_ALL)
    await outcome_of(load, to="2026-01-02")
    items.records[0]["id"] = 0
    # The database refuses the first write of the load's end.
    await raw.execute("""
        CREATE SEQUENCE ends;
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
          IF NEW.status NOT IN ('waiting', 'running') AND nextval('ends') = 1 THEN RAISE 'not now'; END IF;
          RETURN NEW;
        END $$;
        CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON dl_etl_tasks FOR EACH ROW EXECUTE FUNCTION refuse();
    """)
    tasks = Tasks()

    @tasks.task(load.name)
    async def handler(job):
        return await run_load(load, job)

    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, args, lock_key) VALUES (gen_random_uuid(), 'q', $1, $2, 'k')",
        load.name,
        json.dumps({"failures": asked}),
    )
    ends = []
    for _ in range(2):
        await raw.execute("UPDATE dl_jobs SET available_at = now()")
        ends += await drain_queue(database.dsn, tasks)
    # The repeated failure counts in the second attempt, too, which has nothing to request.
    assert [(end.status, "records_failed" in end.result["counts"]) for end in ends] == [
        ("queued", True),
        ("succeeded", True),
    ]
    assert len(items.service.requests) == 2
    failures = await raw.fetch("SELECT solved_at IS NULL AS is_open FROM dl_etl_failures ORDER BY failure_id")
    assert [row["is_open"] for row in failures] == [False, False, True]


@pytest.mark.slow
@pytest.mark.requirement("E3")
async def test_the_memory_of_a_process_stays_where_it_is_in_a_long_load(items, serve, add, row_when, raw, unmeasured):
    # The same 2,000 rows each day, with the memory of the process by then: 20 MB in total.
    rows = [item(number) | {"text": "x" * 200} for number in range(2_000)]
    await raw.execute("ALTER TABLE item ADD text text")

    def days(seen):
        of_day = int(seen.query["from"][-2:])
        items.records = [row | {"id": row["id"] + 2_000 * of_day, "day": day(of_day)} for row in rows]

    items.before = days
    await serve(tasks="etl_tasks:tasks", environment={"ITEMS_URL": items.service.url})
    job_id = await add("measured", {"to": day(31), "pipeline": {"batch_size": 1_000}})
    await row_when(job_id, "succeeded", within_s=60)
    [after_3, after_30] = [
        await raw.fetchval("SELECT max(value::int) / 1024 FROM item WHERE day <= $1", date(2026, 1, number))
        for number in (3, 30)
    ]
    assert await raw.fetchval("SELECT count(*) FROM item") == 60_000
    assert after_30 - after_3 < 30, f"{after_3} MiB after three days, {after_30} after thirty"
