"""Sends a notice to a webhook: signed JSON, with a deadline, to the configured address only."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final
from uuid import UUID

import msgspec

from dataloader.flows.signed_post import NotReached, is_success, open_signed
from dataloader.jobs.notices import Notice, WebhookTarget
from dataloader.jobs.outcomes import GiveUp

TIMEOUT_S: Final = 15.0
_AGAIN: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


class NotTaken(Exception):  # noqa: N818 - the webhook's answer, not an error of this program
    """The webhook did not accept the notice. It is sent again."""


async def send(target: WebhookTarget, notice: Notice, *, delivery: UUID, timeout_s: float = TIMEOUT_S) -> GiveUp | None:
    """Send `notice` and wait at most `timeout_s` seconds for the answer. `delivery` is the same in each attempt.

    Raises `NotTaken` for failures that another attempt may resolve. Returns `GiveUp` for the others.
    """
    body = msgspec.json.encode(notice)
    try:
        async with open_signed(target.url, target.secret, timeout_s=timeout_s) as post:
            status, said = await post(body, {"X-Dataloader-Delivery": str(delivery)})
    except NotReached as error:
        raise NotTaken(f"the webhook {target.name} {error}") from None
    if is_success(status):
        return None
    message = f"the webhook {target.name} returned {status}: {said}".rstrip(": ")
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _AGAIN:
        raise NotTaken(message)
    return GiveUp(message)
