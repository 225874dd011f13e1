"""Handlers that end without waiting run in one Trio task: no effect of one reaches the next (Q5, Q9)."""

from __future__ import annotations

import contextvars
import time

import pytest
import trio
import trio.testing
from conditions import patience_s, until, when_ended
from logged import capture_logs

from dataloader import NewJob, Tasks
from dataloader.actors.job_runs import Runs
from dataloader.actors.recorder import open_channel
from dataloader.actors.run_services import RunServices
from dataloader.actors.slots import Slots
from dataloader.jobs.ids import uuid7
from dataloader.jobs.lease_margin import margin_s
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.queue.claim import Claim
from dataloader.store.queue.lease_clock import lease_time

LEASE_S = 60
JOBS = 30
"""More jobs than are started in one turn of the event loop."""

left = contextvars.ContextVar("left", default=None)


class Desk:
    """A task `do`: each job does what its arg `what` names, and records the Trio task in which it began."""

    def __init__(self):
        self.tasks, self.begun, self.release = Tasks(), {}, trio.Event()
        self.tasks.task("do", max_attempts=1)(self.do)

    async def do(self, job):
        number = job.args["n"]
        self.begun[number] = trio.lowlevel.current_task()
        return await getattr(self, job.args["what"])(number)

    async def nothing(self, number):
        return number

    async def wait(self, _number):
        await self.release.wait()

    async def wait_and_end(self, _number):
        await trio.lowlevel.checkpoint()

    async def run(self, open_worker, whats, **settings):
        """Run jobs that one claim takes together; return the ended jobs."""
        jobs = [NewJob(task="do", queue="q", args={"n": n, "what": what}) for n, what in enumerate(whats)]
        async with open_worker(self.tasks, {"q": len(jobs)}, **settings) as supervisor:
            await supervisor.jobs.enqueue_many(jobs)
            with trio.fail_after(patience_s()):
                return [await when_ended(supervisor, job.job_id) for job in jobs]


@pytest.mark.requirement("Q5")
async def test_handlers_that_never_wait_share_a_task(open_worker):
    desk = Desk()
    ended = await desk.run(open_worker, ["nothing"] * JOBS)
    assert [job.result for job in ended] == list(range(JOBS))
    assert len(set(desk.begun.values())) == 1


@pytest.mark.requirement("Q9")
async def test_what_a_handler_sets_in_its_context_does_not_reach_the_next(open_worker):
    class Leaving(Desk):
        async def leave(self, number):
            found = left.get()
            left.set(number)
            return found

    desk = Leaving()
    ended = await desk.run(open_worker, ["leave"] * JOBS)
    assert [job.result for job in ended] == [None] * JOBS
    assert len(set(desk.begun.values())) == 1


@pytest.mark.requirement("Q9")
async def test_the_task_of_a_handler_has_the_handlers_context_from_the_beginning(open_worker):
    class Looking(Desk):
        async def look(self, number):
            left.set(number)
            return trio.lowlevel.current_task().context.get(left)

    ended = await Looking().run(open_worker, ["look", "nothing"] * 5)
    assert [job.result for job in ended] == list(range(10))


@pytest.mark.requirement("Q9")
async def test_a_handler_that_waits_keeps_its_context_also_after_a_call_from_a_thread(open_worker):
    class Crossing(Desk):
        async def cross(self, number):
            left.set(number)
            seen = [await trio.to_thread.run_sync(trio.from_thread.run, self.ask) for _ in range(2)]
            return [*seen, left.get()]

        async def ask(self):
            await trio.lowlevel.checkpoint()
            return left.get()

    ended = await Crossing().run(open_worker, ["nothing", "cross"] * 5)
    assert [job.result for job in ended[1::2]] == [[number] * 3 for number in range(1, 10, 2)]


@pytest.mark.requirement("Q5")
async def test_handlers_that_wait_hold_up_no_other_job_of_their_claim(open_worker):
    desk = Desk()

    class Last(Desk):
        async def end(self, number):
            desk.release.set()
            return number

    desk.end = Last.end.__get__(desk)
    # The last one ends the wait of all others.
    ended = await desk.run(open_worker, ["wait"] * (JOBS - 1) + ["end"])
    assert [job.status for job in ended] == ["succeeded"] * JOBS
    assert len(set(desk.begun.values())) == JOBS


@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit, StopIteration])
async def test_an_error_ends_its_own_job_and_not_the_shared_task(open_worker, error):
    class Raising(Desk):
        async def fail(self, _number):
            raise error

    desk = Raising()
    ended = await desk.run(open_worker, ["nothing", "fail", "nothing"])
    assert [job.status for job in ended] == ["succeeded", "failed", "succeeded"]
    assert len(set(desk.begun.values())) == 1


@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("what", ["raise_kept", "raise_kept_in_group", "wait_and_raise_kept"])
async def test_a_cancellation_that_a_handler_kept_and_raises_fails_its_own_job_alone(open_worker, what):
    class Keeping(Desk):
        async def raise_kept(self, _number):
            with trio.CancelScope() as scope:
                scope.cancel()
                try:
                    await trio.lowlevel.checkpoint_if_cancelled()
                except trio.Cancelled as cancelled:  # noqa: ASYNC103 - the fault of such a handler
                    kept = cancelled
            raise kept

        async def raise_kept_in_group(self, number):
            try:
                await self.raise_kept(number)
            except trio.Cancelled as cancelled:
                raise BaseExceptionGroup("kept", [cancelled]) from None

        async def wait_and_raise_kept(self, number):
            await trio.lowlevel.checkpoint()
            await self.raise_kept(number)

    ended = await Keeping().run(open_worker, ["nothing", what, "wait_and_end", "nothing"])
    assert [job.status for job in ended] == ["succeeded", "failed", "succeeded", "succeeded"]
    assert "Cancelled" in ended[1].error


class Leaving(Desk):
    """Handlers that leave a cancel scope open, like a generator that yields in one."""

    async def leave_cancelled(self, _number):
        scope = trio.CancelScope()
        scope.__enter__()
        scope.cancel()

    async def leave_with_deadline(self, _number):
        trio.move_on_after(30).__enter__()

    async def leave_shielded(self, _number):
        trio.CancelScope(shield=True).__enter__()

    async def leave_plain(self, _number):
        trio.CancelScope().__enter__()

    async def check(self, _number):
        await trio.lowlevel.checkpoint()

    async def fail(self, _number):
        await trio.lowlevel.checkpoint()
        raise ValueError("its own")


@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("leave", ["leave_cancelled", "leave_with_deadline", "leave_shielded"])
async def test_a_cancel_scope_that_a_handler_leaves_open_fails_its_own_job_alone(open_worker, leave):
    ended = await Leaving().run(open_worker, ["nothing", leave, "wait_and_end", "nothing"])
    assert [job.status for job in ended] == ["succeeded", "failed", "succeeded", "succeeded"]
    assert "Cancel scope stack corrupted" in ended[1].error


@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("next_one", ["nothing", "check", "fail"])
async def test_a_left_scope_without_a_deadline_is_logged_and_fails_no_other_job(open_worker, next_one):
    with capture_logs() as logs:
        ended = await Leaving().run(open_worker, ["nothing", "leave_plain", next_one, "nothing"])
    assert [job.status for job in ended] == ["succeeded"] * 2 + ["failed" if next_one == "fail" else "succeeded"] + [
        "succeeded"
    ]
    assert "Cancel scope" not in (ended[2].error or "")
    assert "a handler left a cancel scope open" in [line["event"] for line in logs]


@pytest.mark.requirement("Q4")
async def test_a_cancel_of_a_handler_that_waits_stops_no_other_one_of_its_claim(open_worker):
    desk = Desk()
    jobs = [NewJob(task="do", queue="q", args={"n": n, "what": "wait"}) for n in range(3)]
    async with open_worker(desk.tasks) as supervisor:
        await supervisor.jobs.enqueue_many(jobs)
        await until(lambda: _given(desk.begun), lambda begun: len(begun) == 3)
        await supervisor.jobs.cancel(jobs[1].job_id)
        assert (await when_ended(supervisor, jobs[1].job_id)).status == "canceled"
        desk.release.set()
        assert [(await when_ended(supervisor, job.job_id)).status for job in jobs] == [
            "succeeded",
            "canceled",
            "succeeded",
        ]


@pytest.mark.requirement("Q8")
async def test_a_waiting_handlers_frame_is_found_from_its_task(open_worker):
    desk = Desk()
    async with open_worker(desk.tasks) as supervisor:
        job = await supervisor.jobs.enqueue("do", {"n": 1, "what": "wait"}, queue="q")
        await until(lambda: _given(desk.begun), len)
        [task] = desk.begun.values()
        assert desk.wait.__code__ in [frame.f_code for frame, _ in task.iter_await_frames()]
        desk.release.set()
        await when_ended(supervisor, job.job_id)


@pytest.fixture
async def bench():
    """Return slots without a database: `run` starts jobs of one claim; `outcomes` has their ends."""

    class Bench:
        def __init__(self, nursery):
            self.send, self.receive = open_channel()
            self.desk, self.runs = Desk(), Runs()
            services = RunServices(
                to_recorder=self.send, transactions=None, enqueuer=None, telemetry=Telemetry(), max_lines=1
            )
            self.slots = Slots(queue="q", count=100, tasks=self.desk.tasks, runs=self.runs, services=services)
            self.slots.open(nursery)

        def start(self, whats, lease_s=None):
            """Start a job for each of `whats`; return their runs. `lease_s` has other leases by the job's number."""
            jobs = [
                ClaimedJob(
                    uuid7(), number, "q", "do", f'{{"n": {number}, "what": "{what}"}}', None, None, "", 1, 5,
                    (lease_s or {}).get(number, LEASE_S),
                )
                for number, what in enumerate(whats)
            ]  # fmt: skip
            self.slots.start_all(Claim(jobs, [0.0] * len(jobs), False, False, None, [], lease_time()))
            return list(self.runs)

        async def outcomes(self, number):
            """Return the steps of `number` ends, by the job's number."""
            ends = [await self.receive.receive() for _ in range(number)]
            return {end.run.job.token: end.outcome and end.outcome.step.value for end in ends}

    async with trio.open_nursery() as nursery:
        yield Bench(nursery)
        nursery.cancel_scope.cancel()


@pytest.mark.requirement("Q8")
async def test_a_handler_has_its_own_deadline_from_its_first_wait_on(autojump_clock, bench):
    began = trio.current_time()
    runs = bench.start(["nothing", "wait", "nothing", "wait"], {3: 3 * LEASE_S})
    assert await bench.outcomes(2) == {0: "succeed", 2: "succeed"}
    await trio.testing.wait_all_tasks_blocked()
    assert runs[1].scope.deadline == pytest.approx(began + LEASE_S - margin_s(LEASE_S), abs=0.1)
    assert runs[3].scope.deadline == pytest.approx(began + 3 * LEASE_S - margin_s(3 * LEASE_S), abs=0.1)
    assert await bench.outcomes(1) == {1: "retry"}
    assert trio.current_time() == pytest.approx(began + LEASE_S - margin_s(LEASE_S), abs=0.1)
    assert runs[1].stop_reason is StopReason.LEASE_ENDED
    assert runs[0].scope is None


@pytest.mark.requirement("Q8")
async def test_a_handler_that_has_not_waited_sees_no_later_deadline_than_its_own(autojump_clock, bench):
    seen = {}

    async def look(number):
        seen[number] = trio.current_effective_deadline() - trio.current_time()

    bench.desk.look = look
    lease_s = {1: 3, 2: 3 * LEASE_S}
    bench.start(["look"] * 4, lease_s)
    await bench.outcomes(4)
    for number, left_s in seen.items():
        assert left_s <= lease_s.get(number, LEASE_S), number
    assert seen[0] == pytest.approx(LEASE_S - margin_s(LEASE_S), abs=0.1)


@pytest.mark.requirement("Q4")
async def test_a_run_that_was_stopped_before_its_handler_began_stops_at_the_first_wait(autojump_clock, bench):
    runs = bench.start(["nothing", "wait", "nothing"])
    runs[0].stop(StopReason.CANCEL)
    runs[1].stop(StopReason.CANCEL)
    assert await bench.outcomes(3) == {0: "succeed", 1: "cancel", 2: "succeed"}


@pytest.mark.requirement("Q9")
async def test_a_renewed_lease_of_a_run_that_has_ended_moves_no_other_runs_deadline(autojump_clock, bench):
    began = trio.current_time()
    ended, waiting = bench.start(["nothing", "wait"])
    await bench.outcomes(1)
    await trio.testing.wait_all_tasks_blocked()
    ended.renewed(began + 10 * LEASE_S)
    ended.stop(StopReason.LEASE_LOST)
    assert waiting.scope.deadline == pytest.approx(began + LEASE_S - margin_s(LEASE_S), abs=0.1)
    assert not waiting.is_stopped


@pytest.mark.requirement("Q4")
async def test_a_left_scope_without_a_deadline_does_not_hinder_the_stop_of_the_next_job(autojump_clock, bench):
    async def leave_plain(_number):
        trio.CancelScope().__enter__()

    bench.desk.leave_plain = leave_plain
    _, waiting = bench.start(["leave_plain", "wait"])
    await bench.outcomes(1)
    await trio.testing.wait_all_tasks_blocked()
    waiting.stop(StopReason.CANCEL)
    assert await bench.outcomes(1) == {1: "cancel"}
    bench.start(["nothing"])
    assert await bench.outcomes(1) == {0: "succeed"}


@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("waits_every", [1, 10])
async def test_handlers_that_compute_leave_turns_to_others_also_if_some_of_them_wait(bench, waits_every):
    begun = []

    async def compute(number):
        begun.append(number)
        if waits_every == 1 or number % waits_every:
            time.sleep(0.005)  # noqa: ASYNC251 - it represents a computation
        if number % waits_every == 0:
            await trio.lowlevel.checkpoint()

    bench.desk.compute = compute
    bench.start(["compute"] * 2)
    await bench.outcomes(2)
    bench.start(["compute"] * JOBS)
    turns = []
    while len(begun) < JOBS + 2:
        before = len(begun)
        await trio.lowlevel.checkpoint()
        turns.append(len(begun) - before)
    assert max(turns) <= 4


async def _given(value):
    return value
