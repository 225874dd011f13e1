"""Calls of functions in separate processes, for libraries on top of the queue: `job.resource(Calls)`.

The callee is a class at the top level of a module. Each user of a process gets one object of it there. A call of that
object takes a head and a body, both bytes, and yields answers of the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

import attrs

from dataloader.jobs.module_names import Place

Print = Callable[[str, str], bool]
"""Takes the stream and the printed line; returns False when no more lines are wanted."""

Answers = Callable[[bytes, bytes], Iterable[tuple[bytes, Sequence[bytes]]]]
"""Callee: takes a head and a body, and yields answers, whose bodies are in pieces."""


class CallProcess(Protocol):
    """Process that answers calls, one after the other.

    Methods raise `BodyFailed` if it has ended or the callee failed.
    """

    async def call(self, head: bytes, body: bytes = b"") -> None:
        """Begin a call, after all answers to the previous one have been read."""

    async def answer(self) -> tuple[bytes, bytes]:
        """Return the next answer to the call."""


class Calls(Protocol):
    """Processes for one run of a job, on this machine. None outlives the run's lease, nor its block."""

    def open(self, place: Place, put: Print) -> AbstractAsyncContextManager[CallProcess]:
        """Open a process that has imported the class at `place`, for the duration of a block. `put` gets its output.

        It is killed, with all processes that it has started, if the block is left by an error or a cancellation.

        Raises `BodyFailed` if it cannot be started.
        """


@attrs.frozen
class CallsOn:
    """`job.resource(CallsOn(address))` gives `Calls` whose processes run beside the workers of a Dask cluster.

    With True the address is that of DL_DASK.
    """

    dask: str | Literal[True]
