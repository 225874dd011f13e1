"""Process 1 of a container: the parent of the service, which reaps zombie processes.

The kernel gives orphans to process 1, and they stay zombies until it waits for them. The service cannot do that: it
cannot distinguish them from the processes that its own code has started and waits for. A parent that starts no other
process can.
"""

import os
import signal
from typing import Final

HANDED_ON: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)


def serve_below() -> None:
    """Fork the service and return in it. The parent forwards signals to it, and ends with its exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    service = os.fork()
    if service == 0:
        # In our group, the service would receive a terminal's ^C twice.
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
        return
    for number in HANDED_ON:
        signal.signal(number, lambda number, _frame: os.kill(service, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
    ended = 0
    while ended != service:
        ended, status = os.wait()
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
