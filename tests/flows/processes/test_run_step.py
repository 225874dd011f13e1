"""Steps of processes run by their authors' tests, without a database."""

from __future__ import annotations

import pytest
import trio
from payment_processes import Payment, newer, payments

from dataloader.flows.processes import KEEP, Done, Process, Processes, Refuse, Remove, Timer, Transient
from dataloader.testing import run_step

pytestmark = pytest.mark.requirement("P6")
TYPE = next(iter(payments()))


async def test_a_step_is_run_with_its_state_and_what_would_be_stored_comes_back():
    begun = await run_step(TYPE, "init", args=5)
    assert (begun.outcome, begun.response, begun.state, begun.events) == ("done", "reserved", Payment(5), ["reserved"])
    assert begun.next == Timer(after_s=900)
    paid = await run_step(TYPE, "pay", state=Payment(5), args=5, metadata={"a": 1})
    assert (paid.state, paid.next, paid.metadata) == (Payment(5, paid=True), Timer(after_s=0), {"a": 1})
    over = await run_step(TYPE, "timeout", state=Payment(5), attempt=2)
    assert over.next == Remove(after_s=86_400)


async def test_a_refusal_a_retry_and_a_failure_are_told_apart():
    refused = await run_step(TYPE, "pay", state=Payment(5), args=4)
    assert (refused.outcome, refused.error, refused.state, refused.next) == ("refused", "5 is due", Payment(5), KEEP)
    assert (await run_step(TYPE, "pay", state=Payment(5), args="x")).outcome == "refused"
    again = await run_step(TYPE, "timeout", state=Payment(5))
    assert (again.outcome, again.error) == ("retry", "Transient: the bank is away")
    assert 4 < again.next.after_s < 6
    wrong = await run_step(TYPE, "wrong", state=Payment(5))
    assert (wrong.outcome, wrong.error.partition(":")[0]) == ("failed", "unsupported_result")


async def in_a_nursery():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(away)
        nursery.start_soon(trio.sleep_forever)


async def away():
    raise Transient("the bank is away")


async def too_slow():
    with trio.fail_after(0.01):
        await trio.sleep_forever()


async def lost():
    raise ConnectionResetError("the bank hung up")


async def broken():
    raise ValueError("no such account")


async def of_two_kinds():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(broken)
        nursery.start_soon(away)


@pytest.mark.parametrize(
    ("work", "outcome", "error"),
    [
        (away, "retry", "Transient: the bank is away"),
        (in_a_nursery, "retry", "Transient: the bank is away"),
        (lost, "retry", "ConnectionResetError: the bank hung up"),
        (too_slow, "retry", "TooSlowError"),
        (broken, "failed", "ValueError: no such account"),
        (of_two_kinds, "failed", None),
        # Nobody knows how far it has come.
        (trio.sleep_forever, "failed", "the step took longer than its 0.5 s"),
    ],
)
async def test_a_timeout_is_tried_again_for_what_passes_and_not_after_its_own_time_is_over(work, outcome, error):
    kind = Processes().define("payment", step_timeout_s=0.5)

    @kind.timeout
    async def due(_p: Process) -> Done:
        await work()

    run = await run_step(kind, "timeout")
    assert run.outcome == outcome
    assert error in {None, run.error}


@pytest.mark.requirement("P10")
async def test_messages_of_a_step_that_is_done_are_seen_and_those_of_another_are_not():
    kind = Processes().define("sender", state=int)

    @kind.call
    async def tell(p: Process[int], how: str) -> Done | Refuse:
        p.start("parcel", "1", {"to": "ann"}, metadata={"by": p.process_id})
        p.call(kind, "2", "tell", "x" * (5 << 20) if how == "long" else None)
        return Refuse("no") if how == "refuse" else Done()

    run = await run_step(kind, "tell", args="done", state=1)
    assert [(one.kind, one.type, one.process_id, one.method) for one in run.sent] == [
        ("init", "parcel", "1", None), ("call", "sender", "2", "tell"),
    ]  # fmt: skip
    assert (await run_step(kind, "tell", args="refuse", state=1)).sent == []
    run = await run_step(kind, "tell", args="long", state=1)
    assert (run.outcome, run.sent) == ("failed", [])
    assert run.error.startswith("unsupported_result: args: must")


@pytest.mark.requirement("P1", "P11")
async def test_a_state_of_an_older_version_is_upgraded_and_events_are_read():
    kind = next(iter(newer(upgrades=True)))

    @kind.call
    async def count(p: Process[Payment]) -> Done:
        return Done(len(await p.events(after=1)) + p.last_event_id)

    run = await run_step(kind, "count", state={"cents": 700}, version=1, events=["a", "b", "c"])
    assert (run.response, run.state) == (5, Payment(7))
