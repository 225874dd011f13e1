"""Code in a Dask worker's process: the task that Dask calls, and the answers to the service's requests.

The relays live in one dedicated thread with Trio, whatever Dask's threads do. This relies on these parts of
distributed: `Worker.handlers`, by which a worker answers requests, `Worker.address` and `Worker.log_event`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Final

import attrs
import msgspec
import trio
from distributed import get_worker

from dataloader.actors.children import wire
from dataloader.actors.cluster.relay import Relay, WarmChildren
from dataloader.actors.cluster.talk import GIVE, TAKE, Announced, Order, Said, boot_s
from dataloader.jobs.program_version import program_version

PROCESS: Final = f"{os.getpid()}-{secrets.token_hex(4)}"


@attrs.define(eq=False)
class _Host:
    """Relays of this process, in a dedicated thread, and the addresses of the `workers` that use them."""

    workers: set[str] = attrs.field(factory=set)
    relays: dict[str, Relay] = attrs.field(factory=dict)
    warm: WarmChildren = attrs.field(factory=WarmChildren)
    _nursery: trio.Nursery = attrs.field(init=False)
    _token: trio.lowlevel.TrioToken = attrs.field(init=False)
    _ready: threading.Event = attrs.field(factory=threading.Event)
    _thread: threading.Thread = attrs.field(init=False)

    def start(self) -> None:
        """Start the thread. It ends with the process, and the guards then kill the bodies."""
        self._thread = threading.Thread(target=trio.run, args=(self._live,), name="dataloader", daemon=True)
        self._thread.start()
        self._ready.wait()

    def lives(self) -> bool:
        """Return whether the thread still runs; if it has failed, so have all relays."""
        return self._thread.is_alive()

    async def _live(self) -> None:
        async with trio.open_nursery() as self._nursery:
            self._token = trio.lowlevel.current_trio_token()
            self._ready.set()
            await trio.sleep_forever()

    def call(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Future[Any]:
        """Begin to run a function in the thread."""
        future: Future[Any] = Future()

        async def run() -> None:
            try:
                result = await function(*args)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        self._token.run_sync_soon(self._spawn, run)
        return future

    def _spawn(self, run: Callable[[], Awaitable[None]]) -> None:
        self._nursery.start_soon(run)

    async def run(self, order: Order, name: str, announce: Callable[..., None], release: Callable[[], None]) -> None:
        """Run a relay to its end."""
        declared = wire.BodySetup(
            path=sys.path,
            module=order.module,
            name=order.name,
            around=order.around,
            asyncio=order.asyncio,
            memory_mb=order.memory_mb,
            calls=order.calls,
        )
        relay = Relay(order=order, declared=declared, warm=self.warm, nursery=self._nursery, announce=announce)
        self.relays[name] = relay
        try:
            announce("placed")
            await relay.live(release)
        finally:
            release()
            del self.relays[name]

    async def give(self, name: str, number: int, messages: list[Said]) -> dict[str, Any]:
        """Pass messages to a relay. `number` is the number of the first message."""
        relay = self.relays.get(name)
        if relay is not None:
            relay.hear(number, messages)
        return {"at": boot_s(), "process": PROCESS, "gone": relay is None}

    async def take(self, name: str, after: int, wait_s: float) -> dict[str, Any]:
        """Return the messages of a relay after the first `after` ones; wait up to `wait_s` seconds for one."""
        relay = self.relays.get(name)
        first, said = (0, []) if relay is None else await relay.take(after, wait_s)
        return {"at": boot_s(), "process": PROCESS, "gone": relay is None, "first": first, "said": said}


_host: _Host | None = None
_starting: Final = threading.Lock()


def _our_host(worker: Any) -> _Host:
    global _host  # noqa: PLW0603 - one per process
    with _starting:
        if _host is None or not _host.lives():
            _host = _Host()
            _host.start()
        host = _host
    if worker.address in host.workers:
        return host

    async def give(relay: str, number: int, messages: list[Said]) -> dict[str, Any]:
        return await asyncio.wrap_future(host.call(host.give, relay, number, messages))

    async def take(relay: str, after: int, wait_s: float) -> dict[str, Any]:
        return await asyncio.wrap_future(host.call(host.take, relay, after, wait_s))

    worker.handlers[GIVE], worker.handlers[TAKE] = give, take
    host.workers.add(worker.address)
    return host


def run_body(given: bytes) -> None:
    """Run a body beside this worker. Dask calls this in one of its threads, which is taken while the body lives.

    Raises `RuntimeError` for an order of another version.
    """
    version = msgspec.json.decode(given)["version"]
    if version != program_version():
        raise RuntimeError(
            f"it has dataloader-supervisor {program_version()}, but the service has {version}; install the same version"
        )
    order = msgspec.json.decode(given, type=Order)
    worker = get_worker()
    name = f"{order.key}-{secrets.token_hex(4)}"

    def announce(state: str, text: str = "") -> None:
        told = Announced(order.key, name, worker.address, PROCESS, boot_s(), state, text)
        worker.log_event(order.topic, msgspec.to_builtins(told))

    host = _our_host(worker)
    over = threading.Event()
    host.call(host.run, order, name, announce, over.set)
    over.wait()
