"""A page that asks before something is done: what will happen, what there is to choose, a button, and a way back.

With a script it opens as a dialog (`ui.confirm`), without one it is a page of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import attrs

from dataloader.jobs.ids import uuid7
from dataloader.web.pages.page_answers import Page

Kind = Literal["text", "number", "datetime-local", "checkbox", "area", "select"]

MOST_UNTYPED: Final = 1_000
"""An act on more jobs is done only if their number is typed."""


@attrs.frozen(kw_only=True)
class Field:
    """A field of a form; `options` are the values of a `select` and what they are called, or what a text may be."""

    name: str
    label: str
    kind: Kind = "text"
    value: str = ""
    hint: str | None = None
    options: Sequence[tuple[str, str]] = ()
    required: bool = False
    step: str | None = None


@attrs.frozen(kw_only=True)
class Question:
    """What is asked. `path` and `hidden` make the form that is sent; `back` is one of our own addresses.

    verb: the button's label.
    is_read: the form is not sent to act, but to show another page (GET).
    hidden, lists: hidden fields, with one value and with several.
    fault: what was wrong with the form that was sent before.
    told: lines of a list below the sentences, such as what a dry run has found.
    """

    title: str
    sentences: Sequence[str]
    path: str
    verb: str
    back: str
    fields: Sequence[Field] = ()
    hidden: Mapping[str, str | int | None] = attrs.field(factory=dict)
    lists: Mapping[str, Sequence[str]] = attrs.field(factory=dict)
    told: Sequence[object] = ()
    is_harsh: bool = False
    is_read: bool = False
    fault: str | None = None

    @property
    def page(self) -> Page:
        """The page that asks."""
        return Page("ask.html", self.title, {"ask": self})


def once() -> str:
    """An id for a form: it becomes the id of the job that the form adds, so that a form sent twice adds one."""
    return str(uuid7())
