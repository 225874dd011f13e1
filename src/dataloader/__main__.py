"""`dataloader` and `python -m dataloader`: hands over to the command line and ends the process with its exit code."""

import sys

from dataloader.supervisor.cli.entry import run


def main() -> None:
    """Run the command line on this process's arguments; never returns."""
    sys.exit(run())


if __name__ == "__main__":
    main()
