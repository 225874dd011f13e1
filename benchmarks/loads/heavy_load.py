"""Source and transform of the benchmark, which its processes import."""

from __future__ import annotations

import hashlib
import io
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from dataloader.flows.etl import Json
from dataloader.flows.etl.sources.source import Page, Request, Response, Source, Window

RECORDS = 100
"""Number of records of each page."""


@attrs.frozen
class Numbers(Source):
    """Pages that are available immediately."""

    pages: int

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Numbers]:
        yield self

    async def requests(self, window: Window) -> AsyncGenerator[Request, None]:
        del window
        for page in range(self.pages):
            yield Request(endpoint=str(page))

    async def fetch(self, request: Request, *, timeout_s: float) -> Response:
        del timeout_s
        await trio.lowlevel.checkpoint()
        first = int(request.endpoint) * RECORDS
        body = ",".join(
            f'{{"id": {first + n}, "name": "number {first + n}", "score": {n / 7}}}' for n in range(RECORDS)
        )
        return Response(request=request, url="", status=200, headers={}, body=f"[{body}]".encode(), took_s=0)

    def read(self, response: Response) -> Page:
        return Page(records=Json("").parse(io.BytesIO(response.body), None).all())


def busy(loops: int, record: Mapping[str, Any]) -> dict[str, Any]:
    number = record["id"]
    for n in range(loops):
        number = (number * 1_103_515_245 + n) % 2_147_483_648
    return {**record, "digest": hashlib.blake2b(b"%d" % number, digest_size=16).hexdigest()}
