"""Outgoing deliveries of durable processes: events for sinks, and messages to other processes.

A sink is named in the settings. Each sink receives events, and changes of a process's status, at least once and in the
order of their process. A message is delivered once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import DEFAULT_LEASE_S, Instant, about
from dataloader.jobs.page_cursor import Next
from dataloader.jobs.secrets.record_masks import FIXED_WORD, SENSITIVE

SinkKind = Literal["event", "created", "failed", "repaired", "removed"]
SINK_KINDS: Final[tuple[SinkKind, ...]] = get_args(SinkKind)
MESSAGES: Final = "messages"
"""Name for messages to other processes in place of a sink; no sink has this name."""
QUEUE: Final = "deliveries"
"""Queue of the jobs that deliver."""
SLOTS: Final = 8
MAX_SINK: Final = 100
"""Maximum length of a sink's name."""
MAX_MESSAGES: Final = 1_000
"""Maximum number of messages of one step."""
MAX_SENT: Final = 4 << 20
"""Maximum size of all messages of one step, in bytes of JSON."""
MAX_TRIES: Final = 20
"""Default number of consecutive failures after which a process's deliveries are held."""
DELIVERY_S: Final = 15.0
"""Default timeout of one delivery, in seconds."""


def sink_task(name: str) -> str:
    """Return the task of the jobs that deliver to a sink."""
    return f"process.sink/{name}"


@attrs.frozen(kw_only=True)
class Sink:
    """Receiver of process events.

    Args:
        name: its name, 1 to 100 characters.
        url: the address that gets each delivery as JSON; None: a handler of the program with the sink's name.
        secret: signs deliveries to `url`.
        types: the types of processes whose events it receives; None: all.
        kinds: the kinds of events that it receives.
        timeout_s: timeout of one delivery, in seconds.
        max_tries: number of consecutive failures after which a process's deliveries are held.
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
    """Sinks of an operating-system process, by name; deliveries find them by this type."""

    by_name: Mapping[str, Sink]


@attrs.frozen
class ProcessOutbox:
    """Callback for stored deliveries. `has_sinks` says whether events and changes of status are delivered."""

    sent: Callable[[], None] = lambda: None
    has_sinks: bool = False
    lease_s: int = DEFAULT_LEASE_S
    """Lease of the jobs that deliver, in seconds."""


NOBODY: Final = ProcessOutbox()
"""Outbox without automatic delivery."""


@attrs.frozen(kw_only=True)
class Delivery:
    """Delivery to a sink."""

    sink: str
    """Name of the sink."""
    key: str
    """Key of the delivery, the same in each try: a receiver that has seen it has the delivery already."""
    kind: SinkKind
    """`event`, or the change of the process's status."""
    type: str
    """Type of the process."""
    process_id: str
    """ID of the process."""
    task_id: int | None
    """Task whose step caused it; None for an operator's action."""
    event_id: int | None
    """Number of the event, for kind `event`."""
    at: Instant
    """Time at which it was stored."""
    payload: Any
    """Payload of the event, for kind `event`."""
    reason: str | None
    """Reason, for kind `failed`."""


SinkHandler: TypeAlias = Callable[[Delivery], Awaitable[object]]


@attrs.frozen(kw_only=True)
class SinkRecord:
    """State of the deliveries to a sink."""

    sink: Annotated[str, about("Name of the sink; `messages`: messages to other processes."), SENSITIVE]
    types: Annotated[tuple[str, ...] | None, about("Process types that it receives; null: all."), SENSITIVE]
    kinds: Annotated[tuple[str, ...], about("Kinds of deliveries that it receives."), FIXED_WORD]
    waiting: Annotated[int, about("Waiting deliveries; over 10,000 an estimate.")]
    oldest_at: Annotated[Instant | None, about("Time since which the oldest has waited.")]
    held_up: Annotated[
        int, about("Processes whose deliveries have failed and are retried or held, counted up to 10,000.")
    ]
    held: Annotated[int, about("Processes whose deliveries are held for an operator.")]


@attrs.frozen
class SinkList:
    """All sinks."""

    sinks: Annotated[list[SinkRecord], about("Sinks, by name.")]


@attrs.frozen(kw_only=True)
class HeldDelivery:
    """Process whose deliveries to a sink are held up, since the first one has failed."""

    sink: Annotated[str, about("Name of the sink; `messages`: messages to other processes."), SENSITIVE]
    type: Annotated[str, about("Type of the process."), SENSITIVE]
    process_id: Annotated[str, about("ID of the process."), SENSITIVE]
    kind: Annotated[
        str | None,
        about("Kind of the first delivery: event, created, …; start or call for a message."),
        FIXED_WORD,
    ]
    event_id: Annotated[int | None, about("Events: number of the event.")]
    tries: Annotated[int, about("Number of consecutive failures.")]
    since: Annotated[Instant, about("Time of the first failure.")]
    next_at: Annotated[Instant | None, about("Time of the next try; null: held until an operator releases it.")]
    error: Annotated[str, about("Error of the last try."), SENSITIVE]


@attrs.frozen
class HeldDeliveryPage:
    """Page of processes whose deliveries are held up."""

    deliveries: Annotated[list[HeldDelivery], about("Deliveries, one per process and sink.")]
    next: Next


@attrs.frozen
class Released:
    """Number of processes whose deliveries are retried now."""

    released: Annotated[int, about("Number of processes, each counted once per sink.")]


@attrs.frozen(kw_only=True)
class HeldFilter:
    """Filter of held-up deliveries by the given fields. `held`: only those that wait for an operator."""

    sink: str | None = None
    type: str | None = None
    process_id: str | None = None
    held: bool = False


EVERY_DELIVERY: Final = HeldFilter()
"""Filter that matches all held-up deliveries."""


def check_held(wanted: HeldFilter) -> None:
    """Raise `BadRequest` for a filter that would match every delivery."""
    if wanted == EVERY_DELIVERY:
        raise BadRequest("which", "must have a criterion, such as sink; an empty filter would match all deliveries")
