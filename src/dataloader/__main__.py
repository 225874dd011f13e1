"""`dataloader` and `python -m dataloader`: runs the command line and ends the process with its exit code."""

import os
import signal
import sys
from typing import Final, NoReturn

SWITCH_S: Final = 0.0005
"""Seconds for which a computing thread may hold the interpreter lock while others wait; Python's default is 5 ms."""


_came: list[int] = []


def main() -> NoReturn:
    """Run the command line on this process's arguments. Never returns."""
    if os.getpid() == 1 and sys.argv[1:2] == ["serve"]:
        from dataloader.first_process import serve_below  # noqa: PLC0415 - only needed here

        serve_below()
    # Until the service listens to signals, or a command is done. Process 1 of a container ignores signals without a
    # handler, and elsewhere an embedded server would be left running.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup's child ignores SIGHUP
            signal.signal(number, _interrupt)
    _open_what_is_closed()
    sys.setswitchinterval(SWITCH_S)
    from dataloader.cli.entry import INTERRUPTED, run_command_line  # noqa: PLC0415 - these imports take a while

    code = run_command_line()
    sys.exit(128 + _came[0] if _came and code == INTERRUPTED else code)


def _open_what_is_closed() -> None:
    """Open closed standard streams: a closed stderr is None, and the next opened file would get its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - for the life of the process


def _interrupt(number: int, _frame: object) -> None:
    _came.append(number)
    if not callable(signal.getsignal(signal.SIGINT)):  # a shell's background job ignores it
        raise KeyboardInterrupt  # not SystemExit, which a module of tasks may raise itself
    # The same as ^C, which Trio does not raise inside its own code.
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
