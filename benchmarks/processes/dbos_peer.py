"""DBOS for comparison: in a separate virtual environment, on the same server, in one process like ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks.peers.progress import say
from benchmarks.processes.drains import Rate
from benchmarks.server_cpu import cpu_s
from dataloader.store.embedded.postgres import EmbeddedPostgres

VERSION: Final = "3.4.0"
SCRIPT: Final = Path(__file__).with_name("dbos_script.py")
WORKFLOWS: Final = 64
WAYS: Final = ("1", "8", "64", "async")
"""Number of threads that run workflows, or all on one event loop: the best result counts."""
TIMEOUT_S: Final = 300


def installed() -> Path | None:
    """Return the interpreter with DBOS, whose environment is kept, or None if it could not be installed."""
    folder = Path(tempfile.gettempdir(), f"dataloader-bench-dbos-{VERSION}")
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        say(f"DBOS {VERSION} goes to {folder}")
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=TIMEOUT_S)
            subprocess.run(
                [python, "-m", "pip", "install", "--quiet", f"dbos=={VERSION}"], check=True, timeout=TIMEOUT_S
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            say(f"DBOS is left out: {error}")
            return None
        done.touch()
    return python


@attrs.frozen
class Dbos:
    """DBOS on its own database."""

    python: Path
    server: EmbeddedPostgres

    def steps(self, way: str, steps: int) -> Rate:
        """Run 64 concurrent workflows, each of `steps` steps."""
        before = cpu_s(self.server.pid)
        found = self._run("steps", way, str(WORKFLOWS), str(steps))
        server_us = (cpu_s(self.server.pid) - before) / (WORKFLOWS * steps) * 1e6
        return Rate(found["per_s"], found["cpu_us"], server_us)

    def calls(self, number: int) -> list[float]:
        """Return the milliseconds of each call."""
        return list(self._run("calls", str(number))["ms"])

    def _run(self, *arguments: str) -> Any:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DBOS", "PG"))}
        result = subprocess.run(
            [self.python, SCRIPT, *arguments],
            env=inherited | {"DSN": self.server.dsn_of("dbos_bench")},
            stdout=subprocess.PIPE,
            check=True,
            timeout=TIMEOUT_S,
        )
        return json.loads(result.stdout)
