"""The open connections, their greatest number, and which one is closed ("gives way") for a new one.

A process has a limited number of files. If connections took all of them, no probe could connect and the database could
not be reached. So connections may take a share of them only, and when that is used up, the one that has been idle for
longest is closed for a new one. A connection whose request is being worked on never gives way; and fewer requests than
connections are worked on at a time, so that there is always a connection that can give way.

Memory is bounded, too: when long answers hold all the bytes that they may, the slowest reader's connection is closed
for the next answer. However many slow readers there are, and however often they reconnect, they can't keep an answer
from a faster client. Rejected: a deadline for each answer. Slow readers would ask again after it, and it would cut off
an honest client with a slow line when nobody else needs the room.
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
"""The share of the process's files that connections may take."""
AT_WORK: Final = 3, 4
"""The share of the connections whose requests may be worked on at a time."""


class Phase(enum.IntEnum):
    """What a connection does. The first phases give way first."""

    IDLE = 0
    """The server waits for a request, or for the rest of its header."""
    RECEIVING = 1
    """The server waits for a request's body."""
    SENDING = 2
    """The server waits for the client to take its answer."""
    WORKING = 3
    """The request is being worked on: never gives way."""


_GIVING_WAY: Final = (Phase.IDLE, Phase.RECEIVING, Phase.SENDING)


class Client(Protocol):
    """What `Connections` must be able to do with a connection."""

    def give_way(self) -> None:
        """Close the socket at once."""


def most_connections(wanted: int, files: int | None = None) -> int:
    """Return how many connections there may be: `wanted`, or fewer if the process may open too few files.

    `files` is the number that it may open; None: ask the system.
    """
    if files is None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    share, of = FILES_FOR_CONNECTIONS
    return wanted if files == resource.RLIM_INFINITY else max(1, min(wanted, files * share // of))


class Connections:
    """All connections of a server by phase; within a phase, those that have been in it for longest come first."""

    def __init__(self, most: int, refusals: Refusals, limits: HttpLimits = STANDARD) -> None:
        """`most` is how many there may be."""
        self.most = most
        self._young_s = limits.young_connection_s
        self._refusals = refusals
        self._phases: dict[Client, Phase] = {}
        self._order: dict[Phase, dict[Client, float]] = {phase: {} for phase in Phase}
        self._changed = trio.Event()

    @property
    def most_at_work(self) -> int:
        """How many requests may be worked on at a time."""
        share, of = AT_WORK
        return max(1, self.most * share // of)

    def count(self, phase: Phase) -> int:
        """How many there are in `phase`."""
        return len(self._order[phase])

    def __len__(self) -> int:
        """How many there are."""
        return len(self._phases)

    async def room(self) -> None:
        """Return when another connection may be accepted: there is room, or one has given way.

        A new connection has `young_connection_s` to send its request. Until one may give way, others wait in the
        kernel's queue.
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

    def who_may_go(self, phase: Phase) -> Iterator[Client]:
        """Those that have been in `phase` for at least `young_connection_s`, the longest first."""
        now = trio.current_time()
        return (client for client, since in self._order[phase].items() if since + self._young_s <= now)

    def end(self, client: Client, why: Refusal) -> None:
        """Close a connection, and count it as refused for the reason `why`."""
        self.leave(client)
        client.give_way()
        self._refusals.count(why)

    def _may_go_at(self, phase: Phase) -> float:
        """Return when the oldest connection of a phase may give way: a time of Trio's clock, perhaps a past one."""
        return next(iter(self._order[phase].values()), math.inf) + self._young_s

    def enter(self, client: Client) -> None:
        """Add a new connection, for which `room` has made room."""
        self.move(client, Phase.IDLE)

    def move(self, client: Client, phase: Phase) -> None:
        """Put the connection into `phase`, from now on."""
        self._take_out(client)
        self._phases[client] = phase
        self._order[phase][client] = trio.current_time()
        self._changed.set()

    def leave(self, client: Client) -> None:
        """Remove a connection that has ended or is about to."""
        self._take_out(client)
        self._changed.set()

    def _take_out(self, client: Client) -> None:
        phase = self._phases.pop(client, None)
        if phase is not None:
            del self._order[phase][client]

    def phase_of(self, client: Client) -> Phase | None:
        """The connection's phase; None when it was removed."""
        return self._phases.get(client)

    def close_idle(self) -> None:
        """Close all idle connections, when the server ends."""
        for client in [*self._order[Phase.IDLE]]:
            self.leave(client)
            client.give_way()


class LongAnswer(Protocol):
    """A long answer that is being sent."""

    client: Client
    """The connection on which it is sent."""


class LongAnswers:
    """The long answers that are being sent, `most` bytes in all. The slowest readers give way to other answers."""

    def __init__(self, most: int, connections: Connections) -> None:
        """`connections` has those on which they are sent."""
        self.most = most
        self._connections = connections
        self._lengths: dict[LongAnswer, int] = {}

    @property
    def held(self) -> int:
        """How many bytes they hold."""
        return sum(self._lengths.values())

    def take(self, answer: LongAnswer, length: int) -> bool:
        """Take the room for an answer of `length` bytes; return whether there was enough.

        To make room, the connections are closed whose clients have not taken their current piece for longest. Clients
        that take their pieces at once are spared, and none is closed if that would not make enough room.
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
