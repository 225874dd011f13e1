"""Polling of pages: the more pages there are, the less often each polls."""

from __future__ import annotations

from dataloader.web.pages.pace import LONGEST_S, Pace


async def test_many_polls_at_one_time_wait_longer_up_to_a_bound(autojump_clock):
    pace = Pace()
    waits = [pace.next_in(5, 0.01) for _ in range(2_000)]
    assert (waits[0], waits[-1]) == (5, LONGEST_S)
    assert waits == sorted(waits)
