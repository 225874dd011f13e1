"""What the service and a body say to each other: JSON, a message a line, of at most `MAX_MESSAGE` bytes.

Nothing is pickled: what crosses is data, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal, TypedDict
from uuid import UUID

import msgspec

from dataloader.jobs import errors
from dataloader.jobs.errors import DataloaderError
from dataloader.jobs.listings import Level
from dataloader.jobs.model import WhenFailed

MAX_MESSAGE: Final = 20 * 2**20
"""Arguments may have 16 MiB."""
MAX_OPEN: Final = 1_000
"""Questions of one body that wait for their answers at a time."""

AskFor = Literal["enqueue", "after", "take", "deadline", "stopped_by"]


class Declared(msgspec.Struct):
    """The first line that a body gets. `path` is `sys.path`; `around` are places as `[module, name]`, outermost first.

    With `calls` what stands at `name` answers calls, and runs no jobs: see frames.py. The guard reads it too, as JSON.
    """

    path: list[str]
    module: str
    name: str
    around: list[tuple[str, str]]
    asyncio: bool
    memory_mb: int | None
    calls: bool = False


class RunJob(msgspec.Struct, tag="run"):
    """Run a job. `args` is as in its row; `is_stage` says whether the value must be exact JSON."""

    fields: dict[str, Any]
    args: msgspec.Raw
    max_lines: int
    is_stage: bool


class Answer(msgspec.Struct, tag="answer"):
    """The answer to an `Ask` with the same number."""

    number: int
    value: msgspec.Raw = msgspec.Raw(b"null")
    error: Failure | None = None


class Failure(msgspec.Struct):
    """An error of the service's, to be raised in the body."""

    kind: str
    text: str
    more: dict[str, Any]

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """What crosses of an error: an attribute that is no JSON stays behind."""
        more = {}
        for name, value in vars(error).items():
            try:
                more[name] = msgspec.to_builtins(value)
            except (TypeError, ValueError):
                continue
        return cls(type(error).__name__, str(error), more)

    def error(self) -> Exception:
        """The error again: of its own class if that is one of ours."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, DataloaderError)):
            return RuntimeError(f"{self.kind}: {self.text}")
        error = kind.__new__(kind)
        error.args = (self.text,)
        vars(error).update(self.more)
        return error


class Started(msgspec.Struct, tag="started"):
    """The function is imported, or can't be: `error`."""

    error: str | None = None


class Progress(msgspec.Struct, tag="progress"):
    """The newest progress."""

    progress: msgspec.Raw


class Line(msgspec.Struct, tag="line"):
    """A line of the job's log, or of one of its loads."""

    level: Level
    message: str
    fields: dict[str, Any]
    load: str | None = None


class EndLog(msgspec.Struct, tag="end_log"):
    """One of its loads has ended."""

    load: str


class Keep(msgspec.Struct, tag="keep"):
    """A result to be kept."""

    result: msgspec.Raw


class Ask(msgspec.Struct, tag="ask"):
    """Something that the service has to do; it sends an `Answer` with this number."""

    number: int
    what: AskFor
    given: msgspec.Raw = msgspec.Raw(b"null")


class Forget(msgspec.Struct, tag="forget"):
    """Nobody waits for the answer with this number any more."""

    number: int


class Ended(msgspec.Struct, tag="ended"):
    """The run is over: with a `value` of this `kind`, or with an `error`, as text.

    `stopped`: because it was told to. `is_final`: it is not worth another run. `left`: what
    the function has left behind. `is_spent`: this process should run no other job.
    """

    kind: Literal["value", "retry", "snooze", "give_up", "canceled", "next", "finish", "error", "limit", "refused"]
    value: msgspec.Raw = msgspec.Raw(b"null")
    text: str = ""
    seconds: float = 0.0
    is_final: bool = False
    stopped: bool = False
    left: Literal["processes", "threads"] | None = None
    is_spent: bool = False


FromBody = Started | Progress | Line | EndLog | Keep | Ask | Forget | Ended


class EnqueueOptions(TypedDict, total=False):
    """`JobOptions`, with types that JSON can be read as."""

    queue: str | None
    priority: int | None
    lock_key: str | None
    partition_key: str
    idempotency_key: str | None
    available_at: datetime | None
    max_attempts: int | None
    lease_ttl_sec: int | None
    producer: str | None
    consumer_group: str | None
    job_id: UUID
    after: list[UUID] | None
    when_failed: WhenFailed
    root: UUID | None
    version: datetime | float | None


class Enqueue(msgspec.Struct):
    """What is given to `enqueue`."""

    task: str
    args: dict[str, Any]
    options: EnqueueOptions


class Take(msgspec.Struct):
    """What is given to `take`."""

    supplier: str
    units: int
    max_wait_s: float


def line_of(message: msgspec.Struct | Mapping[str, Any]) -> bytes:
    """A message as a line."""
    return msgspec.json.encode(message) + b"\n"


read_from_service: Final = msgspec.json.Decoder(RunJob | Answer).decode
"""A line of the service's as a message."""
read_from_body: Final = msgspec.json.Decoder(FromBody).decode
"""A line of a body's as a message. Raises `msgspec.DecodeError`."""
