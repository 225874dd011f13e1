"""Calls of functions in processes of their own, for libraries on top of the queue: `job.resource(Calls)`.

What is called is a class that stands in a module. For each user of a process one object of it is made there; a call of
that object takes a head and a body, both bytes, and yields answers of the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

import attrs

from dataloader.jobs.module_names import Place

Print = Callable[[str, str], bool]
"""Takes the stream and the line that was printed; False when no more are wanted."""

Answers = Callable[[bytes, bytes], Iterable[tuple[bytes, Sequence[bytes]]]]
"""What is called: takes a head and a body, and yields answers; their bodies are in pieces."""


class Process(Protocol):
    """A process that answers calls, one after the other. All raise `BodyFailed` if it has ended, or the function."""

    async def call(self, head: bytes, body: bytes = b"") -> None:
        """Begin a call, when all answers to the one before are read."""

    async def answer(self) -> tuple[bytes, bytes]:
        """The next answer to the call."""


class Calls(Protocol):
    """Processes for one run of a job, on this machine. None outlives the run's lease, nor the block."""

    def open(self, place: Place, put: Print) -> AbstractAsyncContextManager[Process]:
        """A process that has imported the class at `place`, for the length of a block; `put` gets what it prints.

        It is killed, with all that it has started, if the block is left by an error or a cancellation.

        Raises `BodyFailed` if it can't be started.
        """


@attrs.frozen
class CallsOn:
    """`job.resource(CallsOn(address))` gives `Calls` whose processes are beside the workers of a Dask cluster.

    With True the address is DL_DASK.
    """

    dask: str | Literal[True]
