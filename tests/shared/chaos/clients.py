"""Clients of `just chaos`: each asks until it has an answer, and keeps its answers for the checker."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from typing import Any
from uuid import UUID, uuid4

import attrs
import httpx2
import trio
from histories import Call, Node

from chaos import foreign_service
from chaos.away import Act, T, insist
from chaos.tasks import FIRST_DAY, LIMITED, QUEUE

KEYS = 12
COUNTERS = 5
LAYERS, WIDTH = 10, 20
"""Layers of a graph, and jobs of a layer: 200 jobs in all."""
SPAN_DAYS = 5
MOST_OPEN = 400
MANY = 100_000
"""Attempts of a job that no fault should use up; other jobs have ten."""
FEW_S = (0.0, 0.02, 0.1, 0.4)

INSERT = """
INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, idempotency_key, lease_ttl_sec, max_attempts)
VALUES ($1, $2, 'work', $3, $4, $5, 5, 100000) ON CONFLICT DO NOTHING
"""


@attrs.define(kw_only=True)
class Clients:
    """All clients. They send requests to random `urls`. `dice` are seeded; the services' behavior is not."""

    dsn: str
    urls: Callable[[], list[str]]
    dice: random.Random
    over: trio.Event = attrs.field(factory=trio.Event)
    open_jobs: int = 0
    """Number of open jobs at the last count."""
    added: list[tuple[str | None, str]] = attrs.field(factory=list)
    canceled: list[tuple[str, float]] = attrs.field(factory=list)
    graph: dict[str, Node] = attrs.field(factory=dict)
    graphs: int = 0
    calls: list[Call] = attrs.field(factory=list)
    spans: list[tuple[str, str, int]] = attrs.field(factory=list)
    """Loads: name, job, and the number of the first day."""
    refused: int = 0
    _http: httpx2.AsyncClient = attrs.field(init=False)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count)
    _may_cancel: list[str] = attrs.field(factory=list)

    async def run(self) -> None:
        """Send requests until `over` is set, and then until all of them have an answer."""
        # One client for all: each creates a TLS context, which takes long.
        async with httpx2.AsyncClient(timeout=15, verify=False) as self._http, trio.open_nursery() as nursery:
            for ask, pause_s in (
                (self.add_some, 1.0),
                (self.add_some, 1.0),
                (self.add_some, 1.0),
                (self.add_by_sql, 0.7),
                (self.add_as_foreigner, 0.7),
                (self.cancel_one, 2.0),
                (self.add_graph, 20.0),
                (self.add_load, 8.0),
            ):
                nursery.start_soon(self._go_on, ask, pause_s)
            for counter in range(COUNTERS):
                nursery.start_soon(self._call, f"c{counter}")

    async def _go_on(self, ask: Callable[[], Any], pause_s: float) -> None:
        while not self.over.is_set():
            if self.open_jobs < MOST_OPEN:
                await ask()
            with trio.move_on_after(self.dice.uniform(0, 2 * pause_s)):
                await self.over.wait()

    async def _ask(self, method: str, path: str, **more: Any) -> httpx2.Response:
        """Ask one service after the other until one gives an answer other than "unavailable now"."""
        while True:
            if urls := self.urls():
                with contextlib.suppress(httpx2.TransportError):
                    answer = await self._http.request(method, f"{self.dice.choice(urls)}{path}", **more)
                    if answer.status_code not in {429, 503}:
                        return answer
                self._refuse()
            await trio.sleep(0.3)

    async def _insist(self, act: Act[T]) -> T:
        return await insist(self.dsn, act, self._refuse)

    def _refuse(self) -> None:
        self.refused += 1

    def a_job(self) -> dict[str, Any]:
        """Return a job of any kind."""
        dice, number = self.dice, next(self._numbers)
        task = dice.choices(("work", "thread", "book", "polite", "few"), (8, 2, 3, 5, 4))[0]
        job: dict[str, Any] = {
            "queue": LIMITED if task in {"polite", "few"} else QUEUE,
            "task": task,
            "lock_key": f"key {dice.randrange(KEYS)}" if dice.random() < 0.4 else None,
            "lease_ttl_sec": 5,
            "max_attempts": MANY if dice.random() < 0.8 else 10,
            "priority": dice.randrange(5),
            "args": {"s": self.seconds()},
            "idempotency_key": f"request {number}",
        }
        if task == "work":
            if dice.random() < 0.15:
                job |= {"max_attempts": 3}
                job["args"]["fails"] = dice.choice((1, 2, 3, 9))
            elif dice.random() < 0.15:
                job["args"]["how"] = dice.choice(("snooze", "give up"))
        return job

    def seconds(self) -> float:
        """Return how long a handler takes; sometimes longer than its lease."""
        return self.dice.choices((self.dice.choice(FEW_S), 3, 8), (30, 2, 1))[0]

    async def add_some(self) -> None:
        """Add a job, or a batch."""
        jobs = [self.a_job() for _ in range(self.dice.choice((1, 1, 5, 20)))]
        answer = await self._ask("POST", "/api/v1/jobs/trigger/batch", json={"jobs": jobs})
        assert answer.is_success, answer.text
        ids = [job["job_id"] for job in answer.json()["jobs"]]
        self.added.extend(zip([job["idempotency_key"] for job in jobs], ids, strict=True))
        self._may_cancel = [*self._may_cancel, *ids][-60:]

    async def add_by_sql(self) -> None:
        """Add a job by `dl_enqueue`."""
        key, lock_key = f"request {next(self._numbers)}", f"key {self.dice.randrange(KEYS)}"
        args = json.dumps({"s": self.seconds()})
        enqueue = (
            "SELECT dl_enqueue('work', $1, queue => $2, lock_key => $3, idempotency_key => $4, lease_ttl_sec => 5,"
            f" max_attempts => {MANY})"
        )
        job = await self._insist(lambda raw: raw.fetchval(enqueue, args, QUEUE, lock_key, key))
        self.added.append((key, str(job)))

    async def add_as_foreigner(self) -> None:
        """Add a job by the queue document's own statement; most go to the foreign service's queue."""
        job, key = uuid4(), f"request {next(self._numbers)}"
        queue = self.dice.choice((QUEUE, foreign_service.QUEUE, foreign_service.QUEUE))
        lock_key, args = f"key {self.dice.randrange(KEYS)}", json.dumps({"s": self.dice.choice(FEW_S)})
        await self._insist(lambda raw: raw.execute(INSERT, job, queue, args, lock_key, key))
        self.added.append((key, str(job)))

    async def cancel_one(self) -> None:
        """Cancel a job that was added recently."""
        if not self._may_cancel:
            return
        job = self.dice.choice(self._may_cancel)
        answer = await self._ask("POST", f"/api/v1/jobs/{job}/cancel")
        assert answer.is_success, answer.text
        if answer.json()["status"] == "canceled":
            self.canceled.append((job, time.monotonic()))

    async def add_graph(self) -> None:
        """Add 200 jobs in layers, each after one to three jobs of the previous layer."""
        dice, jobs, before = self.dice, [], []
        for layer in range(LAYERS):
            ids = [str(UUID(int=dice.getrandbits(128), version=4)) for _ in range(WIDTH)]
            for job in ids:
                node = Node(
                    after=tuple(dice.sample(before, dice.randint(1, 3))) if layer else (),
                    runs_anyway=dice.random() < 0.3,
                )
                self.graph[job] = node
                args = {"s": dice.choice(FEW_S)} | ({"how": "give up"} if dice.random() < 0.01 else {})
                jobs.append(
                    {"queue": QUEUE, "task": "node", "lock_key": None, "job_id": job, "after": list(node.after)}
                    | {"when_failed": "run" if node.runs_anyway else "cancel", "args": args}
                    | {"lease_ttl_sec": 5, "max_attempts": MANY}
                )
            before = ids
        answer = await self._ask("POST", "/api/v1/jobs/trigger/batch", json={"jobs": jobs})
        assert answer.is_success, answer.text
        self.added.extend((None, job["job_id"]) for job in answer.json()["jobs"])
        self.graphs += 1

    async def add_load(self) -> None:
        """Add a load that copies days that no other job loads."""
        number, name = next(self._numbers), self.dice.choice(("keyed", "keyless"))
        first = len(self.spans) * SPAN_DAYS
        days = [FIRST_DAY + timedelta(days=first + more) for more in (0, SPAN_DAYS)]
        job = {"task": name, "lock_key": None, "idempotency_key": f"request {number}", "max_attempts": MANY}
        args = {"from": f"{days[0]:%Y-%m-%d}", "to": f"{days[1]:%Y-%m-%d}"}
        answer = await self._ask("POST", "/api/v1/jobs/trigger", json=job | {"args": args, "lease_ttl_sec": 5})
        assert answer.is_success, answer.text
        self.added.append((job["idempotency_key"], answer.json()["job_id"]))
        self.spans.append((name, answer.json()["job_id"], first))

    async def _call(self, counter: str) -> None:
        """Start a counter and its mirror, then call it at random times."""
        for process in (counter, f"mirror of {counter}"):
            started = {"process_id": process, "idempotency_key": f"start {process}"}
            await self._answered("/api/v1/processes/again?wait=5", started)
        async with trio.open_nursery() as nursery:
            while not self.over.is_set():
                nursery.start_soon(self._call_once, counter)
                with trio.move_on_after(self.dice.uniform(0, 2)):
                    await self.over.wait()

    async def _call_once(self, counter: str) -> None:
        tells, by = self.dice.random() < 0.4, next(self._numbers) + 1
        body = {"method": "add_and_tell" if tells else "add", "args": by, "idempotency_key": f"call {by}"}
        place = len(self.calls)
        self.calls.append(Call(counter=counter, by=by, asked=time.monotonic(), tells=tells))
        found = await self._answered(f"/api/v1/processes/again/{counter}/call?wait=5", body)
        now = time.monotonic()
        self.calls[place] = attrs.evolve(self.calls[place], answered=now, answer=found["response"])

    async def _answered(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask until there is an answer; an error ends the run."""
        while (answer := await self._ask("POST", path, json=body)).status_code == 202:
            pass
        found = answer.json()
        assert answer.status_code == 200, (path, body, answer.text)
        assert (found["status"], found["error"]) == ("finished", None), (path, body, answer.text)
        return found


def records_of(number: int) -> tuple[int, ...]:
    """Return the numbers of a day's records in the source."""
    return tuple(range(number * 10, number * 10 + 1 + number % 4))


def day_number(day: str) -> int:
    """Return the number of a day in a load's request."""
    return (date.fromisoformat(day) - FIRST_DAY).days
