"""`dataloader` and `python -m dataloader`: hands over to the command line and ends the process with its exit code."""

import os
import signal
import sys
from typing import Final, NoReturn

SWITCH_S: Final = 0.0005
"""How long a thread that computes holds up the event loop at each of its turns; by default Python lets it for 5 ms."""


_came: list[int] = []


def main() -> NoReturn:
    """Run the command line on this process's arguments; never returns."""
    if os.getpid() == 1 and sys.argv[1:2] == ["serve"]:
        from dataloader.first_process import serve_below  # noqa: PLC0415 - only there

        serve_below()
    # Until the service listens to signals, or a command is done. As the first process of a container we would not even
    # hear of one that nobody has asked for, and elsewhere an embedded server would be left behind.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup's child ignores the second
            signal.signal(number, _interrupt)
    _open_what_is_closed()
    sys.setswitchinterval(SWITCH_S)
    from dataloader.cli.entry import INTERRUPTED, run  # noqa: PLC0415 - what is imported here takes a while

    code = run()
    sys.exit(128 + _came[0] if _came and code == INTERRUPTED else code)


def _open_what_is_closed() -> None:
    """Without this a closed stderr is None, and the next file or connection that is opened gets its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - for the life of the process


def _interrupt(number: int, _frame: object) -> None:
    _came.append(number)
    if not callable(signal.getsignal(signal.SIGINT)):  # a shell's job in the background ignores it
        raise KeyboardInterrupt  # not SystemExit, which a module of tasks may raise itself
    # As ^C, which Trio keeps out of its own works.
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
