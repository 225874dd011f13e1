"""Preload for Dask: its scheduler and workers cannot import the package, as if it were not installed there."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder


class Without(MetaPathFinder):
    """Import finder that refuses our package."""

    def find_spec(self, name, path, target=None):  # noqa: ARG002 - the protocol's signature
        if name.partition(".")[0] == "dataloader":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Without())
