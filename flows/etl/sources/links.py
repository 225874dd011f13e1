"""Keeps a pattern's files in the pattern's folder: whoever may only write there must not make us read other files.

A link is judged by where the file really is: when files are listed, and again when one is open, since it may have been
replaced in between. All functions block: they are for threads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from dataloader.flows.etl.sources.source import SourceError


def is_inside(path: str | Path, folders: Sequence[Path]) -> bool:
    """Tell whether a file really is in one of the folders, wherever they are."""
    real = os.path.realpath(path)
    return any(real.startswith(os.path.join(os.path.realpath(folder), "")) for folder in folders)  # noqa: PTH118


def open_inside(path: Path, folders: Sequence[Path] | None) -> IO[bytes]:
    """Open a file. Raises `SourceError` if it really is in none of the folders (None: it may be anywhere)."""
    file = path.open("rb")
    if folders is not None and not is_inside(f"/proc/self/fd/{file.fileno()}", folders):
        file.close()
        raise SourceError(f"{path}: is a link out of its folder (follow_links)", is_retryable=False)
    return file
