"""Dask cluster of processes on this machine, in a separate process: `dask_cluster.py WORKERS THREADS PORT TLS`.

TLS is the file of its certificate, key and authority, or empty. It prints the scheduler's address, and ends when its
standard input ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

from distributed import LocalCluster, Security


@contextmanager
def dask_cluster(workers=2, threads=1, *, port=0, tls="", without=()):
    """Run a cluster; yield its process, whose `address` is the scheduler's. `process.pid` is the scheduler, too.

    `without` names the parts that cannot import the package: `SCHEDULER`, `WORKER`.
    """
    missing = {f"DASK_DISTRIBUTED__{part}__PRELOAD": str(Path(__file__).with_name("without_us.py")) for part in without}
    process = subprocess.Popen(
        [sys.executable, __file__, str(workers), str(threads), str(port), str(tls)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | missing,
    )
    try:
        process.address = json.loads(process.stdout.readline())["address"]
        yield process
    finally:
        with suppress(OSError):
            process.send_signal(signal.SIGCONT)
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def answer_with(dask_worker, changed):
    """Change a worker's answers to services; this function is called in the worker."""

    def changing(real):
        async def answer(**asked):
            return await real(**asked) | changed

        return answer

    for name in ("dataloader_give", "dataloader_take"):
        dask_worker.handlers[name] = changing(dask_worker.handlers[name])


def main() -> None:
    """Serve the cluster."""
    security = None
    if tls := sys.argv[4]:
        parts = ("scheduler", "worker", "client")
        certificates = {f"tls_{part}_cert": tls for part in parts}
        security = Security(require_encryption=True, tls_ca_file=tls, **certificates)
    with LocalCluster(
        security=security,
        n_workers=int(sys.argv[1]),
        threads_per_worker=int(sys.argv[2]),
        scheduler_port=int(sys.argv[3]),
        processes=True,
        dashboard_address=None,
        memory_limit=0,
    ) as cluster:
        print(json.dumps({"address": cluster.scheduler_address}), flush=True)  # noqa: T201
        sys.stdin.read()


if __name__ == "__main__":
    main()
