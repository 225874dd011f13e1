"""Service written from the queue document: it claims, locks, runs and finishes by the SQL of foreign.py.

It has one worker, which knows neither our limit queues nor our graphs, so a separate queue shares keys with ours. After
the loss of its session it abandons its current job, and it finishes nothing after its lease.
"""

from __future__ import annotations

import asyncio
import os
import random
import time

import asyncpg
from foreign import BACK_OFF, CLAIM, FINISH, LOCK, REAP, UNLOCK

from chaos.notes import TICK_S, Notes

QUEUE = "foreign"
LEASE_S = 5


def of_queue(sql: str) -> str:
    return sql.replace("queue = 'q'", f"queue = '{QUEUE}'")


async def work(notes: Notes) -> None:
    connection = await asyncpg.connect(os.environ["CHAOS_DSN"], timeout=10, command_timeout=10)
    try:
        while True:
            await connection.execute(REAP.replace("WHERE", f"WHERE queue = '{QUEUE}' AND"))
            sent = time.monotonic()
            row = await connection.fetchrow(of_queue(CLAIM))
            if row is None:
                await asyncio.sleep(0.1)
                continue
            job, key, _attempt = row
            if not await connection.fetchval(LOCK, key):
                await connection.execute(BACK_OFF, job, 1.0)
                continue
            deadline = sent + LEASE_S
            with notes.run(str(job), key, "foreign", lambda deadline=deadline: deadline):
                await asyncio.sleep(random.random() * 0.2)
            if time.monotonic() < deadline - 1:
                await connection.execute(FINISH, job)
            await connection.execute(UNLOCK, key)
    finally:
        connection.terminate()


async def main() -> None:
    notes = Notes(os.environ["CHAOS_FOLDER"], "foreign")

    async def tick() -> None:
        while True:
            notes.tick()
            await asyncio.sleep(TICK_S)

    async with asyncio.TaskGroup() as group:
        group.create_task(tick())
        while True:
            try:
                await work(notes)
            except Exception:  # noqa: BLE001 - errors of a driver whose database goes away
                await asyncio.sleep(0.5)


if __name__ == "__main__":
    asyncio.run(main())
