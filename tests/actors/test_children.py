"""Functions in child processes (`process=True`): their work, their end, and that nothing of them remains."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from uuid import UUID

import child_tasks
import pytest
import trio
from conditions import patience_s, until, when_ended
from logged import capture_logs
from processes_now import children_of, is_alive

from dataloader import ConfigError, Job, ProcessJob, RateLimit, Supplier, Tasks
from dataloader.actors import heartbeat
from dataloader.actors.children import child, frames, wire
from dataloader.actors.children.child import Child
from dataloader.actors.job_runs import Run
from dataloader.actors.lease import Lease
from dataloader.jobs.outcomes import StopReason
from dataloader.store.limits.take import take_units
from dataloader.store.queue import lease_clock
from dataloader.testing import run_task

IDLE, RUNNING = "dataloader_children_idle", "dataloader_children_running"


async def error_of(supervisor, job_id):
    async def error():
        return (await supervisor.jobs.get(job_id)).error

    return await until(error)


async def lines_of(supervisor, job_id):
    return [line for line in (await supervisor.jobs.logs(job_id)).lines if line.kind == "log"]


@pytest.fixture
def open_children(open_worker):
    """Return a function that opens a supervisor for the tasks in child processes."""

    @asynccontextmanager
    async def open_children(slots=4, **settings):
        async with open_worker(child_tasks.tasks, {"q": slots}, **({"child_grace_s": 0.5} | settings)) as supervisor:
            yield supervisor
        assert [argv for argv in children_of(os.getpid()) if child.GUARD in argv] == []

    return open_children


@pytest.fixture
def run_in(row_of):
    """Return a function that runs a job and returns its record."""

    async def run_in(supervisor, task, args=None, *, max_attempts=1, within_s=30):
        job = await supervisor.jobs.enqueue(task, args, queue="q", max_attempts=max_attempts)
        return await when_ended(supervisor, job.job_id, within_s=within_s)

    return run_in


@pytest.fixture
def shown(row_of):
    """Return a function that reads the progress of a running job."""

    async def shown(supervisor, job_id):
        async def progress():
            return (await supervisor.jobs.get(job_id)).progress

        return await until(progress)

    return shown


async def test_a_function_behaves_the_same_in_a_child_and_in_a_thread():
    run = await run_task(child_tasks.tasks, "all", {"width": 3})
    assert run.status == "succeeded", run.error
    assert run.result["area"] == 6
    assert run.result["left"] > 3_000
    assert run.progress == [{"n": 1}]
    assert {(line.level, line.message, *line.fields.values()) for line in run.log} == {
        ("info", "hello", "all"),
        ("info", "printed", "stdout"),
        ("info", "to stderr", "stderr"),
        ("info", "after it"),
    }


@pytest.mark.slow
async def test_a_child_that_can_not_import_the_function_fails_the_attempt(monkeypatch):
    monkeypatch.setenv("CHILD_TASKS", "broken")
    run = await run_task(child_tasks.tasks, "noop")
    assert run.status == "queued"
    assert run.error.startswith("the child process could not start: RuntimeError: no licence")
    assert "hunter2" not in run.error


@pytest.mark.slow
async def test_a_dead_child_reports_how_it_ended_and_the_next_job_gets_another(open_children, run_in, row_of):
    async with open_children(1) as supervisor:
        errors = {
            how: (await run_in(supervisor, "raises", {"how": how})).error
            for how in ("error", "exit", "_exit", "segfault", "kill", "deaf", "garbage", "give up", "retry")
        }
        assert errors["error"].startswith("ValueError: no such day\n\nTraceback")
        assert "in raises\n" in errors["error"]
        assert "body.py" not in errors["error"]
        assert errors["exit"].startswith("SystemExit: 3\n")
        assert errors["_exit"] == "the child process ended with exit code 3"
        assert errors["segfault"] == "the child process was ended by SIGSEGV"
        assert errors["kill"].startswith("the child process was ended by SIGKILL, perhaps because")
        assert errors["deaf"] == "the child process closed its connection to the service"
        assert errors["garbage"].startswith("the child process sent an invalid message")
        assert errors["give up"] == "never"
        assert errors["retry"] == "later"
        assert (await run_in(supervisor, "raises", {"how": "object"})).result["it"].startswith("<object object")
        misfit = await run_in(supervisor, "all", {"width": "wide"}, max_attempts=5)
        assert (misfit.status, misfit.attempt, misfit.error) == (
            "failed",
            1,
            'args.width: must be an integer, not "wide"',
        )
        final = await run_in(supervisor, "all", {"width": 3, "height": 13}, max_attempts=5)
        assert (final.status, final.attempt, final.result) == ("failed", 1, "kept")
        assert (await run_in(supervisor, "grows", {"mb": 1})).result == 2**20
        assert (await run_in(supervisor, "grows", {"mb": 500})).error.startswith("used more than 128 MB (memory_mb)\n")
        assert (await run_in(supervisor, "grows", {"mb": 1})).result == 2**20


@pytest.mark.slow
async def test_a_child_is_reused_until_its_job_limit_or_its_idle_timeout(open_children, run_in, metric):
    async with open_children(1, child_idle_s=0.5, with_web=True) as supervisor:
        pids = [(await run_in(supervisor, "who")).result for _ in range(4)]
        assert pids[0] == pids[1] == pids[2] != pids[3]
        assert [child.GUARD in argv for argv in children_of(os.getpid())].count(True) == 1
        assert not is_alive(pids[0])

        async def is_gone():
            return not is_alive(pids[3])

        await until(is_gone)
        assert await metric(supervisor, IDLE) == 0


@pytest.mark.slow
async def test_a_job_is_released_if_its_child_starts_after_its_reservation_expires(open_worker, run_in, journal_of):
    tasks = Tasks()
    # An interpreter takes longer to start than the share of this margin within which the handler must begin.
    supplier = Supplier("hr", rate_limits=(RateLimit(10, per_s=1),), margin_s=0.1)
    tasks.task("who", process=True, supplier=supplier)(child_tasks.who.handler)
    async with open_worker(tasks, poll_s=0.5) as supervisor:
        job = await run_in(supervisor, "who", within_s=60)
        assert (job.status, job.attempt) == ("succeeded", 1)
        assert any("return" in kind for kind in await journal_of(job.job_id))


@pytest.mark.slow
async def test_a_child_enqueues_jobs_and_gets_errors_for_wrong_ones(open_children, run_in):
    async with open_children() as supervisor:
        said, added, status = (await run_in(supervisor, "enqueues")).result
        assert said.startswith("priority: must be")
        assert status == "queued"
        job = await supervisor.jobs.get(UUID(added))
        assert (job.queue, job.args) == ("other", {"n": 1})
        refused = await run_in(supervisor, "enqueues", {"after": True})
        assert refused.error.startswith("BadRequest: after: ")
        assert (await run_in(supervisor, "aio", {"to": 3, "enqueue": True})).result == [0, 1, 2]


@pytest.fixture
def takes_now(monkeypatch):
    """Return the requests to suppliers that wait in this process now."""
    now = []

    async def counted(*given):
        now.append(given)
        try:
            return await take_units(*given)
        finally:
            now.remove(given)

    monkeypatch.setattr("dataloader.actors.trio_port.take_units", counted)
    return now


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["takes", "aio takes"])
async def test_a_wait_for_a_grant_blocks_no_other_part_of_its_handler(open_children, run_in, takes_now, flavour):
    async with open_children() as supervisor:
        job = await run_in(supervisor, flavour)
        assert (job.error, job.progress) == (None, {"waits": True})
        assert [line.fields["n"] for line in await lines_of(supervisor, job.job_id) if line.fields] == [0, 1, 2]
        assert job.result == {"takes": "[]", "aio takes": ["CancelledError"]}[flavour]
        assert not takes_now


@pytest.mark.slow
async def test_a_withdrawn_request_of_a_child_is_not_processed_further(open_children, shown, takes_now):
    async with open_children() as supervisor:
        job = await supervisor.jobs.enqueue("aio takes", {"s": 3_600}, queue="q")
        await shown(supervisor, job.job_id)

        async def waits():
            return not takes_now

        await until(waits, within_s=20)
        assert supervisor.state.queues["q"].running == 1
        await supervisor.jobs.cancel(job.job_id)


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["takes", "aio takes"])
async def test_a_stop_ends_the_wait_for_a_grant_immediately(open_children, shown, flavour):
    async with open_children(child_grace_s=30) as supervisor:
        job = await supervisor.jobs.enqueue(flavour, {"stop": True}, queue="q")
        await shown(supervisor, job.job_id)
        await supervisor.jobs.cancel(job.job_id)
        assert (await when_ended(supervisor, job.job_id)).status == "canceled"


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["naps", "aio naps"])
async def test_a_stop_before_the_child_has_read_its_job_takes_effect(open_children, run_in, metric, flavour):
    async with open_children(1, child_grace_s=60, with_web=True) as supervisor:
        pid = (await run_in(supervisor, flavour, {"s": 0})).result
        await until(partial(metric, supervisor, IDLE))
        os.kill(pid, signal.SIGSTOP)
        job = await supervisor.jobs.enqueue(flavour, {"s": 3_600}, queue="q")
        await until(partial(metric, supervisor, RUNNING))
        await supervisor.jobs.cancel(job.job_id)

        async def is_told():
            text = Path(f"/proc/{pid}/status").read_text()  # noqa: ASYNC240 - not on a disk
            [waiting] = [line.split()[1] for line in text.splitlines() if line.startswith("ShdPnd:")]
            return int(waiting, 16) & 1 << (signal.SIGTERM - 1)

        await until(is_told)
        os.kill(pid, signal.SIGCONT)
        assert (await when_ended(supervisor, job.job_id)).status == "canceled"


@pytest.mark.full
async def test_a_stop_of_a_body_that_adds_more_jobs_than_are_added_at_a_time_is_a_stop(
    open_children, shown, tmp_path, raw
):
    async with open_children(1) as supervisor:
        job = await supervisor.jobs.enqueue("adds many", {"go": str(tmp_path / "go")}, queue="q", max_attempts=1)
        await shown(supervisor, job.job_id)
        # This reads private fields: nothing else shows that the child's calls have taken all places, or stops it then.
        [run] = supervisor._parts.runs
        [mover] = run.movers
        await raw.execute("BEGIN; LOCK TABLE dl_jobs IN SHARE MODE")
        (tmp_path / "go").touch()
        await until(trio.lowlevel.checkpoint, lambda _: mover.__self__._places.value == 0)
        run.limit_to(trio.current_time())
        await until(trio.lowlevel.checkpoint, lambda _: run.body_ended)
        await raw.execute("ROLLBACK")
        assert (await error_of(supervisor, job.job_id)) == "timeout: the run took longer than 600 s"


@pytest.mark.slow
async def test_a_child_that_cannot_read_a_message_of_the_service_ends(open_children, run_in):
    async with open_children(1) as supervisor:
        job = await run_in(supervisor, "deafens", within_s=20)
        assert job.status == "failed"
        assert any("RecursionError" in line.message for line in await lines_of(supervisor, job.job_id))


@pytest.mark.slow
async def test_printed_lines_of_a_child_are_kept_up_to_a_limit(open_children, run_in):
    async with open_children(log_lines_per_job=5) as supervisor:
        job = await run_in(supervisor, "prints", {"lines": 20_000})
        lines = await lines_of(supervisor, job.job_id)
        assert [line.message[:2] for line in lines[:5]] == ["0 ", "1 ", "2 ", "3 ", "4 "]
        assert lines[5].message == "more than 5 lines; the rest is not stored"
        assert len(lines) == 6


@pytest.mark.slow
async def test_processes_left_by_a_handler_are_killed_before_its_end_is_recorded(open_children, run_in):
    async with open_children() as supervisor:
        job = await run_in(supervisor, "leaves")
        assert job.status == "succeeded"
        assert not is_alive(job.result)


@pytest.mark.slow
async def test_a_thread_that_a_function_leaves_behind_prints_nothing_to_the_next_jobs_log(open_children, run_in):
    async with open_children(1) as supervisor:
        first = await run_in(supervisor, "leaves a thread", {"leave": True})
        second = await run_in(supervisor, "leaves a thread", {"leave": False})
        third = await run_in(supervisor, "leaves a thread", {"leave": False})
        assert first.result != second.result == third.result
        said = [line.message for line in await lines_of(supervisor, first.job_id)]
        assert "threads that the function has left running; they are killed with its child process" in said
        assert await lines_of(supervisor, second.job_id) == []


@pytest.mark.full
@pytest.mark.parametrize("why", ["cancel", "drain", "timeout"])
async def test_a_body_that_ignores_everything_is_killed_with_all_that_it_has_started(open_children, shown, why):
    async with open_children() as supervisor:
        task = "ignores for five seconds" if why == "timeout" else "ignores"
        job = await supervisor.jobs.enqueue(task, queue="q", lease_ttl_sec=60)
        progress = await shown(supervisor, job.job_id)
        began = trio.current_time()
        match why:
            case "cancel":
                await supervisor.jobs.cancel(job.job_id)
                assert (await when_ended(supervisor, job.job_id)).status == "canceled"
            case "drain":
                supervisor.hurry()
                assert (await supervisor.wait_drained()).returned == 1
            case "timeout":
                assert "timeout: the run took longer than" in (await error_of(supervisor, job.job_id))
                began += 5
        assert trio.current_time() - began < 0.5 + 3
        assert not is_alive(progress["pid"])
        assert not is_alive(progress["daemon"])


@pytest.mark.slow
async def test_a_function_that_is_stopped_can_clean_up_or_return_all_the_same(open_children, shown):
    async with open_children(child_grace_s=20) as supervisor:
        jobs = {
            task: await supervisor.jobs.enqueue(task, args, queue="q")
            for task, args in (("cleans", {}), ("wakes", {}), ("aio", {"to": 1, "s": 3_600}))
        }
        for job in jobs.values():
            await shown(supervisor, job.job_id)
            await supervisor.jobs.cancel(job.job_id)
        ended = {task: await when_ended(supervisor, job.job_id) for task, job in jobs.items()}
        assert {task: job.status for task, job in ended.items()} == {
            "cleans": "canceled",
            "wakes": "succeeded",
            "aio": "canceled",
        }
        assert ended["wakes"].result == "all the same"
        assert ended["aio"].progress == {"cleaned": "cancel_requested"}
        [line] = await lines_of(supervisor, jobs["cleans"].job_id)
        assert (line.message, line.fields) == ("cleaned", {"why": "cancel_requested"})


@pytest.mark.slow
async def test_a_program_that_a_function_executes_gets_the_stop_signal(open_children):
    async with open_children(child_grace_s=20) as supervisor:
        job = await supervisor.jobs.enqueue("becomes", queue="q")

        async def said():
            return [line.message for line in await lines_of(supervisor, job.job_id)]

        await until(said, lambda lines: lines == ["ready"])
        await supervisor.jobs.cancel(job.job_id)
        assert (await when_ended(supervisor, job.job_id)).status == "canceled"
        assert "told" in await said()


@pytest.mark.slow
async def test_the_handle_of_a_job_that_has_ended_does_not_speak_for_the_next_one(open_children, run_in):
    async with open_children(1) as supervisor:
        await run_in(supervisor, "haunts")
        assert (await run_in(supervisor, "haunts")).result.startswith("the job's function has returned")


@pytest.mark.slow
async def test_a_task_runs_for_the_first_time_while_an_idle_child_of_another_is_ended(
    open_children, run_in, metric, monkeypatch
):
    ending, go_on, end = trio.Event(), trio.Event(), Child.end

    async def end_later(child):
        ending.set()
        with trio.CancelScope(shield=True):
            await go_on.wait()
        await end(child)

    with capture_logs() as lines:
        async with open_children(child_idle_s=0.5, with_web=True) as supervisor:
            await run_in(supervisor, "who")
            with monkeypatch.context() as patched:
                patched.setattr(Child, "end", end_later)
                with trio.fail_after(patience_s()):
                    await ending.wait()
                await run_in(supervisor, "noop")
                go_on.set()
            await until(partial(metric, supervisor, IDLE), lambda idle: idle == 0)
    assert [line for line in lines if line["event"] == "a part failed and is restarted"] == []


@pytest.mark.slow
async def test_a_foreign_sigterm_stops_no_handler(open_children, shown):
    async with open_children() as supervisor:
        job = await supervisor.jobs.enqueue("cleans", queue="q")
        pid = (await shown(supervisor, job.job_id))["pid"]
        for other in (pid, _guard_of(pid)):
            os.kill(other, signal.SIGTERM)
        await trio.sleep(0.2)
        assert is_alive(pid)
        assert (await supervisor.jobs.get(job.job_id)).status == "running"
        await supervisor.jobs.cancel(job.job_id)
        assert (await when_ended(supervisor, job.job_id)).status == "canceled"


def _guard_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("of", ["guard", "body"])
async def test_a_guard_or_body_that_is_killed_leaves_nothing_and_fails_the_attempt(open_children, shown, of):
    async with open_children() as supervisor:
        job = await supervisor.jobs.enqueue("ignores", queue="q", lease_ttl_sec=60, max_attempts=1)
        progress = await shown(supervisor, job.job_id)
        os.kill(progress["pid"] if of == "body" else _guard_of(progress["pid"]), signal.SIGKILL)
        ended = await when_ended(supervisor, job.job_id)
        assert ended.status == "failed"
        assert ended.error.startswith("the child process was ")
        assert not is_alive(progress["pid"])
        assert not is_alive(progress["daemon"])


@pytest.fixture
def without_renewals(open_children, shown, monkeypatch):
    """Return a context with a handler that ignores everything, while its lease is not renewed and nothing stops it."""

    @asynccontextmanager
    async def without_renewals():
        async with open_children(heartbeat_s=0.5, default_lease_s=3) as supervisor:
            job = await supervisor.jobs.enqueue("ignores", queue="q", lease_ttl_sec=4, max_attempts=1)
            progress = await shown(supervisor, job.job_id)
            # This reads private fields: only a supervisor that is broken in this way does not stop a run itself.
            [run] = supervisor._parts.runs

            async def is_dead():
                return not is_alive(progress["pid"])

            with monkeypatch.context() as patched:
                patched.setattr(Run, "renewed", lambda _run, _sent_at: None)
                run.scope.deadline = float("inf")
                yield progress
                await until(is_dead)
                assert trio.current_time() < run.lease.until
            ended = await when_ended(supervisor, job.job_id)
            cause = "the child process was killed: its lease or key was not renewed in time"
            assert ended.error == f"no heartbeat succeeded: the lease was lost\n{cause}"
            assert not is_alive(progress["daemon"])

    return without_renewals


@pytest.mark.slow
@pytest.mark.parametrize("who", ["service", "guard"])
async def test_machine_sleep_before_a_confirmed_renewal_counts_against_the_lease(
    open_children, shown, monkeypatch, who
):
    slept, asleep, beat = [], lease_clock._asleep_s, heartbeat.aio_beat
    monkeypatch.setattr(lease_clock, "_asleep_s", lambda: asleep() + sum(slept))
    monkeypatch.setattr(lease_clock, "_sleep", lease_clock._Sleep())

    async def beat_and_sleep(*given):
        pulses = await beat(*given)
        if sleeps.is_set() and not slept:
            slept.append(3_600)  # longer than the lease, which seems renewed
        elif slept:
            await asyncio.sleep(3_600)
        return pulses

    sleeps = trio.Event()
    monkeypatch.setattr(heartbeat, "aio_beat", beat_and_sleep)
    async with open_children(heartbeat_s=0.5) as supervisor:
        job = await supervisor.jobs.enqueue("ignores", queue="q", lease_ttl_sec=600, max_attempts=1)
        progress = await shown(supervisor, job.job_id)
        # This reads private fields, as above, and the lease, which is visible nowhere else.
        [run] = supervisor._parts.runs
        if who == "guard":
            ends = Lease.body_ends
            monkeypatch.setattr(Lease, "body_ends", lambda *_, **__: (float("inf"), StopReason.LEASE_ENDED))
            run.scope.deadline = float("inf")
        sleeps.set()

        async def are_dead():
            return not is_alive(progress["pid"]) and not is_alive(progress["daemon"])

        await until(are_dead, within_s=20)
        assert run.lease.until < lease_clock.lease_time()
        if who == "guard":
            monkeypatch.setattr(Lease, "body_ends", ends)


@pytest.mark.full
async def test_a_lease_that_is_not_renewed_ends_the_body_before_it_is_over(without_renewals):
    async with without_renewals():
        pass


@pytest.mark.full
async def test_a_body_whose_guard_is_stopped_dies_before_its_lease_is_over_too(without_renewals):
    async with without_renewals() as progress:
        os.kill(_guard_of(progress["pid"]), signal.SIGSTOP)


async def test_functions_that_a_child_can_not_find_or_run_are_refused_at_the_start():
    tasks = Tasks()

    @tasks.task("local", process=True)
    def local(job: ProcessJob) -> None:
        """Function that is not at the top level of its module."""

    with pytest.raises(
        ConfigError, match=r"task 'local': process=True: its function must be at the top level of its mod"
    ):
        await run_task(tasks, "local")

    with pytest.raises(ValueError, match=r"process: needs a plain function, or an async function with asyncio=True"):

        @tasks.task("trio", process=True)
        async def of_trio(job: Job) -> None:
            """Function for Trio."""

    with pytest.raises(ValueError, match=r"memory_mb, max_jobs: need process=True"):
        tasks.task("thread", memory_mb=100)(child_tasks.noop.handler)


async def test_a_child_that_can_not_be_started_for_want_of_descriptors_leaves_none_open():
    def open_ones():
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    declared = wire.BodySetup(
        path=sys.path, module="child_tasks", name="noop", around=[], asyncio=False, memory_mb=None
    )
    before = open_ones()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_fd = os.dup(0)
    os.close(next_fd)
    for room in range(9):
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd + room, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                await Child.start(declared)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert open_ones() == before, room


def test_a_frame_longer_than_any_is_refused():
    longest = frames.header_of(frames.FrameKind.ANSWER, frames.MAX_FRAME, 0)
    assert frames.read_header(longest) == (frames.FrameKind.ANSWER, frames.MAX_FRAME, 0)
    with pytest.raises(ValueError, match=r"a frame of 1073741825 bytes; the maximum is 1073741824"):
        frames.read_header(frames.header_of(frames.FrameKind.ANSWER, 0, frames.MAX_FRAME + 1))
