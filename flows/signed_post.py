"""POSTs signed JSON to a configured address, with a deadline and to that address only."""

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
"""Maximum bytes that are read of an answer, for the error."""
SECRET_SEGMENT: Final = 8
"""Minimum length of a part of an address's path or query that is masked separately."""
Post: TypeAlias = Callable[[bytes, Mapping[str, str]], Awaitable[tuple[int, str]]]
"""Send a body with additional headers; return the status and, unless it is a success, the beginning of the answer's
text."""


class NotReached(Exception):  # noqa: N818 - result of the request, not an error of this program
    """The receiver did not answer. The text has neither the address nor the cause's text, which may be secret."""


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Return the value of `X-Dataloader-Signature`: HMAC-SHA256 of the timestamp, a full stop and the body."""
    return "v1=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def is_success(status: int) -> bool:
    """Return whether the receiver has accepted the request."""
    return HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES


@asynccontextmanager
async def open_signed(url: str, secret: str, *, timeout_s: float) -> AsyncIterator[Post]:
    """Yield a function that POSTs to `url`. It keeps its connections open for the duration of the block.

    Each request has a deadline of `timeout_s` seconds. Redirects are not followed, and certificates are checked. The
    function raises `NotReached` if there is no answer. The text of an error has neither the address nor the signature,
    even if the receiver repeats them.
    """
    try:
        address = httpx2.URL(url)
    except (httpx2.InvalidURL, UnicodeError) as error:
        raise NotReached(f"cannot be reached ({type(error).__name__})") from None
    secrets = [secret, *_secrets_of(address)]
    async with httpx2.AsyncClient(
        follow_redirects=False,
        verify=httpx2.create_ssl_context(),
        # Never send a local service's requests to a proxy of the environment.
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
                    status, text = await _post(client, address, body, {**signed, **headers})
            except trio.TooSlowError:
                raise NotReached(f"did not answer within {timeout_s:g} s") from None
            except (httpx2.TransportError, httpx2.InvalidURL, UnicodeError) as error:
                raise NotReached(f"cannot be reached ({type(error).__name__})") from None
            if text:
                known = KnownSecrets.of([*secrets, signed["X-Dataloader-Signature"]])
                text = storable_text(known.hide(text), MAX_ANSWER)
            return status, text

        yield post


def _secrets_of(address: httpx2.URL) -> list[str]:
    """Return the parts of an address that may be secret. Receivers often repeat their path in an error."""
    path = address.raw_path.decode("ascii", "replace")
    segments = [part for part in re.split(r"[/?&=]", path) if len(part) >= SECRET_SEGMENT]
    return [str(address), path, path.partition("?")[0], *address.userinfo.decode().split(":"), *segments]


async def _post(
    client: httpx2.AsyncClient, address: httpx2.URL, body: bytes, headers: Mapping[str, str]
) -> tuple[int, str]:
    async with client.stream("POST", address, content=body, headers=headers) as answer:
        said = b""
        async with aclosing(answer.aiter_raw()) as chunks:
            async for chunk in chunks:
                said += chunk[:MAX_ANSWER]
                if len(said) >= MAX_ANSWER:
                    # Read to the end after closing: otherwise the client's generators would wait for the garbage
                    # collector. A closed connection returns only the data that has already arrived.
                    await answer.aclose()
                    with suppress(httpx2.RequestError):
                        async for _ in chunks:
                            pass
    if answer.is_success:
        return answer.status_code, ""
    return answer.status_code, said[:MAX_ANSWER].decode(errors="replace")
