"""Calls of jobs' functions in children; the requests of their handles go to the Trio port.

A stop sends SIGTERM and, after the grace period, SIGKILL. The run ends when no process of the child is left. The
body has a separate deadline, which the guard enforces. It moves with each confirmed renewal of the lease.
"""

from __future__ import annotations

from typing import Any, Final, cast

import attrs
import msgspec
import trio

from dataloader.actors.children import wire
from dataloader.actors.children.child import Child, ChildDied
from dataloader.actors.children.pool import HURRIED_GRACE_S, Children
from dataloader.actors.cluster.clusters import Clusters
from dataloader.actors.cluster.remote_child import RemoteChild
from dataloader.actors.handles import fields_of
from dataloader.actors.job_runs import BeginsTooLate, Run
from dataloader.actors.trio_port import TrioPort
from dataloader.jobs.errors import BodyFailed
from dataloader.jobs.handler_calls import HANDLER_CALLS, EnqueueJob
from dataloader.jobs.logger import get_logger
from dataloader.jobs.outcomes import Canceled, Finish, GiveUp, Next, Retry, Snooze, StopReason
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.stages import MoveRefused
from dataloader.jobs.task import Task
from dataloader.jobs.text import storable_text

log = get_logger(__name__)

MAX_ENQUEUES: Final = 32
"""Maximum number of jobs that one body enqueues concurrently, because their arguments may be large."""
MESSAGES_A_TURN: Final = 100
PAUSE_S: Final = 0.01
"""Pause in seconds after every `MESSAGES_A_TURN` messages, so that a body cannot take all of the service's time."""
DEAF_S: Final = 1.0
"""Seconds for which a body may continue after it has closed its socket."""


async def call_in_child(
    task: Task[Any], run: Run, children: Children | Clusters, port: TrioPort, max_lines: int
) -> object:
    """Call the function in a child and return its result.

    Raises `BodyFailed` if the function raises or the child ends, and `BeginsTooLate` if the child took too long to
    start.
    """
    async with children.lend(task, run) as child:
        if trio.current_time() > run.begin_by:
            child.idle_since = trio.current_time()
            raise BeginsTooLate(
                "job released: its child process would start it after its rate-limit reservation expires"
            )
        if isinstance(child, RemoteChild):
            port.log("info", "the function runs beside a Dask worker", {"worker": child.worker})
            if task.timeout_s is not None:  # counted from here: waiting for a slot of the cluster does not count
                run.limit_to(trio.current_time() + task.timeout_s)
        talk = _Talk(child, run, port, max_lines)
        run.movers.add(talk.renew)
        talk.renew()  # the lease may have moved while the child was started
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(talk.serve)
                try:
                    await talk.begin(task)
                    await talk.read()
                except trio.Cancelled:  # noqa: ASYNC103 - see below
                    await talk.stop(children.grace_s)  # noqa: ASYNC102 - it has a shield with a deadline
                    # If the function has ended for another reason than the stop, that end counts, as for a function in
                    # a thread.
                    if talk.ended is None or talk.ended.stopped:
                        raise
                finally:
                    talk.serving.cancel()
        finally:
            run.movers.discard(talk.renew)
            talk.drain()
        if talk.ended is not None and (left := talk.ended.left) is not None:
            log.warning("killing the processes and threads that a function has left running", task=task.name, what=left)
            port.log(
                "warning", f"{left} that the function has left running; they are killed with its child process", {}
            )
        elif talk.ended is not None and not (talk.ended.is_spent or talk.is_torn or run.is_stopped):
            child.idle_since = trio.current_time()
    if talk.ended is None:
        if child.was_killed_at_deadline:
            run.stop(run.lease.body_is_killed_for())
        raise BodyFailed(storable_text(mask_text(talk.died)))
    return _value_of(talk.ended)


@attrs.define(eq=False)
class _Talk:
    """Exchange of messages with a body about one job. `ended` is the function's end; without it, `died` says why.

    `is_torn`: sending an answer was interrupted midway, so that nothing else can be sent to this body.
    """

    child: Child | RemoteChild
    run: Run
    port: TrioPort
    max_lines: int
    ended: wire.BodyEnd | None = None
    died: str = "the child process closed its connection to the service"
    serving: trio.CancelScope = attrs.field(factory=lambda: trio.CancelScope(shield=True))
    _asks: trio.Nursery = attrs.field(init=False)
    _has_begun: bool = False
    _reading: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _open: dict[int, trio.CancelScope] = attrs.field(factory=dict)
    _places: trio.Semaphore = attrs.field(factory=lambda: trio.Semaphore(MAX_ENQUEUES))
    _turn: trio.Lock = attrs.field(factory=trio.Lock)
    is_torn: bool = False
    _printed: int = 0

    def renew(self) -> None:
        """Send the body its new deadlines after the run's lease or key was renewed."""
        self.child.renew(self.run.lease.body_is_killed())

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve requests and read output of the body until the caller cancels `serving`; nothing else cancels it."""
        with self.serving:
            async with trio.open_nursery() as self._asks:
                for output in self.child.outputs:
                    self._asks.start_soon(output.pump, self._print)
                self._asks.start_soon(self._watch)
                task_status.started()

    async def begin(self, task: Task[Any]) -> None:
        """Send the job to the body."""
        job = self.run.job
        assert job.args is not None  # noqa: S101 - `call_handler` refuses such jobs
        fields = fields_of(job)
        await self.child.send(wire.RunJob(fields, msgspec.Raw(job.args.encode()), self.max_lines, bool(task.stages)))
        self._has_begun = True

    async def read(self) -> None:
        """Read the body's messages until the function or the child has ended."""
        with self._reading:
            number = 0
            try:
                while (line := await self._next_line()) is not None:
                    self._take(wire.read_from_body(line))
                    if self.ended is not None:
                        return
                    number += 1
                    if number % MESSAGES_A_TURN == 0:
                        await trio.sleep(PAUSE_S)
            except (ChildDied, ValueError, TypeError) as error:
                self.died = f"the child process sent an invalid message: {error}"
                return
            await trio.sleep(DEAF_S)  # `_watch` learns how the body ended

    async def _next_line(self) -> bytes | None:
        """Return the body's next line, once there is room for the enqueue that it may request."""
        if self._places.value == 0:
            async with self._places:
                pass
        return await self.child.read()

    async def stop(self, grace_s: float) -> None:
        """Stop the function and wait up to `grace_s` seconds for its end; not at all after a lost lease."""
        reason = self.run.stopped_by()
        if not self._has_begun or self.ended is not None or reason is StopReason.LEASE_LOST:
            return
        self.child.tell_to_stop()
        grace_s = min(grace_s, HURRIED_GRACE_S) if reason is StopReason.DRAIN else grace_s
        self._reading = trio.CancelScope()
        with trio.move_on_after(grace_s, shield=True):
            await self.read()

    def drain(self) -> None:
        """Read the output that the body has printed by now."""
        for output in self.child.outputs:
            output.drain(self._print)

    async def _watch(self) -> None:
        self.died = await self.child.why_ended()
        self._reading.cancel()

    def _take(self, message: wire.FromBody) -> None:  # noqa: C901 - one branch for each message
        match message:
            case wire.Progress():
                self.port.progress(cast("Any", message.progress))
            case wire.BodyLine():
                self.port.log(message.level, message.message, message.fields, message.load)
            case wire.EndLog():
                self.port.end_log(message.load)
            case wire.Keep():
                self.port.keep(_value_or_none(message.result))
            case wire.BodyRequest():
                if len(self._open) >= wire.MAX_OPEN:
                    raise ChildDied("too many open calls")
                if message.call == EnqueueJob.__name__:
                    self._places.acquire_nowait()  # `_next_line` has waited for room
                scope = self._open[message.number] = trio.CancelScope()
                self._asks.start_soon(self._answer, message, scope)
            case wire.Forget():
                if (open_scope := self._open.pop(message.number, None)) is not None:
                    open_scope.cancel()
            case wire.BodyEnd():
                self.ended = message
            case wire.Started():
                raise ChildDied("a second start")

    def _print(self, stream: str, line: str) -> bool:
        """Keep a printed line; return False when no more are kept."""
        self._printed += 1
        self.port.log("info", line, {"stream": stream})
        return self._printed <= self.max_lines

    async def _answer(self, ask: wire.BodyRequest, scope: trio.CancelScope) -> None:
        answer = None
        try:
            with scope:
                answer = await self._answer_to(ask)
        finally:
            if self._open.get(ask.number) is scope:
                del self._open[ask.number]
            if ask.call == EnqueueJob.__name__:
                self._places.release()
        if answer is not None:
            async with self._turn:
                self.is_torn = True
                await self.child.send(answer)
                self.is_torn = False

    async def _answer_to(self, ask: wire.BodyRequest) -> wire.ServiceAnswer:
        try:
            call = msgspec.json.decode(ask.fields, type=HANDLER_CALLS[ask.call])
            return wire.ServiceAnswer(ask.number, msgspec.Raw(msgspec.json.encode(await self.port.ask(call))))
        except Exception as error:  # noqa: BLE001 - the body raises it
            return wire.ServiceAnswer(ask.number, error=wire.ServiceFailure.of(error))


def _value_or_none(encoded: msgspec.Raw) -> object:
    """Return JSON from the body as a value, which stays encoded; None for null."""
    return None if bytes(encoded) == b"null" else encoded


def _value_of(ended: wire.BodyEnd) -> object:  # noqa: C901, PLR0911 - one branch for each kind
    """Return the function's result. Raises `BodyFailed` for an error and `MoveRefused` for a refused value."""
    value = _value_or_none(ended.value)
    match ended.kind:
        case "value":
            return value
        case "retry":
            return Retry(ended.seconds, ended.text)
        case "snooze":
            return Snooze(ended.seconds, ended.text)
        case "give_up":
            return GiveUp(ended.text)
        case "canceled":
            return Canceled(ended.text)
        case "next":
            return Next(ended.text, value)
        case "finish":
            return Finish(value)
        case "refused":
            raise MoveRefused("the value for the next stage", ended.text)
        case "limit":
            raise BodyFailed(ended.text, for_s=ended.seconds)
        case "error":
            raise BodyFailed(storable_text(ended.text), is_final=ended.is_final)
