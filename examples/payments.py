"""A durable process for each payment: reserved at its start, paid by a call, captured by a timer, repaired if it fails.

Run it with `python examples/payments.py`, or serve it with `dataloader serve --tasks payments:tasks`. With DL_DB_DSN it
uses that database, else an embedded PostgreSQL in .dataloader. docs/processes.md explains it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import attrs
import trio

from dataloader import Refused, RetryPolicy, Settings, Tasks, Worker, embedded_postgres, open_supervisor
from dataloader.flows.processes import Done, Fail, Process, Processes, Refuse, Remove, Timer, add_processes


@attrs.frozen
class Payment:
    amount: int
    paid: bool = False


processes = Processes()
payments = processes.define("payment", state=Payment, step_timeout_s=30, retry=RetryPolicy(base_s=5, factor=2))


class Bank:
    """External service. It executes requests with the same key once."""

    limit = 1_000

    def __init__(self) -> None:
        self.done: dict[str, Any] = {}

    async def reserve(self, payment: str, amount: int, key: str) -> None:
        self.done.setdefault(key, ("reserve", payment, amount))

    async def capture(self, payment: str, amount: int, key: str) -> bool:
        if amount > self.limit:
            return False
        self.done.setdefault(key, ("capture", payment, amount))
        return True


bank = Bank()


@payments.init
async def begin(p: Process[Payment], amount: int) -> Done:
    await bank.reserve(p.process_id, amount, key=p.step_key)
    return Done("reserved", state=Payment(amount), events=["reserved"], next=Timer(after_s=900))


@payments.call
async def pay(p: Process[Payment], amount: int) -> Done | Refuse:
    if amount != p.state.amount:
        return Refuse(f"{p.state.amount} is due")  # nothing changes, the timer stays
    return Done("thanks", state=attrs.evolve(p.state, paid=True), events=["paid"], next=Timer(after_s=0))


@payments.timeout
async def due(p: Process[Payment]) -> Done | Fail:
    if p.state.paid and not await bank.capture(p.process_id, p.state.amount, key=p.step_key):
        return Fail("the bank has refused it", final=True)  # the process is in error until it is repaired
    return Done(events=["captured" if p.state.paid else "expired"], next=Remove(after_s=86_400))


@payments.repair
async def correct(p: Process[Any], amount: int) -> Done:
    state = Payment(amount, paid=p.state["paid"])  # a repair gets the state as it is stored
    return Done("corrected", state=state, metadata={**p.metadata, "corrected": True}, next=Timer(after_s=0))


tasks = Tasks()
add_processes(tasks, processes)


async def main(dsn: str) -> list[Any]:
    settings = Settings(db_dsn=dsn, workers=(Worker("process.payment", 4),))
    async with open_supervisor(settings, tasks) as supervisor:
        ask = supervisor.processes
        print(await ask.start("payment", "order-77", 5, key="order-77", metadata={"customer": "ann"}))
        try:
            await ask.call("payment", "order-77", "pay", 4)
        except Refused as refused:
            print(f"refused: {refused}")
        print(await ask.call("payment", "order-77", "pay", 5, key="pay-77"))
        with trio.fail_after(30):
            # The timer is due immediately.
            while len(events := (await ask.events("payment", "order-77")).events) < 3:  # noqa: ASYNC110 - it looks
                await trio.sleep(0.05)
        print(", ".join(event.payload for event in events))
        await ask.remove("payment", "order-77")
        return [event.payload for event in events]


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        dsn = os.environ.get("DL_DB_DSN") or stack.enter_context(embedded_postgres(Path(".dataloader"))).dsn
        trio.run(main, dsn)
