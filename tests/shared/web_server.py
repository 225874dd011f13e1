"""Real server on a real socket over a real database, without actors: the tests do the work of jobs by SQL."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import attrs
import httpx2
import trio
from performers import performer_of

from dataloader.jobs.client.bulk import Bulk
from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.client.limits import Limits
from dataloader.jobs.client.processes import ProcessClient
from dataloader.jobs.client.schedules import Schedules
from dataloader.jobs.contract import Operator
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.processes.answers import Answers
from dataloader.web.app import App, create_app
from dataloader.web.auth import Token
from dataloader.web.server.limits import STANDARD, HttpLimits
from dataloader.web.server.listen import open_listening_socket, serve_web
from dataloader.web.services import QueueLoad, Services, ServiceState, WebSettings

TOKENS = {"reader": "r" * 20, "operator": "o" * 20, "chief": "c" * 20}


@attrs.define
class Web:
    """Running server with a client and its listening socket. `change` sets fields of the process's state."""

    client: httpx2.AsyncClient
    url: str
    app: App
    services: Services
    sock: socket.socket
    telemetry: Telemetry
    stop: trio.Event
    stopped: trio.Event
    _state: list[ServiceState]

    def change(self, **fields: Any) -> None:
        self._state[0] = attrs.evolve(self._state[0], **fields)

    @property
    def jobs(self) -> Jobs:
        return Jobs(self.services.performer)

    @property
    def processes(self) -> ProcessClient:
        return ProcessClient(self.services.performer)

    @property
    def bulk(self) -> Bulk:
        return Bulk(self.services.performer)

    @property
    def schedules(self) -> Schedules:
        return Schedules(self.services.performer)

    @property
    def limits(self) -> Limits:
        return Limits(self.services.performer)

    async def trigger(self, **fields: Any) -> str:
        body = {"queue": "q", "task": "t", "lock_key": "k"} | fields
        answer = await self.client.post("/api/v1/jobs/trigger", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["job_id"]


def all_tokens() -> tuple[Token, ...]:
    roles = {"reader": "read", "operator": "operate", "chief": "admin"}
    return tuple(Token.from_secret(name, role, TOKENS[name]) for name, role in roles.items())


def bearer(name: str) -> dict[str, str]:
    """Return the header with the token of this name."""
    return {"Authorization": f"Bearer {TOKENS[name]}"}


async def cookie_of(web: Web, name: str) -> dict[str, str]:
    """Sign in to the pages by the token of this name, and return the header with the cookie."""
    signed = await web.client.post("/ui/sign-in", data={"token": TOKENS[name]}, headers={"Origin": web.url})
    web.client.cookies.clear()
    return {"Cookie": signed.headers["Set-Cookie"].partition(";")[0]}


@asynccontextmanager
async def open_server(
    dsn: str,
    *,
    default_lease_s: int = 60,
    reread_s: float = 2.0,
    limits: HttpLimits = STANDARD,
    tasks: Any = None,
    **settings: Any,
) -> AsyncIterator[Web]:
    """Run a server for the database at `dsn`; `tasks` are its known tasks, `settings` those of `WebSettings`.

    `limits` are those of the HTTP server. No listener runs, so a wait sees a change by its next read: at least every
    `reread_s` seconds.
    """
    telemetry = Telemetry()
    state = [
        ServiceState(
            version="1.2.3",
            worker="host:1",
            started_at=datetime.now(UTC),
            uptime_s=1.0,
            draining=False,
            queues={"q": QueueLoad(4, 1)},
            listener_connected=True,
            store_ready=True,
        )
    ]
    options = DatabaseOptions(dsn=dsn, connect_timeout_s=3, statement_timeout_s=5)
    async with open_database(options) as database, trio.open_nursery() as nursery:
        services = Services(
            performer=performer_of(
                database,
                Operator("the process"),
                default_lease_s=default_lease_s,
                reread_s=reread_s,
                draining=lambda: state[0].draining,
                answers=Answers(database, reread_s=reread_s),
            ),
            tasks=tasks or {},
            settings=WebSettings(**settings),
            state=lambda: state[0],
            measures=telemetry.measures,
            http_limits=limits,
        )
        app = create_app(services)
        stop, stopped = trio.Event(), trio.Event()
        sock = open_listening_socket("127.0.0.1", 0, stalled_after_s=1)

        async def serve(*, task_status: Any) -> None:  # noqa: ASYNC128 - serve_web calls started
            await serve_web(app, sock, shutdown=stop.wait, task_status=task_status)
            stopped.set()

        [url] = await nursery.start(serve)
        with sock:
            async with httpx2.AsyncClient(base_url=url, timeout=20, verify=False) as client:
                yield Web(client, url, app, services, sock, telemetry, stop, stopped, state)
        stop.set()
