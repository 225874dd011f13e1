"""Who is connected, how many may be, and who gives way to a newcomer: a connection that waits for its client.

A process has a bounded number of files. If connections took all of them, no probe got in and the database could not be
reached; so there are fewer of them, and the one that has been idle for longest is closed when another one comes. A
connection whose request is being worked on never gives way, and fewer requests than connections are worked on at a
time, so that there is always one that can.

Memory is bounded, too: when long answers hold all that they may, the slowest of their readers gives way to the next
answer. However many slow readers there are, and however often they come again, they can't keep an answer from a
client that is faster than they are. Rejected: a deadline for each answer, which slow readers would fill anew, and which
would cut off an honest client with a poor line when nobody else needs the room.
"""

from __future__ import annotations

import enum
import math
import resource
from collections.abc import Iterator
from itertools import chain
from typing import Final, Protocol

import trio

from dataloader.web.server.refusals import Refusal, Refusals

FILES_FOR_CONNECTIONS: Final = 3, 4
"""The share of the process's files that connections may take."""
AT_WORK: Final = 3, 4
"""The share of the connections whose requests may be at work at a time."""
YOUNG_S: Final = 0.1
"""Who does something for less than this does not give way yet."""


class Phase(enum.IntEnum):
    """What a connection does. The first phases give way first."""

    IDLE = 0
    """The server waits for a request, or for the rest of its header."""
    RECEIVING = 1
    """The server waits for a request's body."""
    SENDING = 2
    """The client takes its answer."""
    WORKING = 3
    """The request is being worked on: never gives way."""


_GIVING_WAY: Final = (Phase.IDLE, Phase.RECEIVING, Phase.SENDING)


class Client(Protocol):
    """What `Connections` must be able to do with a connection."""

    def give_way(self) -> None:
        """Close the socket at once."""


def most_connections(wanted: int) -> int:
    """How many connections there may be: `wanted`, but no more than the process's files allow."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    share, of = FILES_FOR_CONNECTIONS
    return wanted if files == resource.RLIM_INFINITY else max(1, min(wanted, files * share // of))


class Connections:
    """All connections of a server, by phase, in each those first that have been in it for longest."""

    def __init__(self, most: int, refusals: Refusals) -> None:
        """`most` is how many there may be."""
        self.most = most
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
        """Return when another one may enter: there is room, or one has given way to it.

        Whoever has come has a moment to say what he wants. Meanwhile newcomers wait, in the kernel's queue.
        """
        while len(self) >= self.most:
            if not self.make_room():
                self._changed = trio.Event()
                with trio.move_on_after(min(map(self._due_s, _GIVING_WAY))):
                    await self._changed.wait()

    def make_room(self) -> bool:
        """Let the connection go that can best be spared. False if there is none, or none yet."""
        client = next(chain.from_iterable(map(self.who_may_go, _GIVING_WAY)), None)
        if client is None:
            return False
        self.end(client, Refusal.GAVE_WAY)
        return True

    def who_may_go(self, phase: Phase) -> Iterator[Client]:
        """Those that have been in `phase` for a moment at least, first the one that has been in it for longest."""
        now = trio.current_time()
        return (client for client, since in self._order[phase].items() if since + YOUNG_S <= now)

    def end(self, client: Client, why: Refusal) -> None:
        """Let a connection go."""
        self.leave(client)
        client.give_way()
        self._refusals.count(why)

    def _due_s(self, phase: Phase) -> float:
        """In how many seconds the oldest one of a phase may give way."""
        since = next(iter(self._order[phase].values()), math.inf)
        return since + YOUNG_S - trio.current_time()

    def enter(self, client: Client) -> None:
        """A new connection; there is room for it."""
        self.move(client, Phase.IDLE)

    def move(self, client: Client, phase: Phase) -> None:
        """The connection is in `phase` from now on."""
        self._take_out(client)
        self._phases[client] = phase
        self._order[phase][client] = trio.current_time()
        self._changed.set()

    def leave(self, client: Client) -> None:
        """The connection has ended, or is about to."""
        self._take_out(client)
        self._changed.set()

    def _take_out(self, client: Client) -> None:
        phase = self._phases.pop(client, None)
        if phase is not None:
            del self._order[phase][client]

    def phase_of(self, client: Client) -> Phase | None:
        """What the connection does; None when it has left."""
        return self._phases.get(client)

    def close_idle(self) -> None:
        """The server ends: nobody waits for another request."""
        for client in [*self._order[Phase.IDLE]]:
            self.leave(client)
            client.give_way()


class Answer(Protocol):
    """A long answer on its way."""

    client: Client
    """Who takes it."""


class LongAnswers:
    """What long answers on their way hold, `most` bytes in all. The slowest readers make room for other answers."""

    def __init__(self, most: int, connections: Connections) -> None:
        """`connections` are those on which they are sent."""
        self.most = most
        self._connections = connections
        self._lengths: dict[Answer, int] = {}

    @property
    def held(self) -> int:
        """How many bytes are on their way."""
        return sum(self._lengths.values())

    def take(self, answer: Answer, length: int) -> bool:
        """Whether there is room for an answer of `length` bytes, which is taken then.

        As long as there is none, the reader is ended that has waited for longest to take the piece that is sent to it.
        None is ended that takes its pieces at once, nor if it would be in vain.
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

    def give(self, answer: Answer) -> None:
        """The answer is sent, or will not be; one that held nothing gives nothing back."""
        self._lengths.pop(answer, None)
