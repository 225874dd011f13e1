"""`dataloader` and `python -m dataloader`: hands over to the command line and ends the process with its exit code."""

import sys
from typing import Final

from dataloader.supervisor.cli.entry import run

SWITCH_S: Final = 0.0005
"""How long a thread that computes holds up the event loop at each of its turns; by default Python lets it for 5 ms."""


def main() -> None:
    """Run the command line on this process's arguments; never returns."""
    sys.setswitchinterval(SWITCH_S)
    sys.exit(run())


if __name__ == "__main__":
    main()
