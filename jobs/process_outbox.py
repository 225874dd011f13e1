"""What durable processes tell to others: sinks of their events, and messages to other processes (P9, P10).

A sink is named in the settings. Each gets events, and changes of a process's status, at least once and in the order of
their process; a message is delivered once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import Instant, about
from dataloader.jobs.page_cursor import Next

SinkKind = Literal["event", "created", "failed", "repaired", "removed"]
SINK_KINDS: Final[tuple[SinkKind, ...]] = get_args(SinkKind)
MESSAGES: Final = "messages"
"""Stands for a sink where messages to other processes are meant; no sink has this name."""
QUEUE: Final = "deliveries"
"""The queue of the jobs that deliver."""
SLOTS: Final = 8
MAX_SINK: Final = 100
"""The longest name of a sink."""
MAX_MESSAGES: Final = 1_000
"""The most messages of one step."""
MAX_SENT: Final = 4 << 20
"""Bytes of all messages of one step, as JSON."""
MAX_TRIES: Final = 20
"""Failures in a row after which a process's deliveries are held, where the settings do not say."""
DELIVERY_S: Final = 15.0
"""What one delivery may take, in seconds, where the settings do not say."""


def sink_task(name: str) -> str:
    """The task of the jobs that deliver to a sink."""
    return f"process.sink/{name}"


@attrs.frozen(kw_only=True)
class Sink:
    """Who is told of processes.

    Args:
        name: its name, 1 to 100 characters.
        url: the address that gets each delivery as JSON; None: a handler of the program, which has the sink's name.
        secret: signs what is sent to `url`.
        types: the types of processes that it is told of; None: all.
        kinds: what it is told of.
        timeout_s: what one delivery may take, in seconds.
        max_tries: after so many failures in a row what a process tells it is held.
    """

    name: str
    url: str | None = attrs.field(default=None, repr=False)
    secret: str | None = attrs.field(default=None, repr=False)
    types: tuple[str, ...] | None = None
    kinds: tuple[SinkKind, ...] = SINK_KINDS
    timeout_s: float = DELIVERY_S
    max_tries: int = MAX_TRIES


@attrs.frozen
class Sinks:
    """The sinks of a process of the operating system, by name: a delivery finds them by this type."""

    by_name: Mapping[str, Sink]


@attrs.frozen
class ProcessOutbox:
    """Is told by who has stored something that is to be delivered; `has_sinks`: events and changes of status are."""

    sent: Callable[[], None] = lambda: None
    has_sinks: bool = False
    lease_s: int = 60
    """The lease of the jobs that deliver, in seconds."""


NOBODY: Final = ProcessOutbox()
"""Where nobody delivers by itself."""


@attrs.frozen(kw_only=True)
class Delivery:
    """What a sink is told."""

    sink: str
    """The sink's name."""
    key: str
    """The same in each try: what was had with it was had."""
    kind: SinkKind
    """`event`, or what became of the process."""
    type: str
    """The type of the process."""
    process_id: str
    """Its id."""
    task_id: int | None
    """The task whose step it came of; None: an operator's act."""
    event_id: int | None
    """Of an event: its number."""
    at: Instant
    """When it was stored."""
    payload: Any
    """Of an event: what its author wrote."""
    reason: str | None
    """Of `failed`: why."""


SinkHandler: TypeAlias = Callable[[Delivery], Awaitable[object]]


@attrs.frozen(kw_only=True)
class SinkRecord:
    """How the deliveries to a sink stand."""

    sink: Annotated[str, about("Its name; `messages`: those to other processes.")]
    types: Annotated[tuple[str, ...] | None, about("The types that it is told of; null: all.")]
    kinds: Annotated[tuple[str, ...], about("What it is told of.")]
    waiting: Annotated[int, about("Deliveries that wait; beyond 10,000 an estimate.")]
    oldest_at: Annotated[Instant | None, about("Since when the oldest one waits.")]
    held_up: Annotated[int, about("Processes whose deliveries have failed, and are tried again or held; up to 10,000.")]
    held: Annotated[int, about("Those of them that wait for an operator.")]


@attrs.frozen(kw_only=True)
class HeldDelivery:
    """A process whose deliveries to a sink are held up, since the first one has failed."""

    sink: Annotated[str, about("The sink; `messages`: those to other processes.")]
    type: Annotated[str, about("The type of the process.")]
    process_id: Annotated[str, about("The process.")]
    kind: Annotated[str | None, about("What the first one tells: event, created, …; start or call for a message.")]
    event_id: Annotated[int | None, about("Of an event: its number.")]
    tries: Annotated[int, about("How often in a row it has failed.")]
    since: Annotated[Instant, about("Since when.")]
    next_at: Annotated[Instant | None, about("When it is tried again; null: it is held until an operator releases it.")]
    error: Annotated[str, about("Why it failed.")]


@attrs.frozen
class HeldDeliveryPage:
    """A page of processes whose deliveries are held up."""

    deliveries: Annotated[list[HeldDelivery], about("One for each process and sink.")]
    next: Next


@attrs.frozen
class Released:
    """How many processes' deliveries are tried again now."""

    released: Annotated[int, about("Processes, each counted once for each sink.")]


@attrs.frozen(kw_only=True)
class HeldFilter:
    """Which held-up deliveries are meant: all that fit what is given. `held`: only those that wait for an operator."""

    sink: str | None = None
    type: str | None = None
    process_id: str | None = None
    held: bool = False


EVERY_DELIVERY: Final = HeldFilter()
"""All that are held up."""


def check_held(wanted: HeldFilter) -> None:
    """Raise `BadRequest` for a filter that would mean every delivery."""
    if wanted == EVERY_DELIVERY:
        raise BadRequest("which", "must have a criterion, such as sink: an empty filter means every delivery")
