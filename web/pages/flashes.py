"""Cookies of pages, and the message about an action that the next page shows once, with its undo."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import attrs
import msgspec
from itsdangerous import BadSignature, URLSafeTimedSerializer
from quart import Response

from dataloader.web.pages.addresses import HOME
from dataloader.web.pages.page_answers import Cookie, Redirect
from dataloader.web.pages.sessions import LASTS_S, cookie_name
from dataloader.web.pages.visit import Visit
from dataloader.web.server.asgi import HttpRequest

_FLASH_S: Final = 30
_MOST_SAID: Final = 1_000


def set_cookies(response: Response, cookies: Sequence[Cookie], visit: Visit) -> None:
    """Set the cookies, only for the pages and not readable for scripts."""
    for cookie in cookies:
        response.set_cookie(
            cookie_name(cookie.kind, visit.headers),
            cookie.value,
            max_age=cookie.max_age_s,
            path=f"{visit.public.base}{HOME}",
            secure=visit.https,
            httponly=True,
            samesite="Lax",
        )


def session_cookie(value: str) -> Cookie:
    """Return the cookie of a sign-in; "" ends it."""
    return Cookie("session", value, LASTS_S if value else 0)


def _flashes(visit: Visit) -> URLSafeTimedSerializer:
    return URLSafeTimedSerializer(visit.services.sessions.own_key, serializer=json)


def cookie_of_flash(answer: Redirect, visit: Visit) -> list[Cookie]:
    """Return the cookie that carries a redirect's message to the next page, if it has one."""
    if answer.said is None:
        return []
    undo = None if answer.undo is None else attrs.asdict(answer.undo)
    signed = _flashes(visit).dumps({"said": answer.said[:_MOST_SAID], "undo": undo})
    return [Cookie("said", signed if isinstance(signed, str) else signed.decode(), _FLASH_S)]


def flash_of(visit: Visit, request: HttpRequest) -> dict[str, Any] | None:
    """Return the message about the previous action, from a cookie that this process has signed."""
    cookie = request.cookies.get(cookie_name("said", visit.headers))
    if not cookie:
        return None
    try:
        return msgspec.convert(_flashes(visit).loads(cookie, max_age=_FLASH_S), dict[str, Any])
    except (BadSignature, msgspec.ValidationError):
        return {}
