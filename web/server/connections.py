"""Open connections, their maximum number, and the choice of the one that is closed ("gives way") for a new one.

A process has a limited number of files. If connections took all of them, no probe could connect and the database could
not be reached. So connections may take only a share of them. When that is used up, the connection that has been idle
for longest is closed for a new one. A connection whose request is being worked on never gives way. Fewer requests than
connections are worked on at a time, so that there is always a connection that can give way.

Memory is bounded, too: when long answers hold their maximum number of bytes, the slowest reader's connection is closed
for the next answer. However many slow readers there are, and however often they reconnect, they cannot keep an answer
from a faster client. Rejected: a deadline for each answer. Slow readers would ask again after it, and it would cut off
an honest client with a slow line even if no other client needs the room.
"""

from __future__ import annotations

import enum
import math
import resource
from collections.abc import Iterator
from itertools import chain
from typing import Final, Protocol

import trio

from dataloader.web.server.limits import STANDARD, HttpLimits
from dataloader.web.server.refusals import Refusal, Refusals

FILES_FOR_CONNECTIONS: Final = 3, 4
"""Share of the process's files that connections may take."""
AT_WORK: Final = 3, 4
"""Share of the connections whose requests may be worked on at a time."""


class Phase(enum.IntEnum):
    """State of a connection. The first phases give way first."""

    IDLE = 0
    """The server waits for a request, or for the rest of its header."""
    RECEIVING = 1
    """The server waits for a request's body."""
    SENDING = 2
    """The server waits for the client to take its answer."""
    WORKING = 3
    """The request is being worked on: the connection never gives way."""


_GIVING_WAY: Final = (Phase.IDLE, Phase.RECEIVING, Phase.SENDING)


class ClientConnection(Protocol):
    """Interface of a connection that `Connections` uses."""

    def give_way(self) -> None:
        """Close the socket immediately."""


def most_connections(wanted: int, files: int | None = None) -> int:
    """Return the maximum number of connections: `wanted`, or fewer if the process may open too few files.

    `files` is the number of files that it may open; None: ask the system.
    """
    if files is None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    share, of = FILES_FOR_CONNECTIONS
    return wanted if files == resource.RLIM_INFINITY else max(1, min(wanted, files * share // of))


class Connections:
    """All connections of a server by phase; within a phase, those that have been in it for longest come first."""

    def __init__(self, most: int, refusals: Refusals, limits: HttpLimits = STANDARD) -> None:
        """Create an empty set for at most `most` connections."""
        self.most = most
        self._young_s = limits.young_connection_s
        self._refusals = refusals
        self._phases: dict[ClientConnection, Phase] = {}
        self._order: dict[Phase, dict[ClientConnection, float]] = {phase: {} for phase in Phase}
        self._changed = trio.Event()

    @property
    def most_at_work(self) -> int:
        """Maximum number of requests that may be worked on at a time."""
        share, of = AT_WORK
        return max(1, self.most * share // of)

    def count(self, phase: Phase) -> int:
        """Return the number of connections in `phase`."""
        return len(self._order[phase])

    def __len__(self) -> int:
        """Return the number of connections."""
        return len(self._phases)

    async def room(self) -> None:
        """Return when another connection may be accepted: there is room, or one has given way.

        A new connection has `young_connection_s` seconds to send its request. Until one may give way, others wait in
        the kernel's queue.
        """
        while len(self) >= self.most:
            if not self.make_room():
                self._changed = trio.Event()
                with trio.move_on_at(min(map(self._may_go_at, _GIVING_WAY))):
                    await self._changed.wait()

    def make_room(self) -> bool:
        """Close the connection that gives way first. Returns False if none may give way now."""
        client = next(chain.from_iterable(map(self.who_may_go, _GIVING_WAY)), None)
        if client is None:
            return False
        self.end(client, Refusal.GAVE_WAY)
        return True

    def who_may_go(self, phase: Phase) -> Iterator[ClientConnection]:
        """Return the connections that have been in `phase` for at least `young_connection_s`, the longest first."""
        now = trio.current_time()
        return (client for client, since in self._order[phase].items() if since + self._young_s <= now)

    def end(self, client: ClientConnection, why: Refusal) -> None:
        """Close a connection, and count it as refused for the reason `why`."""
        self.leave(client)
        client.give_way()
        self._refusals.count(why)

    def _may_go_at(self, phase: Phase) -> float:
        """Return when the oldest connection of a phase may give way: a time of Trio's clock, perhaps a past one."""
        return next(iter(self._order[phase].values()), math.inf) + self._young_s

    def enter(self, client: ClientConnection) -> None:
        """Add a new connection, after `room` has made room for it."""
        self.move(client, Phase.IDLE)

    def move(self, client: ClientConnection, phase: Phase) -> None:
        """Put the connection into `phase`, from now on."""
        self._take_out(client)
        self._phases[client] = phase
        self._order[phase][client] = trio.current_time()
        self._changed.set()

    def leave(self, client: ClientConnection) -> None:
        """Remove a connection that has ended or is about to."""
        self._take_out(client)
        self._changed.set()

    def _take_out(self, client: ClientConnection) -> None:
        phase = self._phases.pop(client, None)
        if phase is not None:
            del self._order[phase][client]

    def phase_of(self, client: ClientConnection) -> Phase | None:
        """Return the connection's phase; None if it was removed."""
        return self._phases.get(client)

    def close_idle(self) -> None:
        """Close all idle connections, when the server ends."""
        for client in [*self._order[Phase.IDLE]]:
            self.leave(client)
            client.give_way()


class LongAnswer(Protocol):
    """Long answer that is being sent."""

    client: ClientConnection
    """Connection on which it is sent."""


class LongAnswers:
    """Long answers that are being sent, `most` bytes in all. The slowest readers give way to other answers."""

    def __init__(self, most: int, connections: Connections) -> None:
        """Create an empty set of answers that are sent on `connections`."""
        self.most = most
        self._connections = connections
        self._lengths: dict[LongAnswer, int] = {}

    @property
    def held(self) -> int:
        """Number of bytes that they hold."""
        return sum(self._lengths.values())

    def take(self, answer: LongAnswer, length: int) -> bool:
        """Take the room for an answer of `length` bytes; return whether there was enough.

        To make room, it closes the connections whose clients have not taken their current piece for longest. Clients
        that take their pieces immediately are spared, and none is closed if that would not make enough room.
        """
        by_reader = {other.client: other for other in self._lengths}
        slow_readers = filter(by_reader.__contains__, self._connections.who_may_go(Phase.SENDING))
        ending, missing = [], self.held + length - self.most
        while missing > 0:
            slowest = next(slow_readers, None)
            if slowest is None:
                return False
            ending.append(slowest)
            missing -= self._lengths[by_reader[slowest]]
        for reader in ending:
            self.give(by_reader[reader])
            self._connections.end(reader, Refusal.SLOW_READER)
        self._lengths[answer] = length
        return True

    def give(self, answer: LongAnswer) -> None:
        """Free the room of an answer that was sent or given up. Does nothing for one that has no room."""
        self._lengths.pop(answer, None)
