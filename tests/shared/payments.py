"""Payments as durable processes, with steps that a test controls."""

from __future__ import annotations

from typing import Any

import attrs
import trio

from dataloader import RetryPolicy
from dataloader.flows.processes import Done, Fail, Process, Processes, ProcessType, Refuse, Remove, Timer


@attrs.frozen
class Payment:
    amount: int
    paid: bool = False


@attrs.define(eq=False)
class Gate:
    """Lets hanging steps continue."""

    opened: trio.Event = attrs.field(factory=trio.Event)
    begun: list[Any] = attrs.field(factory=list)


def payments(gate: Gate) -> Processes:
    """Return a type with steps that a test controls."""
    processes = Processes()
    kind = processes.define("payment", state=Payment, retry=RetryPolicy(base_s=0.01, factor=1), max_tries=2)
    _from_start_to_end(kind)
    _that_fail_or_hang(kind, gate)
    return processes


def _from_start_to_end(kind: ProcessType[Payment]) -> None:

    @kind.init
    async def begin(p: Process[Payment], amount: int) -> Done | Refuse | Fail:
        if amount < 0:
            return Refuse("nothing is due")
        if amount == 0:
            return Fail("no amount of 'nothing' 123")
        return Done("reserved", state=Payment(amount), events=["reserved"], next=Timer(after_s=900))

    @kind.call
    async def pay(p: Process[Payment], amount: int) -> Done | Refuse:
        if amount != p.state.amount:
            return Refuse(f"{p.state.amount} is due")
        return Done("thanks", state=attrs.evolve(p.state, paid=True), events=["paid", {"by": p.context}])

    @kind.call
    async def capture(p: Process[Payment]) -> Done:
        return Done(next=Timer(after_s=0))

    @kind.timeout
    async def due(p: Process[Payment]) -> Done | Fail:
        if p.state.amount == 13:
            return Fail("the bank says 13", final=True)
        return Done(events=["captured"], next=Remove(after_s=86_400))

    @kind.repair
    async def mend(p: Process[Payment], amount: int) -> Done:
        return Done("mended", state=Payment(amount))


def _that_fail_or_hang(kind: ProcessType[Payment], gate: Gate) -> None:
    @kind.call
    async def hang(p: Process[Payment]) -> Done:
        gate.begun.append(p.process_id)
        await gate.opened.wait()
        return Done("at last")

    @kind.call
    async def fall(p: Process[Payment], why: str) -> Fail:
        return Fail(why)
