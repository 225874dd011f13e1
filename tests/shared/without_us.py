"""A preload for Dask: its scheduler and workers can't import the package, as if it were not installed there."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder


class Without(MetaPathFinder):
    """Finds nothing of ours, and lets nobody else look."""

    def find_spec(self, name, path, target=None):  # noqa: ARG002 - as it is called
        if name.partition(".")[0] == "dataloader":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Without())
