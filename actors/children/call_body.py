"""Wrapper in a process that answers calls: imports a class, then calls its objects by frames (see frames.py).

As for the body of a job, the guard enforces everything that must hold whatever the class does.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs

from dataloader.actors.children import wire
from dataloader.actors.children.frames import HEADER, FrameKind, header_of, read_header
from dataloader.actors.children.process_bounds import leaves, limit
from dataloader.actors.failure_text import error_text
from dataloader.jobs.calls import Answers
from dataloader.jobs.module_names import Place


@attrs.frozen
class _Socket:
    """Socket to the service, by its file descriptor."""

    fd: int

    def read(self) -> tuple[FrameKind, bytes, bytes]:
        """Return the next frame. Raises `EOFError` when the service has closed the socket."""
        kind, head, body = read_header(self._exactly(HEADER.size))
        return kind, self._exactly(head), self._exactly(body)

    def write(self, kind: FrameKind, head: bytes = b"", body: Sequence[bytes] = ()) -> None:
        """Send a frame."""
        self.write_all(header_of(kind, len(head), sum(map(len, body))) + head)
        for piece in body:
            self.write_all(piece)

    def write_all(self, data: bytes) -> None:
        """Send bytes."""
        left = memoryview(data)
        while left:
            left = left[os.write(self.fd, left) :]

    def _exactly(self, number: int) -> bytes:
        data = bytearray(number)
        left = memoryview(data)
        while left:
            if not (got := os.readv(self.fd, [left])):
                raise EOFError
            left = left[got:]
        return bytes(data)


def answer_calls(data: int, declared: Mapping[str, Any]) -> None:
    """Import the class that `declared` names, then answer calls until the service closes the socket."""
    service = _Socket(data)
    faulthandler.enable()
    # Ignore SIGTERM: it is meant for the service, and the guard stops this process with SIGKILL.
    signal.signal(signal.SIGTERM, lambda *_: None)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr] # they are text files
    try:
        limit(declared["memory_mb"])
        make = Place(declared["module"], declared["name"]).find()
    except BaseException as error:  # noqa: ASYNC103, BLE001 - a module may raise anything
        service.write_all(wire.encoded_line(wire.Started(error_text(error))))
        return  # noqa: ASYNC104
    service.write_all(wire.encoded_line(wire.Started()))
    with suppress(EOFError):
        while True:
            _serve(service, make())


def _serve(service: _Socket, answers: Answers) -> None:
    """Answer the calls of one user until it sends `OVER`."""
    threads = set(threading.enumerate())
    while True:
        kind, head, body = service.read()
        if kind is FrameKind.OVER:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            left = leaves(threads)
            service.write(FrameKind.OVER, b"" if left is None else left.encode())
            return
        try:
            for answer in answers(head, body):
                service.write(FrameKind.ANSWER, *answer)
        except BaseException as error:  # noqa: ASYNC103, BLE001 - every exception is the job's error
            service.write(FrameKind.FAILED, error_text(error).encode(errors="replace"))
