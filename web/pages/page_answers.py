"""Answers of a view: a page to render, a redirect, a download, or a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import attrs


@attrs.frozen
class HtmlPage:
    """HTML to be rendered: a template of templates/, the page's title, and the values of the template.

    refresh_s: seconds after which the live part should be requested again while the page is visible; None if it has no
    live part, or no longer changes.
    """

    template: str
    title: str
    values: Mapping[str, Any] = attrs.field(factory=dict)
    refresh_s: float | None = None
    status: int = 200
    cookies: Sequence[Cookie] = ()


@attrs.frozen
class Cookie:
    """Cookie to be set; an empty value deletes it."""

    kind: str
    value: str
    max_age_s: int


@attrs.frozen
class Undo:
    """Form that undoes an action: one of our own addresses for POST, and its fields."""

    path: str
    fields: Mapping[str, str]


@attrs.frozen
class Redirect:
    """Redirect after an action: our path with its query, and the message about the action."""

    to: str
    said: str | None = None
    undo: Undo | None = None
    cookies: Sequence[Cookie] = ()


@attrs.frozen(kw_only=True)
class Download:
    """Bytes to send unchanged, such as a file of the pages or a text.

    cached: the Cache-Control.
    encoding: the Content-Encoding of `data`.
    """

    data: bytes
    media_type: str
    file_name: str | None = None
    cached: str | None = None
    encoding: str | None = None


@attrs.frozen
class Stream:
    """File that is sent while it is created; an error in its pieces ends the connection."""

    pieces: AsyncGenerator[bytes]
    media_type: str
    file_name: str


def json_file(value: Any, file_name: str) -> Download:
    """Return a JSON value as a file. It is made in a thread, since a megabyte takes a tenth of a second."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    return Download(data=text.encode(errors="backslashreplace"), media_type="application/json", file_name=file_name)


PageAnswer = HtmlPage | Redirect | Download | Stream
