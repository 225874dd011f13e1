"""Services that all runs of this process share."""

from __future__ import annotations

from collections.abc import Mapping
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
    from dataloader.actors.children.pool import Children
    from dataloader.actors.cluster.clusters import Clusters

LogLevel = Literal["info", "warning", "error", "off"]


@attrs.define(eq=False, kw_only=True)
class RunServices:
    """Shared services of all runs.

    `resources` has the value for each key of `job.resource()`: a declaration of `@tasks.resource`, or a type that a
    library on top of the queue needs. `around` wraps every run, the first one outermost. `aio` is the loop of asyncio
    handlers, None if no task needs one; `children` run tasks with `process=True`, `clusters` those with `dask=`.
    `retry_delays`, in seconds by task, replace the delays of a task's policy. Lines of `job.log` at level `logged_from`
    or above also go to the process's log; `max_lines` of each run are kept with the job.
    """

    to_recorder: trio.MemorySendChannel[ToRecord]
    transactions: Transactions
    enqueuer: Enqueuer
    telemetry: Telemetry
    max_lines: int
    logged_from: LogLevel = "off"
    retry_delays: Mapping[str, float] = attrs.field(factory=dict)
    resources: dict[object, Any] = attrs.field(factory=dict)
    around: tuple[Around, ...] = ()
    aio: AioLoop | None = None
    children: Children | None = None
    clusters: Clusters | None = None
