"""Requests of clients to durable processes: a start, a call, a repair, an import."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import attrs
import msgspec

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import MAX_KEY, about, check_instant, check_name
from dataloader.jobs.processes import (
    MAX_EVENT,
    MAX_METHOD,
    MAX_VALUE,
    Remove,
    Timer,
    check_metadata,
    check_process_id,
    check_type,
)
from dataloader.jobs.text import exact_json

MAX_STARTS: Final = 1_000
"""Maximum number of processes that one request starts."""
BATCH: Final = 1_000
"""Maximum number of processes that one transaction changes."""
MAX_IMPORTED_EVENTS: Final = 10_000
"""Maximum number of events of an imported process."""
MESSAGE_KEYS: Final = "message:"
"""Prefix of the keys of messages between processes; clients' keys never have it."""
_sorted: Final = msgspec.json.Encoder(order="sorted").encode


class NoStart:
    """Marker for a call that starts no process."""


NO_START: Final = NoStart()


@attrs.frozen(kw_only=True)
class ProcessChange:
    """Change of the processes in error that match a filter; `args` are for `repair`."""

    action: Literal["repair", "resume"]
    args: Any = None


@attrs.frozen(kw_only=True)
class ProcessRequest:
    """Request to a process. Raises `BadRequest` for invalid values.

    Args:
        type: the name of its type.
        process_id: its ID.
        kind: `init` starts a process, `call` calls a method, `repair` repairs a process that is in error.
        method: the method of a call.
        args: arguments of the step: a JSON value, or an instance of a class that is encoded as one.
        context: an additional value for the step.
        key: the idempotency key: a repeated request gets the first one's answer.
        expires_at: a call that has not begun by then never runs.
        watched: a caller waits for the answer.
        metadata: metadata of a process that is started.
        version: version of its type; None: the newest that workers have declared.
        start: args of the first step, if a call may start the process.
        may_start: a call starts a missing process, with `start` as the args of its first step.
    """

    type: str
    process_id: str
    kind: Literal["init", "call", "repair"]
    method: str | None = None
    args: Any = None
    context: Any = None
    key: str | None = None
    expires_at: datetime | None = None
    watched: bool = False
    metadata: Mapping[str, Any] | None = None
    version: int | None = None
    start: Any = None
    may_start: bool = False

    def __attrs_post_init__(self) -> None:
        """Refuse invalid values."""
        check_type("type", self.type)
        check_process_id("process_id", self.process_id)
        if (self.method is None) is (self.kind == "call"):
            raise BadRequest("method", "is required for a call, and not allowed otherwise")
        if self.method is not None:
            check_name("method", self.method, MAX_METHOD)
        if self.key is not None:
            check_name("key", self.key, MAX_KEY)
        if self.expires_at is not None:
            check_instant("expires_at", self.expires_at)
            if self.kind != "call":
                raise BadRequest("expires_at", "is only allowed for calls")

    @property
    def hash(self) -> bytes:
        """Hash that distinguishes requests with the same idempotency key."""
        said = (self.process_id, self.kind, self.method, self.args, self.metadata, self.may_start, self.start)
        return hashlib.blake2b(_sorted(said), digest_size=16).digest()

    def json(self, name: Literal["args", "context", "start"]) -> str | None:
        """Return one of its values as JSON, None if it is not given. Raises `BadRequest`."""
        value = getattr(self, name)
        if name == "start" and self.may_start:
            return exact_json(name, value, MAX_VALUE)
        return None if value is None else exact_json(name, value, MAX_VALUE)

    def message(self) -> dict[str, Any]:
        """Return the request as JSON values, for the outbox. Raises `BadRequest`."""
        metadata = None if self.metadata is None else dict(self.metadata)
        self.metadata_json()
        for name in ("args", "context", "start"):
            self.json(name)
        said: dict[str, Any] = {"kind": self.kind, "type": self.type, "process_id": self.process_id}
        said |= {"method": self.method, "args": _plain(self.args), "context": _plain(self.context)}
        said |= {"metadata": metadata, "start": _plain(self.start), "may_start": self.may_start}
        return {name: value for name, value in said.items() if value is not None and value is not False}

    @classmethod
    def of_message(cls, said: Mapping[str, Any], key: str) -> ProcessRequest:
        """Return the request of a message of the outbox; `key` identifies it."""
        return cls(**said, key=f"{MESSAGE_KEYS}{key}")

    def check_key(self, field: str = "key") -> None:
        """Raise `BadRequest` for a key that is reserved for messages between processes."""
        if self.key is not None and self.key.startswith(MESSAGE_KEYS):
            raise BadRequest(
                field, f"must not begin with {MESSAGE_KEYS}, which is reserved for messages between processes"
            )

    def metadata_json(self) -> str | None:
        """Return its metadata as JSON. Raises `BadRequest`."""
        return None if self.metadata is None else check_metadata("metadata", self.metadata)


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value) if attrs.has(type(value)) else value


@attrs.frozen(kw_only=True)
class ProcessStarted:
    """Result for one of many processes to be started."""

    process_id: Annotated[str, about("ID of the process.")]
    task_id: Annotated[int | None, about("First task; null if the process already existed.")]
    did: Annotated[
        Literal["added", "again", "exists"],
        about(
            "`added`: a new process. `again`: nothing, for a repeated request. `exists`: nothing, the process exists."
        ),
    ]


@attrs.frozen
class StartedMany:
    """Result for each process, in their order."""

    processes: Annotated[list[ProcessStarted], about("Processes, in the order of the request.")]


@attrs.frozen(kw_only=True)
class ProcessImport:
    """Process to import from another system. Raises `BadRequest` for invalid values.

    Args:
        type: the name of its type.
        process_id: its ID.
        state: its state, in the form of the type.
        metadata: metadata by which it can be found.
        events: its past events, oldest first; they are numbered from 1.
        next: its timer: a `Timer`, or a `Remove` with a time; None: it waits for calls.
        version: version of its type; None: the newest that workers have declared.
    """

    type: str
    process_id: str
    state: Any = None
    metadata: Mapping[str, Any] = attrs.field(factory=dict)
    events: Sequence[Any] = ()
    next: Timer | Remove | None = None
    version: int | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse invalid values."""
        check_type("type", self.type)
        check_process_id("process_id", self.process_id)
        if len(self.events) > MAX_IMPORTED_EVENTS:
            raise BadRequest("events", f"must be at most {MAX_IMPORTED_EVENTS:,}, not {len(self.events):,}")
        if isinstance(self.next, Remove) and self.next.after_s is None and self.next.at is None:
            raise BadRequest("next", "must have either after_s or at")

    def state_json(self) -> str | None:
        """Return its state as JSON. Raises `BadRequest`."""
        return None if self.state is None else exact_json("state", self.state, MAX_VALUE)

    def events_json(self) -> str:
        """Return its events as a JSON list. Raises `BadRequest`."""
        parts = (exact_json(f"events[{number}]", event, MAX_EVENT) for number, event in enumerate(self.events))
        return f"[{','.join(parts)}]"
