"""Workloads, one per module; they are measured and shown in the order of the files' names."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Final

from benchmarks.peers.workload import Workload

_MODULES: Final = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
WORKLOADS: Final[dict[str, Workload]] = {module.WORKLOAD.name: module.WORKLOAD for module in _MODULES}
