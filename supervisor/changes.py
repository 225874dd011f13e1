"""Changes to a running supervisor: adding tasks, and adding and removing queue entries.

Each change is validated completely before it is applied. The call returns when the change is in effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio

from dataloader.actors.children.pool import places_of
from dataloader.actors.dispatcher import Dispatcher
from dataloader.jobs.errors import BadRequest, ConfigError, Draining, StoreError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.tasks import Tasks
from dataloader.store.queue.worker_rows import aio_show
from dataloader.supervisor.declare import declare
from dataloader.supervisor.drain import BOUND_S
from dataloader.supervisor.entries import check_capacity, check_tasks
from dataloader.supervisor.parts import Parts
from dataloader.supervisor.setting_lists import Worker
from dataloader.supervisor.settings import Settings

log = get_logger(__name__)


@attrs.define
class _Removal:
    """Removal of a queue. `done` is set when its runs have ended, or when the jobs that do not stop are in `stuck`."""

    done: trio.Event = attrs.field(factory=trio.Event)
    stuck: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class Changes:
    """Applies the changes to one process, one after the other."""

    parts: Parts
    _turn: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    _removals: dict[str, _Removal] = attrs.field(factory=dict, init=False)

    async def add_tasks(self, added: Tasks) -> None:
        """Add tasks, as `Supervisor.add_tasks` describes."""
        parts = self.parts
        async with self._turn:
            self._check_running()
            whole = parts.tasks.beside(())
            whole.include(added)
            places_of(whole)
            parts.clusters.check(whole)
            new = Tasks()
            new.include(added)
            closing = trio.Event()
            opened = await parts.hold_resources(new, closing)
            try:
                await declare(parts.database, whole, parts.worker.name, stores_schedules=parts.stores_schedules)
                self._check_running()
            except BaseException:
                closing.set()
                raise
            parts.services.resources.update(opened.resources)
            parts.services.aio = opened.aio
            parts.tasks.include(added)
            parts.services.around = parts.tasks.wraps
            parts.children.learn()
            parts.clusters.learn()
            parts.retry_delays.wake.set()
            parts.period_ends.wake.set()
            for source in added.message_sources:
                reader = parts.reader(source)
                parts.readers.append(reader)
                parts.start_helper(f"messages of {reader.state.source}", reader.run)
            await self._show()
            for dispatcher in parts.dispatchers:
                if not dispatcher.by_lanes:
                    await dispatcher.learn()

    async def add_queue(self, entry: Worker) -> None:
        """Add an entry, as `Supervisor.add_queue` describes."""
        parts = self.parts
        async with self._turn:
            self._check_running()
            if entry.queue in self._removals:
                raise BadRequest(
                    "queue", f"must differ until {entry.queue!r} is removed, because jobs of it are still running"
                )
            now = [
                Worker(one.queue, one.slots.count, tuple(one.tasks) if one.by_lanes else None)
                for one in parts.dispatchers
            ]
            # The same checks as at the start.
            with _told_of_arguments(len(now)):
                [*_, entry] = Settings(workers=(*now, entry)).workers
                check_tasks((*now, entry), parts.tasks)
            check_capacity(parts.locks, sum(one.concurrency for one in now) + entry.concurrency)
            dispatcher = parts.entries.add(entry)
            with trio.CancelScope(shield=True):  # returns immediately
                await parts.start_claims(dispatcher)
            try:
                await parts.listener.listen_to_queues()
            except StoreError as error:
                log.debug("the listener will listen to the new queue when it is connected again", error=str(error))
            await self._show()

    async def remove_queue(self, queue: str) -> tuple[str, ...]:
        """Remove a queue, as `Supervisor.remove_queue` describes."""
        parts = self.parts
        self._check_running()
        removal = self._removals.get(queue)
        if removal is None:
            if not parts.entries.of(queue):
                served = ", ".join(parts.entries.slots) or "none"
                raise BadRequest("queue", f"must be one that this process serves ({served}), not {queue!r}")
            removal = self._removals[queue] = _Removal()
            parts.start_removal(self._remove, queue, removal)
        await removal.done.wait()
        return removal.stuck

    def _check_running(self) -> None:
        if self.parts.drain.requested.is_set():
            raise Draining("the supervisor is draining and accepts no changes")

    async def _show(self) -> None:
        """Show other processes which queues and tasks this process serves.

        If this fails, the next heartbeat does it.
        """
        try:
            await self.parts.database.write(aio_show, self.parts.worker)
        except StoreError as error:
            log.debug("the workers list is outdated until the next heartbeat", error=str(error))

    async def _remove(self, queue: str, removal: _Removal) -> None:
        """Stop the claims of a queue, let its runs finish within the drain's timeout, and release the rest.

        Jobs that do not stop are reported and waited for, as in a drain. A drain of the whole process has the same
        effect.
        """
        parts = self.parts
        leaving = parts.entries.of(queue)
        log.info("removing a queue: its jobs are no longer claimed", queue=queue, for_at_most_s=parts.drain.timeout_s)
        for dispatcher in leaving:
            dispatcher.intake.cancel(reason="removed")
        parts.entries.hide(queue)
        await self._show()
        with trio.move_on_after(parts.drain.timeout_s):
            await self._until_done(leaving)
        self._stop(queue)
        with trio.move_on_after(BOUND_S):
            for dispatcher in leaving:
                await dispatcher.closed.wait()
            self._stop(queue)
            await self._until_done(leaving)
        removal.stuck = tuple(str(run.job.job_id) for run in parts.runs if run.job.queue == queue)
        if removal.stuck:
            log.error("jobs of a removed queue do not end", queue=queue, jobs=removal.stuck)
            removal.done.set()
            await self._until_done(leaving)
        parts.entries.remove(leaving)
        del self._removals[queue]
        removal.done.set()

    def _stop(self, queue: str) -> None:
        for run in self.parts.runs:
            if run.job.queue == queue and not run.body_ended:
                run.stop(StopReason.DRAIN)

    async def _until_done(self, leaving: list[Dispatcher]) -> None:
        """Return when these dispatchers have no claim in progress and all their runs are recorded."""
        for dispatcher in leaving:
            await dispatcher.ended.wait()


@contextmanager
def _told_of_arguments(index: int) -> Iterator[None]:
    """Report errors of the last entry by argument name: the caller has not written its index."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(re.sub(rf"^WORKERS_JSON: \[{index}\]\.(\w+) ", r"\1: ", str(error))) from None
