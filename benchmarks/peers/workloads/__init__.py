"""The workloads, in their order."""

from __future__ import annotations

from typing import Final

from benchmarks.peers.workload import Workload
from benchmarks.peers.workloads import (
    w01_drain,
    w02_enqueue,
    w03_latency,
    w04_backlog,
    w05_delayed,
    w06_hot_key,
    w07_snapshot,
    w08_idle,
    w09_kill,
    w10_asleep,
    w11_steady,
    w12_http,
    w13_replicas,
    w14_history,
)

_MODULES: Final = (
    w01_drain,
    w02_enqueue,
    w03_latency,
    w04_backlog,
    w05_delayed,
    w06_hot_key,
    w07_snapshot,
    w08_idle,
    w09_kill,
    w10_asleep,
    w11_steady,
    w12_http,
    w13_replicas,
    w14_history,
)
WORKLOADS: Final[dict[str, Workload]] = {module.WORKLOAD.name: module.WORKLOAD for module in _MODULES}
