"""Parts are restarted up to a limit (Q15)."""

from __future__ import annotations

import pytest
import trio
from logged import capture_logs

from dataloader import StoreUnavailable
from dataloader.supervisor import tree
from dataloader.supervisor.restarts import keep_running


@pytest.mark.requirement("Q15")
@pytest.mark.parametrize("budget", [tree.SERVICE, tree.WEB, tree.HELPER, tree.LISTENER, tree.CLAIMS], ids=str)
async def test_a_part_that_always_fails_gives_up_within_its_budgets_time(autojump_clock, budget):
    starts, given_up = [], []

    async def part():
        starts.append(trio.current_time())
        raise LookupError("a bug")

    with capture_logs(), trio.fail_after(budget.within_s):
        await keep_running("part", part, budget, given_up.append)
    assert len(starts) == budget.restarts + 1
    assert str(given_up[0]) == f"part gave up after {budget}; the last cause was LookupError: a bug"


@pytest.mark.requirement("Q15")
async def test_a_part_that_fails_occasionally_keeps_running(autojump_clock):
    given_up = []

    async def part():
        await trio.sleep(30)
        raise LookupError("a bug")

    with capture_logs() as lines, trio.move_on_after(36_000):
        await keep_running("part", part, tree.WEB, given_up.append)
    assert not given_up
    assert len(lines) > 1_000


@pytest.mark.requirement("Q15")
async def test_a_database_that_is_away_is_waited_for_however_deep_the_error_lies(autojump_clock):
    starts = []

    async def part():
        starts.append(trio.current_time())
        if len(starts) < 500:
            # The form in which a listener's error leaves the nurseries of its loop.
            raise ExceptionGroup("loop", [ExceptionGroup("nursery", [StoreUnavailable("away")])])

    with capture_logs():
        await keep_running("part", part, tree.WEB, pytest.fail)
    assert len(starts) == 500
