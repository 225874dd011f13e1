"""The thread that ends a hanging process passes on all signals that it takes from Trio."""

from __future__ import annotations

import os
import signal
import threading

import trio
from conditions import patience_s

from dataloader.supervisor import total_deadline


async def test_the_private_parts_of_trio_that_we_use_exist():
    """Trio has a wake-up socket for signals while it runs; signals that reach ours instead are passed on to it."""
    assert signal.SIGUSR1 not in total_deadline.SIGNALS, "it would end this process"
    trios = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(trios)
    assert trios >= 0
    with trio.open_signal_receiver(signal.SIGUSR1) as signals, total_deadline.open_total_deadline(60):
        ours = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(ours)
        assert ours not in {-1, trios}
        with trio.fail_after(patience_s()):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert await anext(signals) == signal.SIGUSR1
    assert signal.set_wakeup_fd(trios) == trios
    for thread in threading.enumerate():
        if thread.name == "total deadline":
            await trio.to_thread.run_sync(thread.join, 30)
            assert not thread.is_alive()
