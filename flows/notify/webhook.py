"""Sends a notice to a webhook: JSON, signed, within a deadline, to that address and no other."""

from __future__ import annotations

import hashlib
import hmac
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final
from uuid import UUID

import httpx2
import msgspec
import trio

from dataloader.jobs.loopback import is_loopback
from dataloader.jobs.notices import Notice, WebhookTarget
from dataloader.jobs.outcomes import GiveUp
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.text import storable_text

TIMEOUT_S: Final = 15.0
MAX_ANSWER: Final = 2_000
"""Bytes that are read of an answer, for the error."""
_AGAIN: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


class NotTaken(Exception):  # noqa: N818 - what the webhook says, not what went wrong here
    """The webhook did not take a notice; it is tried again."""


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """What `X-Dataloader-Signature` must be: HMAC-SHA256 of the timestamp, a full stop and the body."""
    return "v1=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


async def send(target: WebhookTarget, notice: Notice, *, delivery: UUID) -> GiveUp | None:
    """Send `notice`; `delivery` is the same in each attempt. Raises `NotTaken` for what another attempt may mend."""
    body = msgspec.json.encode(notice)
    timestamp = str(int(datetime.now(UTC).timestamp()))
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "dataloader",
        "X-Dataloader-Delivery": str(delivery),
        "X-Dataloader-Timestamp": timestamp,
        "X-Dataloader-Signature": signature(target.secret, timestamp, body),
    }
    try:
        with trio.fail_after(TIMEOUT_S):
            status, said = await _post(target.url, headers, body)
    except trio.TooSlowError:
        raise NotTaken(f"the webhook {target.name} did not answer in {TIMEOUT_S:g} s") from None
    except (httpx2.TransportError, httpx2.InvalidURL, UnicodeError) as error:
        # Not the error's own text, nor as a cause: it may have the address, which may be a secret.
        raise NotTaken(f"the webhook {target.name} can't be reached ({type(error).__name__})") from None
    if HTTPStatus(200) <= status < HTTPStatus.MULTIPLE_CHOICES:
        return None
    message = f"the webhook {target.name} answers {status}: {said}".rstrip(": ")
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _AGAIN:
        raise NotTaken(message)
    return GiveUp(message)


async def _post(url: str, headers: dict[str, str], body: bytes) -> tuple[int, str]:
    """The answer's status, and of one that is no success how its text begins."""
    address = httpx2.URL(url)
    async with (
        httpx2.AsyncClient(
            follow_redirects=False,
            verify=httpx2.create_ssl_context(),
            # A proxy of the environment is for what is elsewhere.
            trust_env=not is_loopback(address.host),
            timeout=TIMEOUT_S,
        ) as client,
        client.stream("POST", address, content=body, headers=headers) as answer,
    ):
        said = b""
        if not answer.is_success:
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
    return answer.status_code, storable_text(mask_text(said[:MAX_ANSWER].decode(errors="replace")), MAX_ANSWER)
