"""Answers of a view: a page to render, a redirect, a download, or a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import attrs


@attrs.frozen
class Page:
    """HTML to be rendered: a template of templates/, the page's title, and the values of the template.

    refresh_s: seconds after which the live part should be asked for again, as long as the page is looked at; None: it
        has none, or it changes no more.
    """

    template: str
    title: str
    values: Mapping[str, Any] = attrs.field(factory=dict)
    refresh_s: float | None = None
    status: int = 200
    cookies: Sequence[Cookie] = ()


@attrs.frozen
class Cookie:
    """A cookie to be set; without a value it is taken away."""

    kind: str
    value: str
    max_age_s: int


@attrs.frozen
class Undo:
    """A form that takes an act back: one of our own addresses for POST, and its fields."""

    path: str
    fields: Mapping[str, str]


@attrs.frozen
class Redirect:
    """After an act: the page to go to (a path of ours, with its query), and what it shall say has been done."""

    to: str
    said: str | None = None
    undo: Undo | None = None
    cookies: Sequence[Cookie] = ()


@attrs.frozen(kw_only=True)
class Download:
    """Bytes as they are, such as a file of the pages or a text. `cached`: the Cache-Control."""

    data: bytes
    media_type: str
    file_name: str | None = None
    cached: str | None = None


@attrs.frozen
class Stream:
    """A file that is sent while it is made; what fails in its pieces ends the connection."""

    pieces: AsyncGenerator[bytes]
    media_type: str
    file_name: str


PageAnswer = Page | Redirect | Download | Stream
