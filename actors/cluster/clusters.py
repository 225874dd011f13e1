"""Dask clusters that tasks and loads of this process name with `dask=`, and the bodies that run there.

The supervisor keeps the claim, lease, key, timeout, cancel and outcome, as for every job. A claimed job for which the
cluster has no free thread is released after a wait, and its attempt is refunded.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal

import attrs
import msgspec
import trio

from dataloader.actors.children.pool import MAX_CALLERS, places_of
from dataloader.actors.cluster.connection import ON_WORKER, ContactLost, DaskCluster, NoPlace, Tls
from dataloader.actors.cluster.remote_child import RemoteChild
from dataloader.actors.cluster.talk import Order
from dataloader.actors.job_runs import Run
from dataloader.actors.wake import Wake
from dataloader.jobs.dask_address import refusal_of
from dataloader.jobs.errors import BodyFailed, ConfigError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.module_names import Place
from dataloader.jobs.program_version import program_version
from dataloader.jobs.task import Task
from dataloader.jobs.tasks import Tasks
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.loop import open_loop

log = get_logger(__name__)


@attrs.define(eq=False, kw_only=True)
class Clusters:
    """All clusters by address. `default` is that of tasks with `dask=True`; `instance` names this service there.

    Workers keep an idle child for `idle_s` seconds. `grace_s` is the time from SIGTERM to SIGKILL in seconds.
    """

    tasks: Tasks
    default: str | None
    tls: Tls | None
    instance: str
    grace_s: float
    idle_s: float
    max_lines: int
    telemetry: Telemetry
    _places: Mapping[str, tuple[Place, list[Place]]] = attrs.field(init=False)
    _of_task: dict[str, DaskCluster] = attrs.field(factory=dict, init=False)
    _by_address: dict[str, DaskCluster] = attrs.field(factory=dict, init=False)
    _changed: Wake = attrs.field(factory=Wake, init=False)
    _life: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)

    def __attrs_post_init__(self) -> None:
        """Refuse tasks that no cluster can run."""
        self.learn()

    def check(self, tasks: Tasks) -> dict[str, str]:
        """Return the cluster address of each task with `dask=`. Raises `ConfigError` for one that cannot be used."""
        return {task.name: self._address_of(task.name, task.dask) for task in tasks.values() if task.dask is not None}

    def learn(self) -> None:
        """Read the present tasks. Raises `ConfigError` if no cluster can run one of them."""
        self._places = places_of(self.tasks)
        for name, address in self.check(self.tasks).items():
            if name not in self._of_task:
                self._of_task[name] = self._at(address)
        self._changed.set()

    def _at(self, address: str) -> DaskCluster:
        if address not in self._by_address:
            self._by_address[address] = DaskCluster(
                address=address,
                tls=self.tls,
                topic=f"dataloader {self.instance}",
                show=self._show,
            )
            self._changed.set()
        return self._by_address[address]

    def _address_of(self, task: str, dask: str | Literal[True]) -> str:
        where = f"task {task!r}: dask"
        if importlib.util.find_spec("distributed") is None:
            if getattr(sys, "frozen", False):
                raise ConfigError(f"{where}: the standalone binary has no Dask; use an installed dataloader")
            raise ConfigError(f"{where}: needs the extra `dask`: pip install 'dataloader-supervisor[dask]'")
        address = self.default if dask is True else dask
        if address is None:
            raise ConfigError(f"{where}=True: needs DL_DASK, the address of the scheduler")
        if (refusal := refusal_of(address)) is not None:
            raise ConfigError(f"{where}: must be {refusal}, not {address!r:.200}")
        if address.startswith("tls://") and self.tls is None:
            raise ConfigError(f"{where}={address!r}: needs DL_DASK_TLS_CA, the trusted certificates")
        return address

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep connections to all clusters until cancelled or closed."""
        task_status.started()
        with self._life:
            while not self._by_address:
                await self._changed.wait(math.inf)
            # In a thread, because the import takes half a second.
            await trio.to_thread.run_sync(importlib.import_module, ON_WORKER)
            async with open_loop() as loop, trio.open_nursery() as nursery:
                kept: set[str] = set()
                while True:
                    for address in self._by_address.keys() - kept:
                        kept.add(address)
                        nursery.start_soon(self._by_address[address].keep, loop)
                    await self._changed.wait(math.inf)
        await trio.sleep_forever()

    def close(self) -> None:
        """Close the connections: no job runs any more."""
        self._life.cancel()

    def lend(self, task: Task, run: Run) -> AbstractAsyncContextManager[RemoteChild]:
        """Lend a child on a worker for a run of `task`, with its guard armed while the lease and key are safe.

        The worker keeps the child for the next job if the block sets its `idle_since`. Raises `BodyFailed` if the child
        cannot be started, and `BeginsTooLate` if the cluster has no thread for it.
        """
        cluster = self._of_task[task.name]
        place, around = self._places[task.name]
        key = f"dl-{run.job.job_id}-{run.job.token}"
        order = Order(
            version=program_version(),
            key=key,
            topic=cluster.topic,
            module=place.module,
            name=place.name,
            around=[(one.module, one.name) for one in around],
            asyncio=task.asyncio,
            memory_mb=task.memory_mb,
            max_jobs=task.max_jobs,
            idle_s=self.idle_s,
            max_lines=self.max_lines,
        )
        return self._lend(cluster, order, run)

    @asynccontextmanager
    async def lend_to_calls(self, dask: str | Literal[True], place: Place, run: Run) -> AsyncIterator[RemoteChild]:
        """Lend a child that answers calls for a run, on any cluster, as `lend` does.

        Raises `BodyFailed` also if the cluster has no thread for it, because the run has begun.
        """
        try:
            cluster = self._at(self._address_of(run.job.task, dask))
            await cluster.connected()
            order = Order(
                version=program_version(),
                key=f"dl-{run.job.job_id}-{run.job.token}-{secrets.token_hex(4)}",
                topic=cluster.topic,
                module=place.module,
                name=place.name,
                around=[],
                asyncio=False,
                memory_mb=None,
                max_jobs=MAX_CALLERS,
                idle_s=self.idle_s,
                max_lines=self.max_lines,
                calls=True,
            )
            async with self._lend(cluster, order, run) as child:
                log.info("a job process started on a Dask worker", job=str(run.job.job_id), worker=child.worker)
                yield child
        except NoPlace as none:
            raise BodyFailed(none.why) from None
        except ConfigError as error:
            raise BodyFailed(str(error)) from None

    @asynccontextmanager
    async def _lend(self, cluster: DaskCluster, order: Order, run: Run) -> AsyncIterator[RemoteChild]:
        key = order.key
        child = RemoteChild(cluster=cluster, order=order)
        failure: Exception | None = None
        async with cluster.place():
            cluster.listeners[key] = child.hear
            try:
                try:
                    submitted = await cluster.submit(key, msgspec.json.encode(order))
                except ContactLost as lost:
                    raise cluster.no_place(f"unavailable: {lost}") from None
                async with trio.open_nursery() as nursery:
                    try:
                        await nursery.start(child.live, submitted)
                        await child.start(run.lease.body_is_killed())
                        yield child
                    except Exception as error:  # noqa: BLE001 - raised again below, outside of the nursery
                        failure = error
                    finally:
                        await child.end()  # noqa: ASYNC102 - it has its own shields, and ends
                        await submitted.withdraw()  # noqa: ASYNC102 - it has a shield with a deadline
                        child.life.cancel()
            finally:
                del cluster.listeners[key]
        if failure is not None:
            raise failure

    def _show(self) -> None:
        all_of_them = self._by_address.values()
        self.telemetry.clusters_now(sum(one.running for one in all_of_them), sum(one.threads for one in all_of_them))
