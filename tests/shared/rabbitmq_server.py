"""Real RabbitMQ for tests, with a separate epmd and folder; Debian's, as `just rabbitmq` unpacks it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pika
from lacking import skip_without
from pika.exceptions import AMQPError

UNPACKED = Path(sys.prefix) / "rabbitmq"
START_S = 90
CONFIG = """\
loopback_users.guest = true
listeners.tcp.1 = 127.0.0.1:{port}
log.console = false
vm_memory_high_watermark.relative = 0.9
disk_free_limit.absolute = 1MB
"""
TLS = """\
listeners.ssl.1 = 127.0.0.1:{port}
ssl_options.certfile = {certificate}
ssl_options.keyfile = {certificate}
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@attrs.define
class RabbitMQ:
    """Node that keeps its data in `folder` over restarts."""

    folder: Path
    port: int = attrs.field(factory=free_port)
    tls_port: int = attrs.field(factory=free_port)
    certificate: Path | None = None
    """Certificate of TLS, with its key; None for no TLS."""
    _processes: list[subprocess.Popen[bytes]] = attrs.field(factory=list, init=False)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}"

    def start(self) -> None:
        home = next(iter(UNPACKED.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*")), None)
        if home is None:
            skip_without("RabbitMQ is not installed: run `just rabbitmq`")
        config = CONFIG.format(port=self.port)
        if self.certificate:
            config += TLS.format(port=self.tls_port, certificate=self.certificate)
        (self.folder / "rabbitmq.conf").write_text(config)
        epmd_port = free_port()
        environment = {
            "PATH": f"{UNPACKED}/usr/lib/erlang/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": ":".join(str(path) for path in UNPACKED.glob("**/lib/*-linux-gnu")),
            "HOME": str(self.folder),
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"test{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": f"{self.folder}/data",
            "RABBITMQ_LOG_BASE": f"{self.folder}/log",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{self.folder}/plugins",
            "RABBITMQ_CONFIG_FILE": f"{self.folder}/rabbitmq",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_ALLOW_INPUT": "1",  # the script becomes the node, so that signals reach it
        }
        with (self.folder / "out").open("ab") as out:
            for command in (["epmd", "-address", "127.0.0.1"], [f"{home}/sbin/rabbitmq-server", "-noinput"]):
                process = subprocess.Popen(  # each in a separate session, since the node has children
                    command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
                )
                self._processes.append(process)
        deadline = time.monotonic() + START_S
        while not self._answers():
            is_coming = self._processes[-1].poll() is None and time.monotonic() < deadline
            assert is_coming, (self.folder / "out").read_text()[-4_000:]
            time.sleep(0.1)

    def kill(self) -> None:
        """End all processes without a shutdown, as a failing machine does."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """Stop all answers for the duration of a block; connections stay open."""
        node = self._processes[-1].pid
        os.killpg(node, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(node, signal.SIGCONT)

    def _answers(self) -> bool:
        """Return True if it accepts logins; the port is open earlier."""
        try:
            pika.BlockingConnection(pika.URLParameters(self.url)).close()
        except AMQPError:
            return False
        return True


@contextlib.contextmanager
def a_rabbitmq(folder: Path, certificate: Path | None = None) -> Iterator[RabbitMQ]:
    """Run a node for the duration of a block; the test is skipped if RabbitMQ is missing."""
    server = RabbitMQ(folder, certificate=certificate)
    server.start()
    try:
        yield server
    finally:
        server.kill()
