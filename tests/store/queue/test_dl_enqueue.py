"""`dl_enqueue`: a job from any transaction, in any language, equal to one added by our programs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from uuid import UUID

import pytest
import trio
from conditions import patience_s
from databases import raw_connection
from roles import a_role

from dataloader import Tasks
from dataloader.jobs.errors import BadRequest, IdempotencyConflict
from dataloader.jobs.model import NewJob
from dataloader.jobs.task import BUILT_IN
from dataloader.store.queue.enqueue import enqueue, row_of
from dataloader.store.queue.make_ready import ready_after
from dataloader.store.queue.reads import get_job

pytestmark = pytest.mark.requirement("Q2")

GRANTS = """
GRANT EXECUTE ON FUNCTION dl_enqueue, dl_enqueue_job TO jobs_service;
"""
SETTINGS = "SELECT name, setting FROM pg_settings ORDER BY name"


async def test_a_job_has_all_that_its_call_says(raw, row_of, journal_of):
    at = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    job_id = await raw.fetchval(
        """SELECT dl_enqueue('t', '{"a": 1}', queue => 'q', lock_key => 'k', priority => 7, available_at => $1,
             idempotency_key => 'i', partition_key => 'p', max_attempts => 2, lease_ttl_sec => 9, producer => 'me',
             consumer_group => 'g')""",
        at,
    )
    row = await row_of(job_id)
    expected = {
        "task": "t", "args": '{"a": 1}', "queue": "q", "lock_key": "k", "priority": 7, "available_at": at,
        "keyed": True, "idempotency_key": "i", "partition_key": "p", "max_attempts": 2, "lease_ttl_sec": 9,
        "producer": "me",
        "consumer_group": "g", "status": "queued", "waits_for": "time", "attempt": 0, "token": 0,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert await journal_of(job_id) == ["queued"]


async def test_a_rollback_leaves_nothing_and_a_commit_notifies_the_queue(database, raw):
    heard = []
    async with raw_connection(database.dsn) as listener:
        await listener._cross(listener.asyncpg.add_listener, "dl_jobs", lambda *event: heard.append(event[3]))
        await raw.execute("BEGIN")
        await raw.execute("SELECT dl_enqueue('t', queue => 'rolled back')")
        await raw.execute("ROLLBACK")
        assert await raw.fetchval("SELECT count(*) FROM dl_jobs") == 0
        await raw.execute("BEGIN")
        await raw.execute("SELECT dl_enqueue('t', queue => 'q'), dl_enqueue('t', queue => 'q')")
        assert await listener.fetchval("SELECT count(*) FROM dl_jobs") == 0
        await raw.execute("COMMIT")
        with trio.fail_after(patience_s()):
            while not heard:
                await listener.execute("SELECT 1")
    assert heard == ["q"]


async def test_ids_are_of_version_7_tell_their_time_and_come_in_the_order_of_the_calls(raw):
    before = datetime.now(UTC)
    ids = [
        row["id"] for row in await raw.fetch("SELECT dl_enqueue('t', queue => 'q') AS id FROM generate_series(1, 200)")
    ]
    assert all((UUID(str(one)).version, UUID(str(one)).variant) == (7, "specified in RFC 4122") for one in ids)
    assert ids == sorted(ids)
    at = datetime.fromtimestamp((UUID(str(ids[0])).int >> 80) / 1000, UTC)
    assert before - timedelta(seconds=1) <= at <= datetime.now(UTC)
    assert len({UUID(str(one)).int & (1 << 62) - 1 for one in ids}) == 200


async def test_nothing_is_left_behind_in_the_caller_s_transaction(raw):
    await raw.execute("DO 'BEGIN END'")  # the language changes some settings
    await raw.execute("BEGIN; SET LOCAL search_path = public; SET LOCAL lock_timeout = '3s'")
    before = await raw.fetch(SETTINGS)
    await raw.execute("SELECT dl_enqueue('t', queue => 'q', idempotency_key => 'i')")
    assert await raw.fetch(SETTINGS) == before
    await raw.execute("ROLLBACK")


REFUSALS = [
    ("NULL, queue => 'q'", "task: is required"),
    ("'', queue => 'q'", 'task: must have 1 to 200 characters on one line, .*, not ""'),
    ("'t'", 'queue: is required, because the task "t" has no queue'),
    ("'t', queue => E'a\\nb'", r'queue: must have 1 to 200 characters on one line.*, not "a\\nb"'),
    ("'t', queue => repeat('x', 201)", 'queue: must have 1 to 200 characters .*, not "x{60}"'),
    ("'t', queue => ' '", "queue: must have 1 to 200 characters .* only spaces"),
    ("'t', queue => 'q', lock_key => ''", "lock_key: must have 1 to 512 characters"),
    ("'t', queue => 'q', idempotency_key => ''", "idempotency_key: must have 1 to 512 characters"),
    ("'t', queue => 'q', producer => ''", "producer: must have 1 to 512 characters"),
    ("'t', queue => 'q', partition_key => E'\\x01'", "partition_key: must have 1 to 512 characters"),
    ("'t', queue => 'q', lock_key => 'a//b', consumer_group => '  '", "consumer_group: must have 1 to .* only spaces"),
    ("'t', queue => 'q', lock_key => E'a\u2028b'", "lock_key: must have 1 to 512 characters on one line"),
    ("'t', queue => 'q', lock_key => repeat('x', 513)", "lock_key: must have 1 to 512 characters .*, not"),
    ("'t', queue => '', lock_key => ''", "queue: must have 1 to 200 characters"),
    ("'t', queue => 'q', priority => -1", "priority: must be an integer from 0 to 2147483647, not -1"),
    ("'t', queue => 'q', max_attempts => 0", "max_attempts: must be an integer from 1 to 1000000, not 0"),
    ("'t', queue => 'q', lease_ttl_sec => 2", "lease_ttl_sec: must be an integer from 3 to 86400, not 2"),
    ("'t', queue => 'q', available_at => 'infinity'", "available_at: must be between the years 1900 and 9000"),
    (
        "'t', queue => 'q', after => ARRAY[gen_random_uuid()]",
        "after: must have IDs of existing jobs; no job has",
    ),
    ("'t', queue => 'q', after => ARRAY[NULL]::uuid[]", "after: must have IDs .*; no job has the ID null"),
    ("'t', queue => 'q', when_failed => 'stop'", 'when_failed: must be cancel or run, not "stop"'),
    ("'t', '[1]', queue => 'q'", "args: must be a JSON object, not array"),
    ("'t', NULL, queue => 'q'", "args: must be a JSON object, not null"),
]


async def test_an_invalid_argument_is_refused_by_its_name(raw):
    for call, refusal in REFUSALS:
        with pytest.raises(Exception, match=f"^{refusal}") as raised:
            await raw.execute(f"SELECT dl_enqueue({call})")
        assert raised.value.sqlstate == "22023", call
        assert await raw.fetchval("SELECT count(*) FROM dl_jobs") == 0, call


async def test_long_names_with_slashes_and_spaces_are_taken(raw, row_of):
    for key in ("x" * 512, "a//b", "a/ /b", "/", " a ", "ключ"):
        job_id = await raw.fetchval(
            "SELECT dl_enqueue($1, queue => $1, lock_key => $2, partition_key => $2, producer => $2)", "n/ " * 60, key
        )
        row = await row_of(job_id)
        assert (row["queue"], row["lock_key"], row["partition_key"], row["producer"]) == ("n/ " * 60, key, key, key)


async def test_a_job_runs_after_others_that_the_same_transaction_has_added(store, raw, row_of):
    at = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    await raw.execute("BEGIN")
    first = await raw.fetchval("SELECT dl_enqueue('t', queue => 'q')")
    last = await raw.fetchval(
        "SELECT dl_enqueue('t', queue => 'q', after => ARRAY[$1, $1]::uuid[], when_failed => 'run', available_at => $2,"
        " root => $1, idempotency_key => 'i')",
        first, at,
    )  # fmt: skip
    await raw.execute("COMMIT")
    while (await ready_after(store)).jobs:
        pass
    job = await get_job(store, last)
    assert (job.after, job.when_failed, job.waits_for, job.available_at) == ([first], "run", "after", at)
    assert job.root == first
    again = (
        "SELECT dl_enqueue('t', queue => 'q', after => ARRAY[$1]::uuid[], {}available_at => $2, idempotency_key => 'i')"
    )
    assert await raw.fetchval(again.format("when_failed => 'run', "), first, at) == last
    with pytest.raises(Exception, match="whose request was different"):
        await raw.fetchval(again.format(""), first, at)
    await raw.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now() WHERE job_id = $1", first)
    while (await ready_after(store)).jobs:
        pass
    assert (await row_of(last, "waits_for"), await row_of(last, "available_at")) == ("time", at)
    assert await raw.fetchval("SELECT dl_enqueue('t', queue => 'q', after => '{}') IS NOT NULL")


async def test_names_of_built_in_tasks_are_the_same_here_and_in_the_registry(raw):
    refusal = f"{', '.join(BUILT_IN)} are names of built-in"
    for name in ("process.start", "process.", "notify.x", "migrate", "migrate.x", "processes", "NOTIFY.x", "t"):
        if any(fnmatchcase(name, own) for own in BUILT_IN):
            with pytest.raises(Exception, match=f"^task: must not be .*: {refusal}"):
                await raw.execute("SELECT dl_enqueue($1, queue => 'q')", name)
            with pytest.raises(ValueError, match=refusal):
                Tasks().task(name)
            with pytest.raises(BadRequest, match=f"^task: must not be .*: {refusal}"):
                row_of(NewJob(task=name, queue="q"), 60)
        else:
            row_of(NewJob(task=name, queue="q"), 60)
            assert await raw.fetchval("SELECT dl_enqueue($1, queue => 'q') IS NOT NULL", name)
            Tasks().task(name)


async def test_an_idempotency_key_returns_its_first_job_and_refuses_another_request(raw):
    call = "SELECT dl_enqueue('t', '{{\"a\": 1, \"b\": 2}}', queue => 'q', idempotency_key => 'i'{})"
    first = await raw.fetchval(call.format(""))
    # Later changes of the job do not matter.
    await raw.execute("UPDATE dl_jobs SET status = 'succeeded', priority = 3, args = '{}'")
    assert await raw.fetchval(call.format("")) == first
    for other in (", priority => 100", ", lock_key => 'k'", ", producer => 'me'", ", available_at => now()"):
        with pytest.raises(
            Exception, match=r'idempotency_key: "i" belongs to job .*, whose request was different'
        ) as raised:
            await raw.fetchval(call.format(other))
        assert raised.value.sqlstate == "23505"
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs") == 1


async def test_a_request_of_ours_and_one_by_sql_know_each_other_by_their_columns(store, raw):
    ours = NewJob(task="t", queue="q", args={"a": 1}, idempotency_key="ours")
    await enqueue(store, [ours])
    call = "SELECT dl_enqueue('t', '{{\"a\": {}}}', queue => 'q', idempotency_key => '{}')"
    assert await raw.fetchval(call.format(1, "ours")) == ours.job_id
    with pytest.raises(Exception, match="whose request was different"):
        await raw.fetchval(call.format(2, "ours"))
    theirs = await raw.fetchval(call.format(1, "theirs"))
    [again] = await enqueue(store, [NewJob(task="t", queue="q", args={"a": 1}, idempotency_key="theirs")])
    assert (again.job_id, again.created) == (theirs, False)
    with pytest.raises(IdempotencyConflict):
        await enqueue(store, [NewJob(task="t", queue="q", args={"a": 1}, lock_key="k", idempotency_key="theirs")])


async def test_concurrent_transactions_with_one_key_get_the_same_job(database, raw, until_blocked):
    call = "SELECT dl_enqueue('t', queue => 'q', idempotency_key => 'i')"
    await raw.execute("BEGIN")
    first, answers = await raw.fetchval(call), []
    async with raw_connection(database.dsn) as other:

        async def second():
            answers.append(await other.fetchval(call))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(second)
            await until_blocked()
            await raw.execute("COMMIT")
    assert answers == [first]


async def test_a_role_with_the_rights_of_the_page_enqueues_and_sees_to_keys(database, raw):
    await raw.execute(
        "INSERT INTO dl_tasks (task, queue, priority, lock_key, max_attempts, lease_ttl_sec, layout, declared_by)"
        " VALUES ('t', 'own', 1, '\"k:{a}\"', 2, 9, 1, 'w')"
    )
    with a_role(database, GRANTS) as role:
        async with raw_connection(role.dsn) as foreign:
            call = "SELECT dl_enqueue('t', '{\"a\": 1}', idempotency_key => 'i')"
            assert await foreign.fetchval(call) == await foreign.fetchval(call)
            await foreign.execute("SELECT dl_enqueue('t', '{\"a\": 1}', available_at => now() + interval '1 h')")
    assert await raw.fetch("SELECT queue, lock_key FROM dl_jobs") == [("own", "k:1")] * 2


@pytest.mark.requirement("S3")
async def test_a_role_with_the_rights_of_the_page_adds_jobs_of_unique_tasks(database, raw):
    await raw.execute(
        "INSERT INTO dl_tasks (task, queue, uniqueness, layout, declared_by)"
        """ VALUES ('t', 'q', '{"key": true, "duplicates": "update"}', 2, 'w')"""
    )
    with a_role(database, GRANTS) as role:
        async with raw_connection(role.dsn) as foreign:
            did = [await foreign.fetchval("SELECT did FROM dl_enqueue_job('t', version => 1)") for _ in "ab"]
            did.append(await foreign.fetchval("SELECT did FROM dl_enqueue_job('t')"))
            await raw.execute("UPDATE dl_jobs SET status = 'running'")
            did.append(await foreign.fetchval("SELECT did FROM dl_enqueue_job('t')"))
    assert did == ["added", "older", "updated", "added"]
