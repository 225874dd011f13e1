"""Places are shared fairly by the callers, and none is lost, whichever caller leaves or is cancelled at any time."""

from __future__ import annotations

import threading
from collections import Counter

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.store.connection.fair_places import FairPlaces
from dataloader.web.fair_places import FairThreads

pytestmark = pytest.mark.requirement("Q2")


@attrs.define(eq=False)
class Request:
    """Request that holds its place until it is released."""

    caller: str
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    leave: trio.Event = attrs.field(factory=trio.Event)
    state: str = "waits"

    async def run(self, places, served):
        try:
            with self.scope:
                async with places.place_of(self.caller):
                    self.state = "is in"
                    served.append(self)
                    await self.leave.wait()
        finally:
            self.state = "is over"


@attrs.define
class Room:
    """Requests, those with a place in the order in which they got it, and the places."""

    places: FairPlaces
    nursery: trio.Nursery
    asked: list[Request] = attrs.field(factory=list)
    served: list[Request] = attrs.field(factory=list)

    async def ask(self, caller):
        await trio.testing.wait_all_tasks_blocked()
        request = Request(caller)
        self.asked.append(request)
        self.nursery.start_soon(request.run, self.places, self.served)
        await trio.testing.wait_all_tasks_blocked()
        return request

    def of(self, state):
        return [request for request in self.asked if request.state == state]

    def callers(self, state):
        return Counter(request.caller for request in self.of(state))

    def check(self):
        """Check that no place is lost or given twice, no caller is listed without a request, and none is overtaken."""
        held, waiting, places = self.callers("is in"), self.callers("waits"), self.places
        assert (places.held, places.waiting) == (held.total(), waiting.total())
        assert held.total() <= places.most
        assert all(number <= places.most_of_one for number in held.values())
        if held.total() < places.most:
            assert all(held[caller] == places.most_of_one for caller in waiting)
        assert (set(places._held), set(places._waiting)) == (set(held), set(waiting))
        for caller in waiting:
            asked = [one for one in self.asked if one.caller == caller and not one.scope.cancel_called]
            is_served = [one in self.served for one in asked]
            assert is_served == sorted(is_served, reverse=True)  # the oldest first


CALLERS = st.sampled_from("abcd")
NUMBERS = st.integers(0, 9)
STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "leave", "cancel"]), CALLERS, NUMBERS, st.booleans()), min_size=10, max_size=40
)
SIZES = st.sampled_from([(3, 2), (1, 1), (2, 1), (4, 3)])


@settings(deadline=None)
@given(sizes=SIZES, steps=STEPS)
def test_no_place_is_lost_or_given_twice_whatever_the_requests_do(sizes, steps):
    async def play():
        async with trio.open_nursery() as nursery:
            room = Room(FairPlaces(*sizes), nursery)
            for kind, caller, number, is_watched in steps:
                if kind == "ask":
                    await room.ask(caller)
                elif left := room.of("is in" if kind == "leave" else "waits"):
                    request = left[number % len(left)]
                    request.leave.set() if kind == "leave" else request.scope.cancel()
                # Otherwise the next step comes before the tasks have run.
                if is_watched:
                    await trio.testing.wait_all_tasks_blocked()
                    room.check()
            while room.of("is in"):
                room.of("is in")[0].leave.set()
                await trio.testing.wait_all_tasks_blocked()
                room.check()
        assert all(request in room.served or request.scope.cancel_called for request in room.asked)

    trio.run(play)


async def test_places_are_granted_round_robin_and_to_the_oldest_request_of_a_caller():
    async with trio.open_nursery() as nursery:
        room = Room(FairPlaces(most=1, most_of_one=1), nursery)
        first = await room.ask("z")
        names = {}
        for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
            names[await room.ask(name[0])] = name
        last = first
        for _ in names:
            last.leave.set()
            await trio.testing.wait_all_tasks_blocked()
            last = room.served[-1]
        last.leave.set()
    assert [names[request] for request in room.served[1:]] == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_a_caller_never_holds_all_places_and_another_one_does_not_wait():
    async with trio.open_nursery() as nursery:
        room = Room(FairPlaces(), nursery)
        for _ in range(16):
            await room.ask("a")
        assert (room.places.held, room.places.waiting) == (2, 14)
        assert (await room.ask("b")).state == "is in"
        assert (await room.ask("b")).state == "waits"
        nursery.cancel_scope.cancel()
    room.check()


async def test_a_request_that_is_cancelled_when_it_gets_its_place_gives_it_back():
    places = FairPlaces(most=1, most_of_one=1)
    async with trio.open_nursery() as nursery:
        room = Room(places, nursery)
        async with places.place_of("z"):
            cancelled, next_one = await room.ask("a"), await room.ask("b")
        # Its task is woken and has not run yet.
        assert (places.held, places.waiting) == (1, 1)
        cancelled.scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert (cancelled.state, next_one.state) == ("is over", "is in")
        next_one.leave.set()
    room.check()


async def test_a_cancelled_request_takes_no_free_place():
    places = FairPlaces()
    with trio.CancelScope() as scope:
        scope.cancel()
        async with places.place_of("a"):
            pytest.fail("it got a place")
    assert (places.held, dict(places._held)) == (0, {})


async def test_a_place_is_held_until_the_thread_of_a_cancelled_request_has_ended():
    threads, goes_on, has_begun = FairThreads(), threading.Event(), trio.Event()
    begun = trio.lowlevel.current_trio_token()

    def work(answer):
        begun.run_sync_soon(has_begun.set)
        goes_on.wait()
        return answer

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(threads.run, "a", work, 1)
            await has_begun.wait()
            scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
            held = threads.places.held
            goes_on.set()
    assert (held, threads.places.held) == (1, 0)
    assert await threads.run("a", work, 2) == 2
