"""Version of the installed program."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def program_version() -> str:
    """Return the version of the installed distribution."""
    try:
        return version("dataloader-supervisor")
    except PackageNotFoundError:  # a source tree on the path, not installed
        return "0+unknown"
