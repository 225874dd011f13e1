"""What every run of this process shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import attrs
import trio

from dataloader.actors.recorder_messages import ToRecord
from dataloader.jobs.hooks import Around
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.queue.enqueuer import Enqueuer
from dataloader.store.queue.transaction import Transactions

if TYPE_CHECKING:
    from dataloader.actors.aio_loop import AioLoop

LogLevel = Literal["info", "warning", "error", "off"]


@attrs.define(eq=False, kw_only=True)
class RunServices:
    """One of them for all runs.

    `resources` are by what `job.resource()` is asked for: the declarations of `@tasks.resource`, and the types of what
    libraries on top of the queue need. `around` wraps every run, the first one outermost. `aio` is the loop of asyncio
    handlers, None where no task needs one. The jobs' own lines go to the process's log too if they are as serious as
    `logged_from`.
    """

    to_recorder: trio.MemorySendChannel[ToRecord]
    transactions: Transactions
    enqueuer: Enqueuer
    telemetry: Telemetry
    max_lines: int
    logged_from: LogLevel = "off"
    resources: dict[object, Any] = attrs.field(factory=dict)
    around: tuple[Around, ...] = ()
    aio: AioLoop | None = None
