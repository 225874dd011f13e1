"""Services of the soak: several `dataloader serve`, which are killed or stopped at times, and restarted.

The first one is never killed: its resource usage after hours is that of a normal process.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final, Self

from benchmarks.peers.progress import say

SERVICES: Final = 3
SLOTS: Final = 20
SETTINGS: Final = {"DL_DEFAULT_LEASE_TTL_SEC": "10", "DL_REAPER_PERIOD_SEC": "2", "DL_HEARTBEAT_SEC": "2"}
"""Settings with which a killed process's jobs are run again during the soak; everything else is the default."""
END_S: Final = 60
START_S: Final = 60


class Service:
    """One service in successive processes; its log goes to a file."""

    def __init__(self, environment: dict[str, str], log: Path, tasks: str = "benchmarks.soak.tasks:tasks") -> None:
        self._environment = environment
        self._tasks = tasks
        self._log = log
        self.start()

    def start(self) -> None:
        """Start a process; `url` is set when it serves."""
        self.url: str | None = None
        self.expected: int | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dataloader", "serve", "--tasks", self._tasks, "--port", "0"],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def end(self, number: signal.Signals) -> None:
        """Send it a signal that must end it."""
        self.url = None
        self.expected = -number if number == signal.SIGKILL else 0
        self.process.send_signal(number)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with self._log.open("ab") as log:
            for line in process.stderr:
                log.write(line)
                if b'"event":"serving"' in line and self.expected is None:
                    self.url = json.loads(line)["url"]


class Fleet:
    """All services. Leaving the block ends them."""

    def __init__(self, dsn: str, folder: Path, keys: Path, chance: random.Random) -> None:
        """Start the services. `blows` are (time, signal); `unexpected` counts unrequested exits and wrong statuses."""
        self._chance = chance
        self.blows: list[tuple[float, str]] = []
        self.unexpected = 0
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DL_", "PG"))}
        environment = inherited | SETTINGS | {"DL_DB_DSN": dsn, "DL_LOG_FORMAT": "json", "SOAK_FOLDER": str(keys)}
        environment["WORKERS_JSON"] = json.dumps([{"queue": "soak", "concurrency": SLOTS}])
        self.services = [Service(environment, folder / f"service-{number}.log") for number in range(SERVICES)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for service in self.services:
            if service.process.poll() is None:
                service.end(signal.SIGTERM)
        for service in self.services:
            try:
                code = service.process.wait(END_S)
            except subprocess.TimeoutExpired:
                service.process.kill()
                code = service.process.wait()
            self._look(service, code)

    def wait(self) -> None:
        """Wait until all serve."""
        until = time.monotonic() + START_S
        while len(self.urls()) < SERVICES:
            if time.monotonic() > until:
                raise RuntimeError(f"not all services serve after {START_S} s; see their logs")
            self.tend()
            time.sleep(0.1)

    def urls(self) -> list[str]:
        """Return the URLs of services that are not ending or starting."""
        return [url for service in self.services if (url := service.url)]

    def strike(self, at_s: float) -> None:
        """Kill or stop one service, unless it is ending or starting."""
        service = self._chance.choice(self.services[1:])
        how = self._chance.choice([signal.SIGKILL, signal.SIGTERM])
        if service.url is not None:
            service.end(how)
            self.blows.append((round(at_s, 1), how.name))

    def tend(self) -> None:
        """Restart ended services."""
        for service in self.services:
            code = service.process.poll()
            if code is not None:
                self._look(service, code)
                service.start()

    def _look(self, service: Service, code: int) -> None:
        if code != service.expected:
            self.unexpected += 1
            say(f"service {self.services.index(service)} ended with {code} instead of {service.expected}")
