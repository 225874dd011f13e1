"""Connection to one Dask scheduler: kept open, reopened when it is lost, used with deadlines.

It lives on an asyncio loop within Trio. It relies on these parts of distributed: `Client`,
`Client.scheduler.broadcast`, which asks a worker through the scheduler, `Client.nthreads`, `subscribe_topic`, and the
states of its futures.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import msgspec
import trio

from dataloader.actors.cluster.talk import Announced, Answered
from dataloader.actors.job_runs import BeginsTooLate
from dataloader.jobs.growing_pauses import Pauses, jittered
from dataloader.jobs.logger import get_logger
from dataloader.store.connection.loop import Loop

T = TypeVar("T")

log = get_logger(__name__)

ON_WORKER: Final = "dataloader.actors.cluster.on_worker"
"""Module that Dask's workers import; it imports distributed."""
RUN: Final = f"__import__({ON_WORKER!r}, fromlist=['run_body']).run_body(order)"
"""Expression that a worker evaluates: if our code is missing there, the task fails with that error."""
CONNECT_S: Final = 10.0
LOOK_S: Final = 2.0
"""Interval in seconds at which the cluster's threads are counted."""
ANSWER_S: Final = 30.0
"""Maximum time of an answer in seconds, in addition to the time for which the worker may wait."""
CLOSE_S: Final = 2.0
PLACE_S: Final = 10.0
"""Seconds for which a claimed job waits for a thread of the cluster before it is released."""

AGAIN_S: Final = 5.0
"""Seconds after which a released job is tried again."""


class ContactLost(Exception):  # noqa: N818 - a state of the world
    """Error: the scheduler, or the worker behind it, did not answer."""


class NoPlace(BeginsTooLate):
    """Error: the cluster has no thread for a body, so its job is released."""

    def __init__(self, why: str) -> None:
        super().__init__(f"job released: {why}", for_s=jittered(AGAIN_S))
        self.why = why


@attrs.frozen(kw_only=True)
class Tls:
    """Files of a connection with TLS."""

    ca: str
    cert: str | None = None
    key: str | None = None

    @classmethod
    def of(cls, ca: Path | None, cert: Path | None, key: Path | None) -> Tls | None:
        """Return the files for the paths of the settings; None without a CA."""
        if ca is None:
            return None
        return cls(ca=str(ca), cert=None if cert is None else str(cert), key=None if key is None else str(key))


@attrs.define(eq=False, kw_only=True)
class DaskCluster:
    """One cluster, by its scheduler's address. `threads` is 0 while it is away; `running` counts our bodies there.

    `listeners` has the callbacks for workers' announcements, by the run's key. `show` is called when the numbers have
    changed.
    """

    address: str
    tls: Tls | None
    topic: str
    show: Callable[[], None]
    threads: int = 0
    running: int = 0
    listeners: dict[str, Callable[[Announced], None]] = attrs.field(factory=dict)
    _loop: Loop | None = None
    _client: Any = None
    _waiting: int = 0
    _changed: trio.Event = attrs.field(factory=trio.Event)

    async def keep(self, loop: Loop) -> None:
        """Stay connected whenever the cluster can be reached, until cancelled."""
        self._loop = loop
        pauses = Pauses(0.2, 5.0)
        is_told = False
        while True:
            client: Any = None
            try:
                with trio.fail_after(CONNECT_S + 1):
                    client = await _cross(loop, _aio_connect, self.address, self.tls, self.topic, self._announce)
                log.info("connected to the Dask cluster", scheduler=self.address)
                pauses.reset()
                is_told = False
                await self._watch(loop, client)
                reason = "its connection was lost"
            except trio.TooSlowError:
                reason = "it does not answer"
            except ContactLost as lost:
                reason = str(lost)
            finally:
                self._client, self.threads = None, 0
                self._change()
                if client is not None:
                    with trio.move_on_after(CLOSE_S, shield=True), suppress(ContactLost):
                        await _cross(loop, _aio_close_client, client)
            if not is_told:
                is_told = True
                log.warning("the Dask cluster is unavailable; its jobs wait", scheduler=self.address, error=reason)
            await trio.sleep(pauses.next())

    async def _watch(self, loop: Loop, client: Any) -> None:
        """Count the threads until the connection is lost."""
        while client.status == "running":
            with trio.fail_after(ANSWER_S):
                threads: dict[str, int] = await _cross(loop, _aio_threads, client)
            self._client, self.threads = client, sum(threads.values())
            self._change()
            with trio.move_on_after(LOOK_S):
                await trio.sleep_forever()

    async def connected(self) -> None:
        """Wait until the cluster is connected, for at most `CONNECT_S` seconds."""
        with trio.move_on_after(CONNECT_S):
            while self._client is None:
                await self._changed.wait()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold one of the cluster's threads for the length of a block.

        Raises `NoPlace` if the cluster is away, or if no thread becomes free within `PLACE_S` seconds.
        """
        self._waiting += 1
        try:
            with trio.move_on_after(PLACE_S):
                while self._client is not None and self.running >= self.threads:
                    await self._changed.wait()
            self.check_there()
            if self.running >= self.threads:
                raise self.no_place("has no free thread")
            self.running += 1
            self.show()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self.running -= 1
            self._change()

    def check_there(self) -> None:
        """Raise `NoPlace` if the cluster is away."""
        if self._client is None:
            raise self.no_place("is unavailable")

    def no_place(self, why: str) -> NoPlace:
        """Return the error for a job that is released with its attempt refunded."""
        return NoPlace(f"the Dask cluster at {self.address} {why}")

    async def submit(self, key: str, order: bytes) -> Submitted:
        """Submit a body to the cluster. Raises `ContactLost`."""
        if self._client is None or self._loop is None:
            raise ContactLost(f"the Dask cluster at {self.address} is unavailable")
        try:
            with trio.fail_after(CONNECT_S):
                return Submitted(self._loop, await _cross(self._loop, _aio_submit, self._client, key, order))
        except trio.TooSlowError:
            raise ContactLost(f"the Dask cluster at {self.address} does not answer") from None

    async def ask(self, worker: str, op: str, within_s: float, **given: Any) -> Answered:
        """Return a worker's answer. Raises `ContactLost` if it does not come within `within_s` seconds."""
        if self._client is None or self._loop is None:
            raise ContactLost(f"the Dask cluster at {self.address} is unavailable")
        try:
            with trio.fail_after(within_s):
                return await _cross(self._loop, _aio_ask_worker, self._client, worker, {"op": op, **given})
        except trio.TooSlowError:
            raise ContactLost(f"the Dask worker {worker} did not answer within {within_s:g} s") from None

    def _announce(self, announced: Announced) -> None:
        if (listener := self.listeners.get(announced.key)) is not None:
            listener(announced)

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
        self.show()


@attrs.define(eq=False)
class Submitted:
    """Task that was submitted to the cluster."""

    _loop: Loop
    _future: Any

    async def error(self) -> tuple[str, str]:
        """Wait until Dask has finished it; return the class and text of its error; both are empty if there was none."""
        error: BaseException | None
        try:
            error = await _cross(self._loop, _aio_error, self._future)
        except ContactLost as lost:
            error = lost
        return ("", "") if error is None else (type(error).__name__, str(error))

    async def withdraw(self) -> None:
        """Withdraw the task if it has not begun."""
        with trio.move_on_after(CLOSE_S, shield=True), suppress(ContactLost):
            await _cross(self._loop, _aio_withdraw, self._future)


async def _cross(loop: Loop, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Run an asyncio-flavored function. Raises `ContactLost` for every error of a library on the network."""
    try:
        return await loop.run(function, *args)
    except asyncio.CancelledError as error:
        raise ContactLost("its connection was closed") from error  # noqa: ASYNC104 - asyncio's cancellation ends here
    except ContactLost:
        raise
    except Exception as error:
        raise ContactLost(f"{type(error).__name__}: {error}") from error


def _distributed() -> Any:
    """Return the module of the extra, which `Clusters.run` has imported."""
    return import_module("distributed")


async def _aio_connect(address: str, tls: Tls | None, topic: str, announce: Callable[[Announced], None]) -> Any:
    distributed = _distributed()
    security = None
    if tls is not None:
        security = distributed.Security(
            tls_ca_file=tls.ca, tls_client_cert=tls.cert, tls_client_key=tls.key, require_encryption=True
        )
    client = distributed.Client(
        address, security=security, asynchronous=True, set_as_default=False, timeout=CONNECT_S, name="dataloader"
    )

    def receive(event: tuple[float, object]) -> None:
        with suppress(msgspec.ValidationError):  # messages of other programs in this topic are ignored
            announce(msgspec.convert(event[1], Announced))

    try:
        await client
        for of_dask in ("print", "warn"):  # output and warnings of all tasks of the cluster; the warnings are pickled
            client.unsubscribe_topic(of_dask)
        client.subscribe_topic(topic, receive)
    except BaseException:
        await client.close(timeout=CLOSE_S)  # noqa: ASYNC102 - asyncio's
        raise
    return client


async def _aio_close_client(client: Any) -> None:
    await client.close(timeout=CLOSE_S)


async def _aio_threads(client: Any) -> dict[str, int]:
    return await client.nthreads()  # type: ignore[no-any-return]


async def _aio_submit(client: Any, key: str, order: bytes) -> Any:
    # `eval` is Python's own name: a scheduler or worker that cannot import what it receives ends its connection.
    return client.submit(eval, RUN, {"order": order}, key=key, pure=False, retries=0)


async def _aio_ask_worker(client: Any, worker: str, message: dict[str, Any]) -> Answered:
    answers = await client.scheduler.broadcast(msg=message, workers=[worker], on_error="return_pickle")
    try:
        return msgspec.convert(answers.get(worker), Answered)
    except msgspec.ValidationError as error:
        raise ContactLost(f"invalid answer: {error}") from None


async def _aio_error(future: Any) -> BaseException | None:
    distributed = _distributed()
    with future.client.as_current():
        waiting = distributed.wait([future])
    await waiting
    return None if future.status == "finished" else await future.exception()


async def _aio_withdraw(future: Any) -> None:
    await future.cancel()
