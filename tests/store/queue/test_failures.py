"""Failures (R2, S6): their groups, their retry, and the log of errors."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
import trio
from foreign import BACK_OFF
from foreign import CLAIM as FOREIGN_CLAIM

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.failures import GroupRetry, group_id, group_key
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.states import Status, Step
from dataloader.store.queue import control, failing_jobs, failures, reads
from dataloader.store.queue.leases import reap

pytestmark = pytest.mark.requirement("R2")

ALICE = Operator("alice")
NOW = datetime.now(UTC)
GROUPS = {
    'ValueError: no answer from "http://x/1" after 3 tries': "ValueError: no answer from … after # tries",
    "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/x1'\n\nTraceback": (
        "FileNotFoundError: [Errno #] No such file or directory: …"
    ),
    "can't reach it, it doesn't answer": "can't reach it, it doesn't answer",
    "KeyError: 'x'": "KeyError: …",
    "HTTP 503 at 10:20:33 for id=3f2a-ab12-ffff, row 17: `q`": "HTTP # at # for id=#, row # …",
    "Ошибка «имя» в строке №7": "Ошибка … в строке #",
    "\n \r\n  worker lost: the lease of w-1 ended in attempt 2\r\n\r\nmore": (
        "worker lost: the lease of # ended in attempt #"
    ),
    "x" * 5_000: "x" * 300,
    "": "",
    None: "",
}
ADD = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, error, attempt, created_at, available_at)
SELECT gen_random_uuid(), 'q', $1, 'k' || i, $2::text::dl_status, replace($3, '{i}', i::text), 3,
       now() - make_interval(secs => i), CASE WHEN $2 = 'queued' THEN now() + interval '1 h' ELSE now() END
FROM generate_series(1, $4::int) AS i RETURNING job_id
"""


@pytest.fixture
def add_failed(raw):
    async def add_failed(number, error="ValueError: no row {i}", *, task="t", status="failed"):
        return [row["job_id"] for row in await raw.fetch(ADD, task, status, error, number)]

    return add_failed


async def retried(store, group, **wanted):
    return (await failures.retry_group(store, GroupRetry(group=group, **wanted), ALICE)).changed


async def test_a_group_is_the_first_line_without_what_differs_from_job_to_job(raw):
    for error, group in GROUPS.items():
        assert await raw.fetchval("SELECT dl_error_group($1)", error) == group
        assert await raw.fetchval("SELECT dl_error_group($1)", group) == group


def test_an_id_of_a_group_stands_for_its_numbers_and_nothing_else_is_one():
    for numbers in [(0, None), (-1, 2**63 - 1), (-(2**63), -(2**63)), (1, 0)]:
        assert group_key("group", group_id(*numbers)) == numbers
    for text in ("", "0", "0" * 17, "0" * 16 + ".", "G" * 16, "0" * 16 + ".0", "0" * 16 + "\n"):
        with pytest.raises(BadRequest, match="must be the ID of an error group"):
            JobFilter(error_group=text)


async def test_jobs_that_failed_or_wait_for_a_retry_are_counted_by_task_and_error(store, raw, add_failed):
    await add_failed(5)
    await add_failed(3, status="queued")
    await add_failed(2, task="u")
    await add_failed(1, "worker lost", status="lost")
    for status in ("running", "succeeded", "canceled"):
        await add_failed(2, status=status)
    await raw.execute("INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES (gen_random_uuid(), 'q', 't', 'k')")
    page = await failures.list_error_groups(store)
    found = [(one.task, one.error, one.jobs, one.waiting) for one in page.groups]
    assert found == [
        ("t", "ValueError: no row #", 8, 3),
        ("u", "ValueError: no row #", 2, 0),
        ("t", "worker lost", 1, 0),
    ]
    first = page.groups[0]
    times = "SELECT min(created_at), max(created_at) FROM dl_jobs WHERE error_group = $1 AND status <> 'canceled'"
    assert (first.first_created_at, first.last_created_at) == tuple(
        await raw.fetchrow(times, group_key("group", first.group)[0])
    )
    assert (await reads.get_job(store, first.example)).created_at == first.last_created_at
    for wanted, counts in [({"state": "waiting"}, [3]), ({"state": "failed"}, [5, 2, 1]), ({"task": "u"}, [2])]:
        assert [one.jobs for one in (await failures.list_error_groups(store, **wanted)).groups] == counts
    jobs = (await reads.list_jobs(store, JobFilter(error_group=first.group))).jobs
    assert (len(jobs), {job.task for job in jobs}) == (8, {"t"})
    assert [job.created_at for job in jobs] == sorted((job.created_at for job in jobs), reverse=True)


async def test_exact_groups_are_of_the_first_line_as_it_is(store, add_failed):
    await add_failed(2)
    await add_failed(1, "ValueError: no row 2\n\nanother traceback", status="queued")
    groups = (await failures.list_error_groups(store, exact=True)).groups
    assert [(one.error, one.jobs) for one in groups] == [("ValueError: no row 2", 2), ("ValueError: no row 1", 1)]
    assert len((await reads.list_jobs(store, JobFilter(error_group=groups[0].group))).jobs) == 2
    assert await retried(store, groups[0].group) == 2
    groups = (await failures.list_error_groups(store, exact=True, state="failed")).groups
    assert [(one.error, one.jobs) for one in groups] == [("ValueError: no row 1", 1)]


async def test_exact_groups_read_a_bounded_number_of_jobs(store, add_failed, monkeypatch):
    for number, word in [(9, "a"), (5, "b"), (2, "c"), (1, "d")]:
        await add_failed(number, f"ValueError: {word} {{i}}")
    sql = failures._EXACT_GROUPS
    for bound, fewer in ((failures.MOST_OF_KIND, 4), (failures.MOST_WALKED, 9)):
        assert f"LIMIT {bound}\n" in sql
        sql = sql.replace(f"LIMIT {bound}\n", f"LIMIT {fewer}\n")
    monkeypatch.setattr(failures, "_EXACT_GROUPS", sql)
    groups = (await failures.list_error_groups(store, exact=True)).groups
    # Four jobs of `a` and `b`, the newest, and one of `c`, the next largest.
    assert sorted(one.error for one in groups) == sorted(
        [f"ValueError: {word} {i}" for word in "ab" for i in range(1, 5)] + ["ValueError: c 1"]
    )


@pytest.mark.slow
async def test_exact_groups_read_a_thousand_jobs_of_a_kind_and_none_of_other_tasks(store, raw):
    await raw.execute(f"SET session_replication_role = replica; {PLAN}")
    await raw.execute("SET session_replication_role = origin")
    await raw.execute("VACUUM ANALYZE dl_jobs")
    for task, jobs, most in ((None, 12_000, 1_000), ("none", 0, 1)):
        rows, plan = await store.run(groups_and_plan, failures._EXACT_GROUPS, 51, task)
        assert sum(row["jobs"] for row in rows) == jobs
        read = [node for node in nodes(plan) if node["Node Type"] == "Index Scan"]
        assert max(node["Actual Rows"] for node in read) <= most
        assert max(node["Actual Loops"] for node in read) <= 12


async def test_groups_of_a_task_are_found_by_their_newest_jobs(store, add_failed):
    for number, task, word in [(3, "t", "a"), (2, "u", "a"), (1, "u", "b"), (4, "v", "c")]:
        await add_failed(number, f"{word} {{i}}", task=task)
    for exact, counts in ((False, [2, 1]), (True, [1, 1, 1])):
        groups = (await failures.list_error_groups(store, task="u", exact=exact)).groups
        assert [(one.task, one.jobs) for one in groups] == [("u", jobs) for jobs in counts]
    first = await failures.list_error_groups(store, task="u", limit=1)
    rest = await failures.list_error_groups(store, task="u", limit=1, after=first.next)
    assert [one.jobs for one in first.groups + rest.groups] == [2, 1]
    assert rest.next is None


async def test_groups_are_read_in_pages_those_with_the_most_jobs_first(store, add_failed):
    for number, word in [(1, "a"), (3, "b"), (2, "c"), (1, "d")]:
        await add_failed(number, word)
    seen, after = [], None
    while not seen or after is not None:
        page = await failures.list_error_groups(store, limit=1, after=after)
        seen += [(one.jobs, one.error) for one in page.groups]
        after = page.next
    assert seen[:2] == [(3, "b"), (2, "c")]
    assert sorted(seen[2:]) == [(1, "a"), (1, "d")]


async def test_the_error_group_of_a_job_follows_writes_of_any_service(store, raw, add_job, start_worker, row_of):
    job_id = await add_job()
    worker = start_worker()
    [job] = await worker.claim()
    await worker.end(job, Step.RETRY, error="ValueError: 1")
    group = (await row_of(job_id))["error_group"]
    assert group is not None
    # Other services do not know our columns; their corrections by hand count, too.
    await raw.execute("UPDATE dl_jobs SET error = 'ValueError: 2'")
    assert (await row_of(job_id))["error_group"] == group
    await raw.execute("UPDATE dl_jobs SET error = 'OSError'")
    assert (await row_of(job_id))["error_group"] not in {group, None}
    await raw.execute("UPDATE dl_jobs SET status = 'canceled'")
    await control.retry(store, job_id, ALICE)
    assert (await row_of(job_id))["error_group"] is None
    await raw.execute("UPDATE dl_jobs SET status = 'failed'")
    [silent] = (await failures.list_error_groups(store)).groups
    assert (silent.error, silent.jobs) == ("", 1)
    await raw.execute("UPDATE dl_jobs SET error = 'by hand'")
    assert [one.error for one in (await failures.list_error_groups(store)).groups] == ["by hand"]


async def test_a_group_is_retried_at_once_those_that_failed_as_new_ones(store, raw, add_failed):
    failed, waiting = await add_failed(3), await add_failed(2, status="queued")
    [other] = await add_failed(1, "OSError")
    group = (await failures.list_error_groups(store)).groups[0].group
    assert await retried(store, group) == 5
    jobs = [await reads.get_job(store, job_id) for job_id in (*failed, *waiting)]
    assert [(job.status, job.waits_for, job.attempt) for job in jobs] == [
        *[(Status.QUEUED, None, 0)] * 3, *[(Status.QUEUED, None, 3)] * 2,
    ]  # fmt: skip
    assert (await reads.get_job(store, other)).status is Status.FAILED
    [entry] = (await reads.list_audit(store)).audit
    assert (entry.action, entry.detail) == ("retry_group", {"group": group, "limit": 1000, "retried": 5})
    # Waiting jobs keep their error until they run.
    assert await retried(store, group, state="failed") == 0


async def test_a_group_is_retried_at_an_instant_or_spread_from_then_on(store, raw, add_failed):
    await add_failed(40)
    waiting = await add_failed(20, status="queued")
    group = (await failures.list_error_groups(store)).groups[0].group
    at = NOW + timedelta(hours=3)
    assert await retried(store, group, at=at, state="waiting") == 20
    times = [(await reads.get_job(store, job_id)).available_at for job_id in waiting]
    assert set(times) == {at}
    assert await retried(store, group, at=at, spread_s=3599.5) == 60
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'queued' AND waits_for = 'time'") == 60
    offsets = sorted((row["available_at"] - at).total_seconds() for row in await raw.fetch("SELECT * FROM dl_jobs"))
    assert 0 <= offsets[0] < offsets[-1] < 3_600
    # By chance: fewer than five of sixty in a third of the time happen once in a million cases.
    assert all(sum(third <= offset < third + 1_200 for offset in offsets) >= 5 for third in (0, 1_200, 2_400))
    # Repeating the request has the same result; a job that is due again does not become younger.
    assert await retried(store, group, at=at, spread_s=3599.5) == 20
    assert offsets == sorted(
        (row["available_at"] - at).total_seconds() for row in await raw.fetch("SELECT * FROM dl_jobs")
    )
    await retried(store, group)
    before = await raw.fetch("SELECT job_id, available_at FROM dl_jobs WHERE waits_for IS NULL ORDER BY job_id")
    await retried(store, group, at=NOW - timedelta(days=1))
    assert len(before) == 20
    assert before == await raw.fetch("SELECT job_id, available_at FROM dl_jobs WHERE waits_for IS NULL ORDER BY job_id")


async def test_a_large_group_is_retried_in_batches_and_no_job_twice(store, raw, add_failed):
    await add_failed(4, status="queued")
    await add_failed(3)
    group = (await failures.list_error_groups(store)).groups[0].group
    wanted, after, counts = GroupRetry(group=group, at=NOW + timedelta(hours=2)), None, []
    while len(counts) < 9 and (not counts or after is not None):
        batch = await failures.retry_group(store, wanted, ALICE, limit=2, after=after)
        counts.append(batch.changed)
        after = batch.next
        # A retried job runs, and fails again in the same way.
        await raw.execute("UPDATE dl_jobs SET error = 'ValueError: no row 0' WHERE attempt = 0")
    assert sum(counts) == 7
    assert len(counts) == 4
    assert await raw.fetchval("SELECT sum((detail->>'retried')::int) FROM dl_audit") == 7


async def test_a_job_of_the_group_that_has_begun_meanwhile_is_left(store, raw, add_failed, until_blocked):
    begun, waiting = await add_failed(2, status="queued")
    group = (await failures.list_error_groups(store)).groups[0].group
    await raw.execute("BEGIN")
    await raw.execute("UPDATE dl_jobs SET status = 'running' WHERE job_id = $1", begun)
    async with trio.open_nursery() as nursery:

        async def retry():
            assert await retried(store, group) == 1

        nursery.start_soon(retry)
        await until_blocked()
        await raw.execute("COMMIT")
    assert (await reads.get_job(store, begun)).status is Status.RUNNING
    assert (await reads.get_job(store, waiting)).waits_for is None


async def test_a_group_retry_leaves_blocked_jobs_waiting_and_a_postponed_one_frees_its_key(store, raw, add_job, row_of):
    before = await add_job()
    parked = await add_job(lock_key="'a'", error="'e'", waits_for="'lock'")
    dependent = await add_job(error="'e'", waits_on=f"'{before}'", when_failed="'run'")
    ready = await add_job(lock_key="'b'", error="'e'")
    next_of_key = await add_job(lock_key="'b'", waits_for="'lock'")
    [group] = (await failures.list_error_groups(store)).groups
    assert group.jobs == 3
    await retried(store, group.group)
    assert [(await row_of(job_id))["waits_for"] for job_id in (parked, dependent, ready)] == ["lock", "after", None]
    at = NOW + timedelta(hours=1)
    await retried(store, group.group, at=at)
    assert [(await row_of(job_id))["waits_for"] for job_id in (parked, dependent, ready)] == ["time", "after", "time"]
    assert (await row_of(dependent))["wanted_at"] == at
    assert (await row_of(next_of_key))["waits_for"] is None


async def test_an_invalid_value_is_refused_by_its_name(store):
    for field, wanted in {
        "group": {"group": "x"},
        "spread_s": {"group": "0" * 16, "spread_s": float("nan")},
        "spread_s ": {"group": "0" * 16, "spread_s": 2_592_001},
        "state": {"group": "0" * 16, "state": "lost"},
        "at": {"group": "0" * 16, "at": NOW.replace(tzinfo=None)},
    }.items():
        with pytest.raises(BadRequest) as refused:
            GroupRetry(**wanted)
        assert refused.value.field == field.strip()
    for field, ask in {
        "limit": failures.list_error_groups(store, limit=0),
        "state": failures.list_error_groups(store, state="x"),
        "limit ": failures.retry_group(store, GroupRetry(group="0" * 16), ALICE, limit=10_001),
        "group": failures.list_errors(store, group="0"),
        "task": failures.list_errors(store, task="\0"),
    }.items():
        with pytest.raises(BadRequest) as refused:
            await ask
        assert refused.value.field == field.strip()


PLAN = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, error, created_at, error_group)
SELECT gen_random_uuid(), 'q', 't', 'k', (CASE i % 3 WHEN 0 THEN 'queued' ELSE 'failed' END)::dl_status, 'e' || i % 12,
       now() - make_interval(secs => i), i % 12 FROM generate_series(1, 30000) AS i
"""


class Explaining:
    """Connection that also keeps the plan of each statement."""

    def __init__(self, connection):
        self.connection = connection
        self.plans = []

    def __getattr__(self, name):
        return getattr(self.connection, name)

    async def fetch(self, sql, *values):
        text = await self.connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", *values)
        self.plans.append(json.loads(text)[0]["Plan"])
        return await self.connection.fetch(sql, *values)


def nodes(plan):
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes(part)


async def groups_and_plan(connection, sql, limit, *more):
    explaining = Explaining(connection)
    values = [["failed", "lost", "queued"], *failures._FIRST, limit, *more]
    return await failures._aio_error_groups(explaining, sql, values), explaining.plans[0]


@pytest.mark.slow
async def test_to_count_all_groups_is_one_look_at_their_index(store, raw):
    # Without our triggers: 30,000 jobs in 12 groups, as in a bulk load, and the same number of succeeded jobs.
    await raw.execute(f"SET session_replication_role = replica; {PLAN}; {PLAN.replace('failed', 'succeeded')}")
    await raw.execute("SET session_replication_role = origin")

    async def explained(connection, limit):
        sql = failures._GROUPS.format(of_state="", most="$5", of_task="")
        return await groups_and_plan(connection, sql, limit)

    async def next_of_group(connection):
        await connection.execute(f"PREPARE batch (bigint, timestamptz, uuid, int) AS {failures._NEXT_OF_GROUP}")
        execute = f"EXECUTE batch (1, '-infinity', '{UUID(int=0)}', 100)"
        return json.loads(await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {execute}"))[0]["Plan"]

    # A batch of a retry reads only its own jobs, by a plan for any group and any table.
    batch = await store.run(next_of_group)
    assert {node.get("Index Name") for node in nodes(batch)} == {None, "ix_dl_jobs_failing"}
    assert max(node["Actual Rows"] for node in nodes(batch)) == 100
    assert batch["Shared Hit Blocks"] + batch["Shared Read Blocks"] < 200
    # Old statistics of tables that have grown, or rows since the last vacuum, do not matter.
    indexes = {None, "ix_dl_jobs_failing", "dl_jobs_pkey"}
    rows, plan = await store.run(explained, 51)
    assert {node.get("Index Name") for node in nodes(plan)} == indexes
    await raw.execute("VACUUM ANALYZE dl_jobs")
    rows, plan = await store.run(explained, 51)
    assert len(rows) == 12
    assert sum(row["jobs"] for row in rows) == 40_000
    scans = [node for node in nodes(plan) if "Index Name" in node]
    assert scans[0]["Node Type"] == "Index Only Scan"
    assert scans[0]["Heap Fetches"] == 0
    # For each shown group, the first and the last job are found there, and only the last one is read.
    assert {node["Index Name"] for node in scans} == indexes - {None}
    assert all(node["Actual Rows"] <= 1 for node in scans[1:])

    # The reads of a group's page and of the bars of several groups.
    async def pages(connection):
        explaining = Explaining(connection)
        await explaining.fetch(failing_jobs.HEAD, 1)
        await explaining.fetch(failing_jobs.JOBS, 1, *failing_jobs._NEWEST, 26)
        await explaining.fetch(failing_jobs._BARS, list(range(12)))
        return explaining.plans

    for plan, bound in zip(await store.run(pages), (10_000, 26, 12 * failing_jobs.DATED), strict=True):
        indexes = {node["Index Name"] for node in nodes(plan) if "Index Name" in node}
        assert indexes <= {"ix_dl_jobs_failing", "dl_jobs_pkey"}
        assert not {node["Node Type"] for node in nodes(plan)} & {"Seq Scan", "Bitmap Heap Scan"}
        assert max(node["Actual Rows"] * node["Actual Loops"] for node in nodes(plan)) <= bound


@pytest.mark.requirement("S6")
async def test_each_run_that_failed_is_in_the_log_of_errors_whoever_ran_it_and_no_other(
    store, raw, add_job, start_worker
):
    worker = start_worker()
    job_id = await add_job(max_attempts="3", keyed="false")

    async def run(step, error=None):
        [job] = await worker.claim()
        await worker.end(job, step, error=error)

    await run(Step.RETRY, "ValueError: 1")
    await run(Step.RETRY, "ValueError: 1")
    await run(Step.SNOOZE)
    await run(Step.RETURN)
    assert [one.attempt for one in (await failures.list_errors(store)).errors] == [2, 1]
    # Another service takes it, and gives it back because its key is held: the former error stays.
    await raw.execute("DELETE FROM dl_errors WHERE error_id < (SELECT max(error_id) FROM dl_errors)")
    await raw.execute("UPDATE dl_jobs SET max_attempts = 5")
    [claimed] = await raw.fetch(FOREIGN_CLAIM)
    await raw.execute(BACK_OFF, claimed["job_id"], 0.0)
    await raw.fetch(FOREIGN_CLAIM)
    await raw.execute("UPDATE dl_jobs SET status = 'queued', error = 'foreign' WHERE status = 'running'")
    await worker.claim()
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s'")
    assert (await reap(store, 10)).became == [("q", "lost")]
    found = (await failures.list_errors(store)).errors
    assert [(one.status, one.worker, one.error.partition(" of ")[0]) for one in found] == [
        (Status.LOST, worker.name, "worker lost: the lease"),
        (Status.QUEUED, None, "foreign"),
        (Status.QUEUED, worker.name, "ValueError: 1"),
    ]
    assert {(one.job_id, one.task, one.queue) for one in found} == {(job_id, "t", "q")}
    assert [one.attempt for one in found] == [5, 4, 2]
    [group] = (await failures.list_error_groups(store)).groups
    assert found[0].group == group.group
    # Jobs that succeed, are canceled or are retried by an operator have no row, nor does deletion add one.
    await control.retry(store, job_id, ALICE)
    await run(Step.SUCCEED)
    await add_job()
    await run(Step.CANCEL, "canceled while it ran")
    await raw.execute("DELETE FROM dl_jobs")
    assert (await failures.list_errors(store)).errors == found


@pytest.mark.requirement("S6")
async def test_the_log_of_errors_is_read_in_pages_by_task_queue_group_and_job(store, raw, add_job, start_worker):
    ids = [await add_job(task=task, queue=queue) for task, queue in [("'t'", "'q'"), ("'u'", "'q'"), ("'t'", "'r'")]]
    worker = start_worker()
    for queue in ("q", "r"):
        for job in await worker.claim(queue, tasks=("t", "u")):
            await worker.end(job, Step.FAIL, error=f"OSError: {job.job_id}")
    first, second = (await failures.list_errors(store, limit=2)).errors
    page = await failures.list_errors(store, limit=2, after=second.error_id)
    assert [one.error_id for one in page.errors] == [second.error_id - 1]
    assert page.next is None
    for wanted, number in [
        ({"task": "t"}, 2), ({"queue": "q"}, 2), ({"group": first.group}, 2), ({"job_id": ids[1]}, 1),
        ({"task": "u", "queue": "r"}, 0), ({"job_id": UUID(int=0)}, 0),
    ]:  # fmt: skip
        assert len((await failures.list_errors(store, **wanted)).errors) == number
