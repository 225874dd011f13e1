"""`dataloader serve` under attack, with few files, observed by /proc, by its log and by a probe."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import attrs

FILES = 1_024
"""Usual value of `ulimit -n`."""
START_S = 60.0
STOP_S = 30.0


@attrs.define
class Probed:
    """Results of a probe."""

    took_ms: list[float] = attrs.field(factory=list)
    lost: int = 0


@attrs.define
class Service:
    """Running service."""

    process: subprocess.Popen[bytes]
    log: Path
    host: str = ""
    port: int = 0

    def settle(self) -> None:
        """Reset the peak memory of the start and of the attack's preparation."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def peak_mib(self) -> float:
        """Return the peak memory since then."""
        if (code := self.process.poll()) is not None:
            sys.exit(f"the service has ended with {code}:\n{self.log.read_text()}")
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1_024

    def lines(self) -> Iterator[dict[str, object]]:
        """Yield the log lines so far."""
        for line in self.log.read_text("utf-8", "replace").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                yield {"event": line, "level": "error"}

    def errors(self) -> list[str]:
        """Return log lines with a traceback, or about an error."""
        return [
            json.dumps(line, ensure_ascii=False)
            for line in self.lines()
            if line["level"] in {"error", "critical"} or "Traceback" in str(line)
        ]

    @contextmanager
    def probed(self, also_asked: str | None = None) -> Iterator[Probed]:
        """Let a probe request /health, and another address, meanwhile.

        Its results are known at the end of the block.
        """
        command = [sys.executable, "-m", "benchmarks.attack.probe", self.host, str(self.port)]
        if also_asked is not None:
            command.append(also_asked)
        probed = Probed()
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
            try:
                yield probed
            finally:
                said, _ = probe.communicate()
        probed.took_ms, probed.lost = json.loads(said)["took_ms"], json.loads(said)["lost"]


@contextmanager
def open_service(directory: Path) -> Iterator[Service]:
    """Run a service with its database in a directory; several can use it one after the other."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DL_", "PG", "WORKERS_"))}
    settings = {"DL_DATA_DIR": str(directory / "data"), "DL_LOG_FORMAT": "json"}
    command = [sys.executable, "-m", "dataloader", "serve", "--port", "0"]
    with tempfile.NamedTemporaryFile(prefix="attack-", suffix=".log") as log:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh", *command],
            cwd=directory,
            env=inherited | settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log.fileno(),
        )
        service = Service(process, Path(log.name))
        try:
            _wait_until_it_serves(service)
            yield service
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_it_serves(service: Service) -> None:
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at and service.process.poll() is None:
        for line in service.lines():
            if line["event"] == "serving":
                address = urlsplit(str(line["url"]))
                service.host, service.port = str(address.hostname), int(address.port or 0)
                return
        time.sleep(0.05)
    sys.exit(f"the service did not start:\n{service.log.read_text()}")
