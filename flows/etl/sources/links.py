"""Keeps a pattern's files in the pattern's folder, so that users who may only write there cannot make us read others.

The real place of a linked file is checked when files are listed, and again when one is open, because the link may have
been replaced in the meantime. All functions block, so call them in threads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from dataloader.flows.etl.sources.source import SourceError


def is_inside(path: str | Path, folders: Sequence[Path]) -> bool:
    """Return whether the real place of a file is in one of the folders, whose own links are resolved as well."""
    real = os.path.realpath(path)
    return any(real.startswith(os.path.join(os.path.realpath(folder), "")) for folder in folders)  # noqa: PTH118


def open_inside(path: Path, folders: Sequence[Path] | None) -> IO[bytes]:
    """Open a file. Raises `SourceError` if its real place is in none of the folders (None allows any place)."""
    file = path.open("rb")
    if folders is not None and not is_inside(f"/proc/self/fd/{file.fileno()}", folders):
        file.close()
        raise SourceError(
            f"{path}: is a link out of its folder; set follow_links=True to follow it", is_retryable=False
        )
    return file
