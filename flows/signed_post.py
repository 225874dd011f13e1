"""POSTs signed JSON to an address of the settings: within a deadline, to that address and no other."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final, TypeAlias

import httpx2
import trio

from dataloader.jobs.loopback import is_loopback
from dataloader.jobs.secrets.known_secrets import KnownSecrets
from dataloader.jobs.text import storable_text

MAX_ANSWER: Final = 2_000
"""Bytes that are read of an answer, for the error."""
SECRET_SEGMENT: Final = 8
"""Characters from which a part of an address's path or query is hidden by itself."""
Post: TypeAlias = Callable[[bytes, Mapping[str, str]], Awaitable[tuple[int, str]]]
"""Sends a body with headers of its own; the answer's status, and of one that is no success how its text begins."""


class NotReached(Exception):  # noqa: N818 - what became of it, not what went wrong here
    """There is no answer. The text has neither the address nor the cause's text, which may be secret."""


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """What `X-Dataloader-Signature` must be: HMAC-SHA256 of the timestamp, a full stop and the body."""
    return "v1=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def is_success(status: int) -> bool:
    """Whether the receiver has taken it."""
    return HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES


@asynccontextmanager
async def open_signed(url: str, secret: str, *, timeout_s: float) -> AsyncIterator[Post]:
    """Yield a function that POSTs to `url`, over connections that are kept for the length of the block.

    Each request has `timeout_s` seconds. Redirects are not followed, certificates are checked. It raises `NotReached`.
    An error's text has neither the address nor the signature, also if the receiver repeats them.
    """
    try:
        address = httpx2.URL(url)
    except (httpx2.InvalidURL, UnicodeError) as error:
        raise NotReached(f"can't be reached ({type(error).__name__})") from None
    secrets = [secret, *_secrets_of(address)]
    async with httpx2.AsyncClient(
        follow_redirects=False,
        verify=httpx2.create_ssl_context(),
        # A proxy of the environment is for what is elsewhere.
        trust_env=not is_loopback(address.host),
        timeout=timeout_s,
    ) as client:

        async def post(body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
            timestamp = str(int(datetime.now(UTC).timestamp()))
            signed = {
                "Content-Type": "application/json",
                "User-Agent": "dataloader",
                "X-Dataloader-Timestamp": timestamp,
                "X-Dataloader-Signature": signature(secret, timestamp, body),
            }
            try:
                with trio.fail_after(timeout_s):
                    status, text = await _send(client, address, body, {**signed, **headers})
            except trio.TooSlowError:
                raise NotReached(f"did not answer in {timeout_s:g} s") from None
            except (httpx2.TransportError, httpx2.InvalidURL, UnicodeError) as error:
                raise NotReached(f"can't be reached ({type(error).__name__})") from None
            known = KnownSecrets.of([*secrets, signed["X-Dataloader-Signature"]])
            return status, storable_text(known.hide(text), MAX_ANSWER)

        yield post


def _secrets_of(address: httpx2.URL) -> list[str]:
    """Return the parts of an address that may be secret: a receiver often repeats its path in an error."""
    path = address.raw_path.decode("ascii", "replace")
    segments = [part for part in re.split(r"[/?&=]", path) if len(part) >= SECRET_SEGMENT]
    return [str(address), path, path.partition("?")[0], *address.userinfo.decode().split(":"), *segments]


async def _send(
    client: httpx2.AsyncClient, address: httpx2.URL, body: bytes, headers: Mapping[str, str]
) -> tuple[int, str]:
    async with client.stream("POST", address, content=body, headers=headers) as answer:
        said = b""
        async with aclosing(answer.aiter_raw()) as chunks:
            async for chunk in chunks:
                said += chunk[:MAX_ANSWER]
                if len(said) >= MAX_ANSWER:
                    # Then read to the end: the client's own generators would wait for the garbage collector. From a
                    # closed connection no more arrives than what is here already.
                    await answer.aclose()
                    with suppress(httpx2.RequestError):
                        async for _ in chunks:
                            pass
    if answer.is_success:
        return answer.status_code, ""
    return answer.status_code, said[:MAX_ANSWER].decode(errors="replace")
