"""Confirmation pages: what will happen, fields with choices, a button, and a way back.

With scripts it opens as a dialog (`ui.confirm`), without scripts as a separate page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import attrs

from dataloader.jobs.ids import uuid7
from dataloader.web.pages.page_answers import HtmlPage

Kind = Literal["text", "number", "datetime-local", "checkbox", "area", "select"]

MOST_UNTYPED: Final = 1_000
"""An operation on more jobs than this requires typing their number."""


@attrs.frozen(kw_only=True)
class FormField:
    """Form field; `options` are the values and labels of a `select`, or suggestions for a text.

    placeholder: the text of an empty field.
    """

    name: str
    label: str
    kind: Kind = "text"
    value: str = ""
    hint: str | None = None
    placeholder: str = ""
    options: Sequence[tuple[str, str]] = ()
    required: bool = False
    step: str | None = None


@attrs.frozen(kw_only=True)
class Question:
    """Confirmation question. `path` and `hidden` make the form that is sent; `back` is one of our own addresses.

    verb: the button's label.
    is_read: the form does not act, but shows another page (GET).
    hidden, lists: hidden fields, with one value and with several.
    fault: the error of the form that was sent before.
    keep: the label of the way back, which says what stays as it is.
    told: lines of a list below the sentences, such as the results of a dry run.
    """

    title: str
    sentences: Sequence[str]
    path: str
    verb: str
    back: str
    fields: Sequence[FormField] = ()
    hidden: Mapping[str, str | int | None] = attrs.field(factory=dict)
    lists: Mapping[str, Sequence[str]] = attrs.field(factory=dict)
    told: Sequence[object] = ()
    is_harsh: bool = False
    is_read: bool = False
    fault: str | None = None
    keep: str = "Back"

    @property
    def page(self) -> HtmlPage:
        """Page that asks the question."""
        return HtmlPage("ask.html", self.title, {"ask": self})


def once() -> str:
    """Return an ID for a form: it becomes the ID of the job that the form adds, so that a form sent twice adds one."""
    return str(uuid7())
