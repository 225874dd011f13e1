"""Jobs with stages (R6): one row, a run for each stage; the transaction that ends a run begins the next stage."""

from __future__ import annotations

import pytest
import trio
from conditions import when_ended

from dataloader import Finish, Next, Retry, Tasks, ThreadJob
from dataloader.jobs.text import MAX_JSON

pytestmark = [pytest.mark.slow, pytest.mark.requirement("R6")]

MOVES = "SELECT payload ->> 'from', payload ->> 'to' FROM dl_job_events WHERE kind = 'moved' ORDER BY event_id"


@pytest.fixture
def document():
    """Return three stages, one of each kind, each in a separate queue, and the values that their runs have seen."""
    tasks, runs = Tasks(), []

    def seen(job):
        runs.append((job.task, job.queue, job.attempt, job.max_attempts, job.args, job.previous))

    @tasks.task("document.fetch", queue="net", max_attempts=3)
    async def fetch(job):
        seen(job)
        return Retry(0) if job.attempt == 1 else {"page": job.args["page"]}

    @tasks.task("document.ocr", queue="cpu", max_attempts=7, lease_ttl_sec=30)
    def ocr(job: ThreadJob):
        seen(job)
        return ["text", job.previous]

    @tasks.task("document.index", queue="net", asyncio=True)
    async def index(job):
        seen(job)
        return {"indexed": job.previous}

    tasks.stages("document", fetch, ocr, index)
    return tasks, runs


@pytest.mark.parametrize("enqueue", ["by the worker", "by SQL", "by a foreign service"])
async def test_a_job_moves_from_stage_to_stage_with_the_result_of_each(open_worker, raw, document, enqueue):
    tasks, runs = document
    async with open_worker(tasks, {"net": 2, "cpu": 1}) as supervisor:
        if enqueue == "by the worker":
            job_id = (await supervisor.jobs.enqueue("document", {"page": 1}, priority=7)).job_id
        elif enqueue == "by SQL":
            job_id = await raw.fetchval("""SELECT dl_enqueue('document', '{"page": 1}', priority => 7)""")
        else:
            job_id = await raw.fetchval(
                "INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, priority) VALUES"
                """ (gen_random_uuid(), 'net', 'document', '{"page": 1}', 'k', 7) RETURNING job_id"""
            )
        job = await when_ended(supervisor, job_id)
    first = "document" if enqueue == "by a foreign service" else "document.fetch"
    most = 5 if enqueue == "by a foreign service" else 3
    assert runs == [
        (first, "net", 1, most, {"page": 1}, None),
        (first, "net", 2, most, {"page": 1}, None),
        ("document.ocr", "cpu", 1, 7, {"page": 1}, {"page": 1}),
        ("document.index", "net", 1, 5, {"page": 1}, ["text", {"page": 1}]),
    ]
    assert (job.status, job.result) == ("succeeded", {"indexed": ["text", {"page": 1}]})
    assert (job.task, job.moves, job.previous, job.priority) == (
        "document.index", 2, ["text", {"page": 1}], 7,
    )  # fmt: skip
    assert [tuple(row) for row in await raw.fetch(MOVES)] == [
        (first, "document.ocr"),
        ("document.ocr", "document.index"),
    ]


@pytest.fixture
def run_stages(open_worker):
    """Return a function that runs a job with stages of a, b and c; it returns the ended job and the stages that ran."""

    async def run_stages(a, b=None, c=None):
        tasks, ran = Tasks(), []

        def stage(name, answer):
            async def handler(job):
                ran.append((name, job.previous))
                return await answer(job) if callable(answer) else answer

            handler.__name__ = name
            return handler

        tasks.stages("s", stage("a", a), stage("b", b), stage("c", c), queue="q")
        async with open_worker(tasks) as supervisor:
            enqueued = await tasks["s"].enqueue(supervisor.jobs)
            return await when_ended(supervisor, enqueued.job_id), ran

    return run_stages


async def test_a_stage_chooses_the_next_one_or_finishes(run_stages):
    job, ran = await run_stages(Next("c", 1), c=Finish({"n": 2}))
    assert (job.status, job.result, job.moves) == ("succeeded", {"n": 2}, 1)
    assert ran == [("a", None), ("c", 1)]
    job, ran = await run_stages(Next(to="b"), b=Finish())
    assert (job.status, job.result, ran) == ("succeeded", None, [("a", None), ("b", None)])


async def _moves_in_a_transaction(value, job):
    async with job.transaction() as transaction:
        await transaction.execute("CREATE TABLE made (n int)")
        transaction.result = value
    return "what is returned after the commit changes nothing"


async def test_a_transaction_of_a_stage_moves_the_job_with_its_rows(run_stages, raw):
    def moves(value):
        return lambda job: _moves_in_a_transaction(value, job)

    job, ran = await run_stages(moves([1]), c="end")
    assert (job.status, job.result, job.moves, ran) == ("succeeded", "end", 2, [("a", None), ("b", [1]), ("c", None)])
    assert await raw.fetchval("SELECT count(*) FROM made") == 0
    await raw.execute("DROP TABLE made")
    job, ran = await run_stages(moves(Finish(3)))
    assert (job.status, job.result, job.moves) == ("succeeded", 3, None)
    await raw.execute("DROP TABLE made")
    job, _ = await run_stages(moves(Next("d")))
    assert (job.status, job.attempt) == ("failed", 1)
    assert "Next.to: must be a stage of s (a, b, c), not 'd'" in job.error
    assert await raw.fetchval("SELECT to_regclass('made')") is None


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (Next("d"), "Next.to: must be a stage of s (a, b, c), not 'd'"),
        (Next(None), "Next.to: must be a stage of s (a, b, c), not None"),
        (Next("s.b"), "Next.to: must be a stage of s (a, b, c), not 's.b'"),
        ({1: 1j}, "the value for the next stage, s.b: is not JSON: "),
        ("x" * MAX_JSON, "the value for the next stage, s.b: must have at most 1,048,576 bytes"),
    ],
)
async def test_an_impossible_move_fails_the_job_and_names_the_possible_ones(run_stages, value, error):
    job, ran = await run_stages(value)
    assert (job.status, job.attempt, job.error[: len(error)]) == ("failed", 1, error)
    assert [name for name, _ in ran] == ["a"]


async def test_a_task_that_is_no_stage_can_not_move_its_job(open_worker):
    tasks = Tasks()

    @tasks.task("alone", queue="q")
    async def alone(_job):
        return Next("b")

    async with open_worker(tasks) as supervisor:
        job = await when_ended(supervisor, (await supervisor.jobs.enqueue("alone")).job_id)
    assert (job.status, job.attempt) == ("failed", 1)
    assert job.error == "Next: must be returned by a stage (tasks.stages); the task alone is not a stage"


async def test_stages_that_move_back_and_forth_for_ever_are_stopped(run_stages, raw, monkeypatch):
    await raw.execute(
        "CREATE FUNCTION moved_often() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.moves := 999; RETURN NEW; END';"
        " CREATE TRIGGER moved_often BEFORE INSERT ON dl_jobs FOR EACH ROW EXECUTE FUNCTION moved_often()"
    )
    job, ran = await run_stages(Next("b"), Next("a"))
    assert (job.status, job.task, job.moves) == ("failed", "s.b", 1_000)
    assert job.error == "the job has moved 1,000 times, which is the most; its next stage was s.a"
    assert [name for name, _ in ran] == ["a", "b"]


async def test_a_cancel_while_a_stage_runs_wins_over_its_move(open_worker, raw):
    tasks, started, go_on = Tasks(), trio.Event(), trio.Event()

    async def a(_job):
        started.set()
        with trio.CancelScope(shield=True):
            await go_on.wait()
        return 1

    async def b(_job):
        raise AssertionError

    tasks.stages("s", a, b, queue="q")
    async with open_worker(tasks) as supervisor:
        enqueued = await supervisor.jobs.enqueue("s")
        await started.wait()
        await supervisor.jobs.cancel(enqueued.job_id)
        go_on.set()
        job = await when_ended(supervisor, enqueued.job_id)
    assert (job.status, job.task, job.moves) == ("canceled", "s.a", None)


async def test_a_retried_stage_has_the_result_of_the_stage_before(open_worker, raw):
    tasks, ran = Tasks(), []

    async def a(_job):
        ran.append("a")
        return {"n": 1}

    async def b(job):
        ran.append(job.previous)
        if len(ran) == 2:
            raise ValueError("once")

    b_task = tasks.task("s.b", queue="q", max_attempts=1)(b)
    tasks.stages("s", a, b_task, queue="q")
    async with open_worker(tasks) as supervisor:
        job = await when_ended(supervisor, (await supervisor.jobs.enqueue("s")).job_id)
        assert (job.status, job.task) == ("failed", "s.b")
        await supervisor.jobs.retry(job.job_id)
        job = await when_ended(supervisor, job.job_id)
    assert (job.status, ran) == ("succeeded", ["a", {"n": 1}, {"n": 1}])


async def test_the_journal_keeps_the_moves_and_the_task_s_row_the_first_stage(open_worker, raw, document):
    tasks, _ = document
    async with open_worker(tasks, {"net": 1}):
        rows = await raw.fetch("SELECT task, queue, first_stage FROM dl_tasks ORDER BY task")
    assert [tuple(row) for row in rows] == [
        ("document", "net", "document.fetch"),
        ("document.fetch", "net", None),
        ("document.index", "net", None),
        ("document.ocr", "cpu", None),
    ]
