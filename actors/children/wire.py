"""Messages between the service and a body: JSON, one message per line, at most `MAX_MESSAGE` bytes.

Nothing is pickled, so that a message is only data, whichever side sends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from dataloader.jobs import errors
from dataloader.jobs.errors import DataloaderError
from dataloader.jobs.listings import Level

MAX_MESSAGE: Final = 20 * 2**20
"""Maximum length of a message in bytes; arguments may have 16 MiB."""
MAX_OPEN: Final = 1_000
"""Maximum number of unanswered requests of one body."""


class BodySetup(msgspec.Struct):
    """First line that a body receives. `path` is `sys.path`; `around` has `[module, name]` pairs, outermost first.

    With `calls` the object at `name` answers calls and runs no jobs: see frames.py. The guard reads this message, too.
    """

    path: list[str]
    module: str
    name: str
    around: list[tuple[str, str]]
    asyncio: bool
    memory_mb: int | None
    calls: bool = False


class RunJob(msgspec.Struct, tag="run"):
    """Request to run a job. `args` is as in its row; `is_stage` says whether the value must be exact JSON."""

    fields: dict[str, Any]
    args: msgspec.Raw
    max_lines: int
    is_stage: bool


class ServiceAnswer(msgspec.Struct, tag="answer"):
    """Answer to the `BodyRequest` with the same number."""

    number: int
    value: msgspec.Raw = msgspec.Raw(b"null")
    error: ServiceFailure | None = None


class ServiceFailure(msgspec.Struct):
    """Error of the service that is raised in the body."""

    kind: str
    text: str
    more: dict[str, Any]

    @classmethod
    def of(cls, error: Exception) -> ServiceFailure:
        """Return the message for an error, without the attributes that JSON cannot represent."""
        more = {}
        for name, value in vars(error).items():
            try:
                more[name] = msgspec.to_builtins(value)
            except (TypeError, ValueError):
                continue
        return cls(type(error).__name__, str(error), more)

    def error(self) -> Exception:
        """Return the exception: of its own class if that is one of ours, else `RuntimeError`."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, DataloaderError)):
            return RuntimeError(f"{self.kind}: {self.text}")
        error = kind.__new__(kind)
        error.args = (self.text,)
        vars(error).update(self.more)
        return error


class Started(msgspec.Struct, tag="started"):
    """End of the import: done, or failed with `error`."""

    error: str | None = None


class Progress(msgspec.Struct, tag="progress"):
    """Newest progress."""

    progress: msgspec.Raw


class BodyLine(msgspec.Struct, tag="line"):
    """Line of the job's log, or of one of its loads."""

    level: Level
    message: str
    fields: dict[str, Any]
    load: str | None = None


class EndLog(msgspec.Struct, tag="end_log"):
    """End of one of the job's loads."""

    load: str


class Keep(msgspec.Struct, tag="keep"):
    """Result to keep."""

    result: msgspec.Raw


class BodyRequest(msgspec.Struct, tag="ask"):
    """Call of the handler: its name in `HANDLER_CALLS` and its fields. The service sends a `ServiceAnswer`."""

    number: int
    call: str
    fields: msgspec.Raw


class Forget(msgspec.Struct, tag="forget"):
    """Withdrawal of the request with this number: its caller no longer waits."""

    number: int


class BodyEnd(msgspec.Struct, tag="ended"):
    """End of the run: with a `value` of this `kind`, or with an `error`, as text.

    `stopped`: because of a stop. `is_final`: another attempt would not help. `left`: what the function has left behind.
    `is_spent`: this process must not run another job.
    """

    kind: Literal["value", "retry", "snooze", "give_up", "canceled", "next", "finish", "error", "limit", "refused"]
    value: msgspec.Raw = msgspec.Raw(b"null")
    text: str = ""
    seconds: float = 0.0
    is_final: bool = False
    stopped: bool = False
    left: Literal["processes", "threads"] | None = None
    is_spent: bool = False


FromBody = Started | Progress | BodyLine | EndLog | Keep | BodyRequest | Forget | BodyEnd


def encoded_line(message: msgspec.Struct | Mapping[str, Any]) -> bytes:
    """Return a message as a line."""
    return msgspec.json.encode(message) + b"\n"


read_from_service: Final = msgspec.json.Decoder(RunJob | ServiceAnswer).decode
"""Decoder of a line from the service. Raises `msgspec.DecodeError`."""
read_from_body: Final = msgspec.json.Decoder(FromBody).decode
"""Decoder of a line from a body. Raises `msgspec.DecodeError`."""
