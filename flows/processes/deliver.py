"""Tasks that deliver the events of processes to sinks, and messages between processes.

Each sink, and the messages together, have partitions; a partition with rows has one job. A run reads the next rows,
delivers them and records the results. The rows of one process are delivered in order, those of several processes
concurrently. A failed delivery blocks only its own process: it is tried again after growing pauses, and finally held
until an operator releases it. Like the run of a step, the run ends its job itself when no delivery is due.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, cast

import attrs
import msgspec
import trio

from dataloader.flows.processes.define import Processes
from dataloader.flows.signed_post import NotReached, is_success, open_signed
from dataloader.jobs.error_groups import is_outage
from dataloader.jobs.errors import DataloaderError, StoreError, Unstorable
from dataloader.jobs.growing_pauses import Pauses
from dataloader.jobs.job import AsyncWorkerPort, Job, port_of
from dataloader.jobs.lease_margin import last_word_s
from dataloader.jobs.logger import get_logger
from dataloader.jobs.model import MAX_ATTEMPTS, ClaimedJob
from dataloader.jobs.outages import Outages
from dataloader.jobs.process_outbox import (
    MAX_TRIES,
    MESSAGES,
    QUEUE,
    Delivery,
    ProcessOutbox,
    Sink,
    SinkHandler,
    SinkKind,
    Sinks,
    sink_task,
)
from dataloader.jobs.process_requests import ProcessRequest
from dataloader.jobs.process_telemetry import ProcessTelemetry
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.task import Task
from dataloader.jobs.text import said_by, storable_text
from dataloader.store.connection.bridge import Database
from dataloader.store.processes.outbox_rows import (
    DELIVERED,
    OutboxRow,
    Partition,
    Settled,
    pass_on,
    post,
    rest,
    settle,
    take_deliveries,
)

log = get_logger(__name__)
T = TypeVar("T")

BESIDE: Final = 8
"""Maximum number of processes in a partition with a delivery in progress."""
MOST_S: Final = 5.0
"""Seconds after which a run yields to other partitions."""
LOST_S: Final = 0.2
ANSWER_S: Final = 2.0
MAX_ERROR: Final = 2_000


@attrs.frozen(kw_only=True)
class DeliveryPauses:
    """Pauses between two tries of a delivery: the first and the longest, in seconds.

    `failed_s` is for failures of the delivery, `outage_s` for outages of a database.
    """

    failed_s: tuple[float, float] = (1.0, 600.0)
    outage_s: tuple[float, float] = (0.2, 10.0)


PAUSES: Final = DeliveryPauses()


class NotDelivered(Exception):  # noqa: N818 - result of a delivery
    """Failed delivery, to be tried again. The text is the reason."""


Send: TypeAlias = Callable[[OutboxRow], Awaitable[bool]]
"""Deliver a row; return whether the caller must delete it. Raises `NotDelivered` or any error of a handler."""
Way: TypeAlias = Callable[[Job[Any]], AbstractAsyncContextManager[Send]]


def delivery_tasks(processes: Processes) -> list[Task[Any]]:
    """Return the tasks that deliver messages, and those that call the sink handlers of these processes."""
    tasks = [_delivery_task(sink_task(MESSAGES), _to_processes, "Messages from processes to other processes.")]
    for name, handler in processes.sinks.items():
        tasks.append(
            _delivery_task(sink_task(name), partial(_to_handler, handler, name), f"Deliveries to the sink {name}.")
        )
    return tasks


def webhook_tasks(sinks: Iterable[Sink]) -> list[Task[Any]]:
    """Return the tasks that deliver to the sinks with a URL."""
    return [
        _delivery_task(sink_task(sink.name), partial(_to_webhook, sink), f"Deliveries to the sink {sink.name}.")
        for sink in sinks
        if sink.url is not None
    ]


def _delivery_task(name: str, way: Way, description: str) -> Task[Any]:
    return Task(
        name=name,
        handler=partial(deliver, way),
        is_async=True,
        queue=QUEUE,
        max_attempts=MAX_ATTEMPTS,
        description=description,
    )


@asynccontextmanager
async def _to_processes(job: Job[Any]) -> AsyncIterator[Send]:
    database, outbox = job.resource(Database), job.resource(ProcessOutbox)

    async def send(row: OutboxRow) -> bool:
        number = f"{row.key}:{row.task_id}:{row.id}" if row.ident is None else row.ident.hex
        try:
            request = ProcessRequest.of_message(row.body, number)
            asked = await _insist(partial(pass_on, database, row, request, outbox.lease_s))
        except (DataloaderError, TypeError) as error:
            raise NotDelivered(f"the request cannot be sent: {error}") from error
        if asked is not None and asked.verdict not in DELIVERED:
            raise NotDelivered(_why_not(request, asked.verdict, asked.status))
        return False

    yield send


def _why_not(request: ProcessRequest, verdict: str, status: str | None) -> str:
    process = f"the process {request.type}/{request.process_id}"
    match verdict:
        case "missing":
            return f"there is no process {request.type}/{request.process_id}"
        case "status":
            return f"{process} is {status}"
        case "conflict":
            return f"another request to {process} has the key {request.key}"
    return f"{process} is {verdict}"


@asynccontextmanager
async def _to_handler(handler: SinkHandler, name: str, job: Job[Any]) -> AsyncIterator[Send]:
    sink = job.resource(Sinks).by_name.get(name) or Sink(name=name)

    async def send(row: OutboxRow) -> bool:
        with trio.move_on_after(sink.timeout_s) as limit:
            await handler(_delivery(name, row))
        if limit.cancelled_caught:
            raise NotDelivered(f"the handler did not end within {sink.timeout_s:g} s")
        return True

    yield send


@asynccontextmanager
async def _to_webhook(sink: Sink, _job: Job[Any]) -> AsyncIterator[Send]:
    assert sink.url is not None  # noqa: S101 - checked by webhook_tasks
    async with open_signed(sink.url, sink.secret or "", timeout_s=sink.timeout_s) as post_signed:

        async def send(row: OutboxRow) -> bool:
            delivery = _delivery(sink.name, row)
            try:
                status, said = await post_signed(msgspec.json.encode(delivery), {"Idempotency-Key": delivery.key})
            except NotReached as error:
                raise NotDelivered(f"the webhook {error}") from None
            if not is_success(status):
                raise NotDelivered(f"the webhook returned {status}: {said}".rstrip(": "))
            return True

        yield send


def _delivery(sink: str, row: OutboxRow) -> Delivery:
    if row.ident is not None:
        key = row.ident.hex
    else:  # written by a program of an earlier release
        key = f"{row.key}:{row.event_id}" if row.kind == "event" else f"{row.key}:{row.kind}:{row.id}"
    return Delivery(
        sink=sink,
        key=key,
        kind=cast("SinkKind", row.kind),
        type=row.type or "",
        process_id=row.process_id or "",
        task_id=row.task_id,
        event_id=row.event_id,
        at=row.at,
        payload=row.payload,
        reason=mask_text(row.body) if isinstance(row.body, str) else None,
    )


async def deliver(way: Way, job: Job[Any], *, pauses: DeliveryPauses = PAUSES) -> None:
    """Deliver the rows of a partition until none is due. This is the handler of all delivery tasks."""
    async with way(job) as send:
        await _Deliverer(job, send, pauses).run()


@attrs.define(eq=False)
class _Deliverer:
    job: Job[Any]
    send: Send
    pauses: DeliveryPauses
    partition: Partition = attrs.field(init=False)
    last_word_s: float = attrs.field(init=False)
    database: Database = attrs.field(init=False)
    outbox: ProcessOutbox = attrs.field(init=False)
    telemetry: ProcessTelemetry = attrs.field(init=False)
    port: AsyncWorkerPort = attrs.field(init=False)
    until: float = attrs.field(factory=lambda: trio.current_time() + MOST_S, init=False)

    def __attrs_post_init__(self) -> None:
        claimed = self.job.resource(ClaimedJob)
        args = self.job.args
        self.last_word_s = last_word_s(claimed.lease_s)
        self.partition = Partition(args["sink"], args["partition"], self.job.job_id, claimed.token)
        self.database = self.job.resource(Database)
        self.outbox = self.job.resource(ProcessOutbox)
        self.telemetry = self.job.resource(ProcessTelemetry)
        self.port = port_of(self.job)

    async def run(self) -> None:
        while True:
            yields = trio.current_time() >= self.until
            rows = [] if yields else await _insist(lambda: take_deliveries(self.database, self.partition))
            if rows:
                await self._deliver(rows)
                continue
            async with self.port.ending() as end:
                verdict = await _insist(
                    partial(rest, self.database, self.partition, yields=yields, lease_s=self.outbox.lease_s)
                )
                end.written = verdict == "rest"
                if end.written:  # after this run has ended its job, new rows need another job
                    await _insist(lambda: post(self.database, self.outbox.lease_s))
            if verdict != "more":
                return

    async def _deliver(self, rows: Sequence[OutboxRow]) -> None:
        """Deliver the rows of each process in order, and always record the results."""
        settled, by_process = Settled(), defaultdict[int, list[OutboxRow]](list)
        for row in rows:
            if row.type is None:
                settled.done[row.id] = row.ident  # its process was deleted with its events
            elif row.held_up and not row.again:
                settled.behind.add(row.key)
            else:
                by_process[row.key].append(row)
        limiter = trio.CapacityLimiter(BESIDE)
        try:
            async with trio.open_nursery() as nursery:
                for one in by_process.values():
                    nursery.start_soon(self._deliver_some, one, settled, limiter)
        except BaseException:  # what was delivered until now is not delivered again, unless this write fails
            if settled.done or settled.mended or settled.failed:
                with trio.move_on_after(self.last_word_s, shield=True), suppress(StoreError):
                    await self._settle(settled)
            raise
        await _insist(partial(self._settle, settled))

    async def _settle(self, settled: Settled) -> None:
        settled.behind -= settled.mended | settled.failed.keys()
        sink = self.job.resource(Sinks).by_name.get(self.partition.sink)
        tries = MAX_TRIES if sink is None else sink.max_tries
        base_s, cap_s = self.pauses.failed_s
        await settle(self.database, self.partition, settled, tries=tries, base_s=base_s, cap_s=cap_s)

    async def _deliver_some(self, rows: Sequence[OutboxRow], settled: Settled, limiter: trio.CapacityLimiter) -> None:
        async with limiter:
            for row in rows:
                since = trio.current_time()
                try:
                    is_left = await self._sent(row)
                except Exception as error:  # noqa: BLE001 - any error of a handler; it is stored and shown
                    reason = str(error) if isinstance(error, NotDelivered) else said_by(error)
                    settled.failed[row.key] = storable_text(mask_text(reason), MAX_ERROR)
                    self._noted(row, "failed", since)
                    log.warning("a delivery failed", sink=self.partition.sink, process=row.process_id, reason=reason)
                    return
                self._noted(row, "delivered", since)
                if is_left:
                    settled.done[row.id] = row.ident
                if row.again:
                    settled.mended.add(row.key)

    async def _sent(self, row: OutboxRow) -> bool:
        """Send a row. After an outage of a database, which is not the handler's error, send it again.

        If the outage repeats while the queue's database responds, it is a failure of the delivery.
        """
        outages = Outages(partial(self.database.serves, ANSWER_S), Pauses(*self.pauses.outage_s))
        while True:
            try:
                return await self.send(row)
            except Exception as error:
                if not is_outage(error) or not await outages.may_repeat(error):  # noqa: ASYNC120 - on cancellation, Cancelled replaces the error
                    raise
                log.warning("a delivery waits for the database", sink=self.partition.sink, error=str(error))
            while True:
                await trio.sleep(outages.pauses.next())
                if await outages.serves():
                    break

    def _noted(self, row: OutboxRow, outcome: str, since: float) -> None:
        took_s = trio.current_time() - since
        self.telemetry.delivered(self.partition.sink, row.type or "", row.kind, outcome, took_s)


async def _insist(send: Callable[[], Awaitable[T]]) -> T:
    """Call `send` until the database is available. Its writes are idempotent."""
    while True:
        try:
            return await send()
        except Unstorable:
            raise
        except StoreError as error:
            log.warning("a delivery waits for the database", error=str(error))
            await trio.sleep(LOST_S)
