"""PostgreSQL server that only one test uses, and may stop, crash or fill."""

from __future__ import annotations

import contextlib
from functools import partial

import attrs
import trio
from databases import SETTINGS, PostgresServer, raw_connection

from dataloader.store.embedded.cluster import Cluster
from dataloader.store.embedded.postgres import embedded_postgres


@attrs.frozen
class OwnServer:
    """Server for one test, with a migrated database at `dsn`."""

    dsn: str
    cluster: Cluster
    settings: dict[str, str]

    async def stop(self, mode):
        """Stop it as pg_ctl does: `fast` ends the sessions regularly, `immediate` is a crash."""
        stop = partial(self.cluster.programs.run_as_server, cwd=self.cluster.directory)
        await trio.to_thread.run_sync(stop, "pg_ctl", "stop", "--pgdata=.", f"--mode={mode}", "--wait")

    async def start(self):
        """Start it again, at the same address."""

        def start():
            with self.cluster.serialized():
                self.cluster.ensure_running(self.settings)

        await trio.to_thread.run_sync(start)

    async def fetch(self, sql, *args):
        """Run a query on a new connection."""
        async with raw_connection(self.dsn) as raw:
            return await raw.fetch(sql, *args)


@contextlib.contextmanager
def server_in(data_dir, **settings):
    """Run a server in a directory, with additional settings."""
    settings = SETTINGS | settings
    with embedded_postgres(data_dir, version=18, extra_settings=settings) as embedded:
        cluster = Cluster.in_directory(data_dir, 18)
        try:
            server = PostgresServer(embedded)
            with server.database("migrated") as database:
                server.close()  # a test may break the server, or take all its connections
                yield OwnServer(database.dsn, cluster, settings)
        finally:
            if cluster.state() == "busy":  # a test has failed before its end
                cluster.programs.run_as_server(
                    "pg_ctl", "stop", "--pgdata=.", "--mode=immediate", cwd=cluster.directory
                )
