"""`dataloader` and `python -m dataloader`: hands over to the command line and ends the process with its exit code."""

import signal
import sys
from typing import Final, NoReturn

SWITCH_S: Final = 0.0005
"""How long a thread that computes holds up the event loop at each of its turns; by default Python lets it for 5 ms."""


def main() -> NoReturn:
    """Run the command line on this process's arguments; never returns."""
    # Until the service listens to signals, or a command is done. As the first process of a container we would not even
    # hear of one that nobody has asked for, and elsewhere an embedded server would be left behind.
    signal.signal(signal.SIGTERM, _interrupt)
    sys.setswitchinterval(SWITCH_S)
    from dataloader.supervisor.cli.entry import run  # noqa: PLC0415 - what is imported here takes a while

    sys.exit(run())


def _interrupt(number: int, _frame: object) -> None:
    if not callable(signal.getsignal(signal.SIGINT)):  # a shell's job in the background ignores it
        sys.exit(128 + number)
    # As ^C, which Trio keeps out of its own works.
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
