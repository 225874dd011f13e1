"""Steps of processes run by their authors' tests, without a database."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, TypedDict

import attrs
import msgspec
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


async def test_a_refusal_a_retry_and_a_failure_are_distinguished():
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "outcome", "error"),
    [
        (away, "retry", "Transient: the bank is away"),
        (in_a_nursery, "retry", "Transient: the bank is away"),
        (lost, "retry", "ConnectionResetError: the bank hung up"),
        (too_slow, "retry", "TooSlowError"),
        (broken, "failed", "ValueError: no such account"),
        (of_two_kinds, "failed", None),
        # It is unknown which part of the step was done.
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


class AsTypedDict(TypedDict):
    amount: int


@attrs.frozen
class AsAttrs:
    amount: int


@dataclasses.dataclass
class AsDataclass:
    amount: int


class AsStruct(msgspec.Struct):
    amount: int


class Euros(msgspec.Struct, tag=True):
    amount: int


class Points(msgspec.Struct, tag=True):
    points: int


@pytest.mark.requirement("P11")
@pytest.mark.parametrize(
    ("options", "upgraded", "seen"),
    [
        ({}, {"amount": 7}, {"amount": 7}),
        ({"state": Any}, {"amount": 7}, {"amount": 7}),
        ({}, AsAttrs(7), {"amount": 7}),
        ({}, None, None),
        ({"state": dict}, {"amount": 7}, {"amount": 7}),
        ({"state": dict[str, int]}, {"amount": 7}, {"amount": 7}),
        ({"state": AsTypedDict}, {"amount": 7}, {"amount": 7}),
        *[({"state": kind}, kind(7), kind(7)) for kind in (AsAttrs, AsDataclass, AsStruct, int)],
        *[({"state": kind}, {"amount": 7}, kind(7)) for kind in (AsAttrs, AsDataclass, AsStruct)],
        ({"state": Euros | Points}, Euros(7), Euros(7)),
        ({"state": AsAttrs | None}, AsAttrs(7), AsAttrs(7)),
        ({"state": Optional[AsAttrs]}, None, None),  # noqa: UP045 - as users write it
        ({"state": list[AsAttrs]}, [AsAttrs(7)], [AsAttrs(7)]),
    ],
)
async def test_an_upgrade_works_for_each_kind_of_state(options, upgraded, seen):
    kind, states = Processes().define("t", version=2, **options), []
    kind.upgrade(lambda _state, _version: upgraded)

    @kind.call
    async def read(p: Process) -> Done:
        states.append(p.state)
        return Done()

    run = await run_step(kind, "read", state={"cents": 700}, version=1)
    assert (run.error, states, run.state) == (None, [seen], seen)
    # The stored state is of the new version: the next step reads it without an upgrade.
    run = await run_step(kind, "read", state=run.state)
    assert (run.error, states) == (None, [seen, seen])


@pytest.mark.requirement("P11")
@pytest.mark.parametrize(
    ("upgraded", "error"),
    [
        ({"euros": 7}, "BadRequest: state: Object missing required field amount"),
        (object(), "BadRequest: state: is not JSON: Encoding objects of type object is unsupported"),
    ],
)
async def test_a_result_of_an_upgrade_that_does_not_fit_fails_the_step(upgraded, error):
    kind = Processes().define("t", version=2, state=AsAttrs)
    kind.upgrade(lambda _state, _version: upgraded)

    @kind.call
    async def read(_p: Process) -> Done:
        return Done()

    run = await run_step(kind, "read", state={"cents": 700}, version=1)
    assert (run.outcome, run.error) == ("failed", error)


def test_an_async_upgrade_is_refused_when_it_is_declared():
    async def up(state, _version):
        return state

    with pytest.raises(ValueError, match="must be a plain function, not async"):
        Processes().define("t", version=2).upgrade(up)
