"""Type of processes for tests: payments, also in an older and a newer version."""

from __future__ import annotations

import attrs
import trio

from dataloader.flows.processes import Done, Fail, Process, Processes, Refuse, Remove, Timer, Transient


@attrs.frozen
class Payment:
    amount: int
    paid: bool = False


def payments(log=None, **options):
    processes = Processes()
    kind = processes.define("payment", state=Payment, **options)
    log = [] if log is None else log

    @kind.init
    async def begin(p: Process[Payment], amount: int) -> Done:
        log.append(("init", amount, p.step_key))
        return Done("reserved", state=Payment(amount), events=["reserved"], next=Timer(after_s=900))

    @kind.call
    async def pay(p: Process[Payment], amount: int) -> Done | Refuse:
        if amount != p.state.amount:
            return Refuse(f"{p.state.amount} is due")
        return Done("thanks", state=attrs.evolve(p.state, paid=True), events=["paid"], next=Timer(after_s=0))

    @kind.call
    async def hang(p: Process[Payment]) -> Done:
        log.append("hangs")
        await trio.sleep_forever()

    @kind.call
    async def wrong(p: Process[Payment]) -> Done:
        return "no Done"

    @kind.timeout
    async def due(p: Process[Payment]) -> Done | Fail:
        log.append(("due", p.attempt))
        if p.attempt == 1:
            raise Transient("the bank is away")
        return Done(events=["captured"], next=Remove(after_s=86_400))

    @kind.repair
    async def mend(p: Process[Payment], amount: int) -> Done:
        return Done(state=Payment(amount), next=Timer(after_s=0))

    return processes


def older(log):
    processes = Processes()
    kind = processes.define("payment", state=dict)

    @kind.init
    async def begin(_p: Process) -> Done:
        return Done(state={"cents": 500}, next=Timer(after_s=900))

    @kind.call
    async def look(p: Process) -> Done:
        log.append("older")
        return Done(p.state)

    return processes


def newer(*, upgrades):
    processes = Processes()
    kind = processes.define("payment", state=Payment, version=2)

    @kind.call
    async def look(p: Process[Payment]) -> Done:
        return Done(p.state.amount)

    if upgrades:

        @kind.upgrade
        def up(state: dict, version: int) -> Payment:
            return Payment(state["cents"] // 100 * version)

    return processes
