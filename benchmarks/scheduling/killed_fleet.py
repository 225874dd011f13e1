"""Processes of `dataloader serve` that are killed at random times with SIGKILL, and restarted immediately."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

from benchmarks.peers.progress import say
from benchmarks.soak.fleet import END_S, SETTINGS, START_S, Service

BLOWS_S: Final = (2.0, 8.0)
"""Shortest and longest time between two kills; a process lives for several of them."""
KILLED: Final = SETTINGS | {"DL_DEFAULT_LEASE_TTL_SEC": "5"}
"""Settings with which a killed process's jobs are run again soon; everything else is the default."""


class KilledFleet:
    """`number` services of a module's tasks. Leaving the block ends them; `kills` counts the kills."""

    def __init__(
        self,
        dsn: str,
        module: str,
        number: int,
        slots: Mapping[str, int],
        *,
        folder: Path,
        settings: Mapping[str, str] = KILLED,
    ) -> None:
        self.kills = 0
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DL_", "PG"))}
        environment = inherited | dict(settings) | {"DL_DB_DSN": dsn, "DL_LOG_FORMAT": "json", "DL_MIGRATE": "false"}
        environment |= {"SCHEDULING_FOLDER": str(folder)}
        environment["WORKERS_JSON"] = json.dumps([{"queue": name, "concurrency": most} for name, most in slots.items()])
        self.services = [Service(environment, folder / f"service-{one}.log", module) for one in range(number)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for service in self.services:
            if service.process.poll() is None:
                service.end(signal.SIGTERM)
        for service in self.services:
            try:
                service.process.wait(END_S)
            except subprocess.TimeoutExpired:
                say("a service did not end in time: killed")
                service.process.kill()
                service.process.wait()

    def wait(self) -> None:
        """Wait until all serve."""
        until = time.monotonic() + START_S
        while not all(service.url for service in self.services):
            if time.monotonic() > until:
                raise RuntimeError(f"not all services serve after {START_S} s; see their logs")
            time.sleep(0.1)

    def run(self, seconds: float, chance: random.Random | None, between: Callable[[float], None] | None = None) -> None:
        """Wait `seconds`; with `chance` one service is killed at random times. `between` gets the seconds so far."""
        began = time.monotonic()
        strike_at = chance.uniform(*BLOWS_S) if chance else seconds
        while (at_s := time.monotonic() - began) < seconds:
            if chance and at_s >= strike_at:
                self.services[chance.randrange(len(self.services))].end(signal.SIGKILL)
                self.kills += 1
                strike_at = at_s + chance.uniform(*BLOWS_S)
            if between:
                between(at_s)
            for service in self.services:
                if service.process.poll() is not None:
                    if service.expected is None:
                        raise RuntimeError(f"a service ended by itself, with {service.process.returncode}")
                    service.start()
            time.sleep(0.05)
