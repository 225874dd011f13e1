"""Declarations of pages: the address, the view, the role that a visitor needs, and the types of its query and form.

A view is an async function. It gets a `Visit` and returns a `Page` (a template and its values), a `Redirect`, a
`Download` or a `Stream`. It raises the same errors as views of the API.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import attrs
from msgspec import Struct

from dataloader.jobs.roles import Role
from dataloader.web.pages.addresses import HOME
from dataloader.web.pages.page_answers import PageAnswer
from dataloader.web.routes import DEADLINE_S

View = Callable[..., Awaitable[PageAnswer]]


@attrs.frozen(kw_only=True)
class PageRoute:
    """Method of an address of the pages, and its view.

    role: the role that a visitor needs; None: open to all.
    query, form: their types; the view gets them as `query` and `form`. A form's fields are texts.
    deadline_s: the seconds in which it must answer.
    """

    method: str
    path: str
    view: View
    role: Role | None
    query: type[Struct] | None = None
    form: type[Struct] | None = None
    deadline_s: float = DEADLINE_S


class PageRoutes(list[PageRoute]):
    """Routes of one file of pages/, in the order of their declaration."""

    def show(
        self, path: str, *, role: Role | None = Role.READ, query: type[Struct] | None = None, **more: Any
    ) -> Callable[[View], View]:
        """Declare the decorated function as the view of a page."""
        return self._declare("GET", path, role=role, query=query, **more)

    def act(
        self, path: str, *, role: Role | None, form: type[Struct] | None = None, **more: Any
    ) -> Callable[[View], View]:
        """Declare the decorated function as the action of a form."""
        return self._declare("POST", path, role=role, form=form, **more)

    def _declare(self, method: str, path: str, **more: Any) -> Callable[[View], View]:
        def declare(view: View) -> View:
            self.append(PageRoute(method=method, path=f"{HOME}{path}", view=view, **more))
            return view

        return declare
