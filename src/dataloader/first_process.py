"""Process 1 of a container: the parent of the service, which takes away the ended processes that nobody waits for.

The kernel gives orphans to process 1, and their ends stay as zombies until it asks for them. The service can't: it does
not know them from the processes that its own code has started and waits for. A parent that starts nothing else can.
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
    """Fork the service, and return there; here hand signals on to it, and end as it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    service = os.fork()
    if service == 0:
        # Of a terminal's ^C the service would hear twice, were it of our group.
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
