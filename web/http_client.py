"""Client through a running service, on asyncio and on Trio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dataloader.jobs.client.client import Client
from dataloader.web.http_performer import HttpPerformer
from dataloader.web.service_connection import open_service


@asynccontextmanager
async def open_http_client(url: str, token: str | None = None) -> AsyncIterator[Client]:
    """Open a client of the service at `url` for the duration of a block. Raises `ConfigError` for an invalid URL."""
    async with open_service(url, token) as service:
        yield Client.over(HttpPerformer(service))
