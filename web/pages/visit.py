"""Visit of a page: the request, the visitor, and how links are made for it."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from dataloader.jobs.contract import Operator
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.masking import mask_text
from dataloader.web.pages.addresses import CONCEALED, PublicAddress
from dataloader.web.pages.preferences import Preferences
from dataloader.web.pages.sessions import Visitor, cookie_name
from dataloader.web.routes import Call
from dataloader.web.server.asgi import HttpRequest
from dataloader.web.services import Services


@attrs.frozen(kw_only=True)
class Visit(Call):
    """Argument of a view: a `Call`, the visitor with address and preferences, and the requested part."""

    visitor: Visitor
    preferences: Preferences
    public: PublicAddress
    path: str
    address: str
    part: str | None = None
    https: bool = False
    session: str | None = attrs.field(default=None, repr=False)

    def may(self, role: str) -> bool:
        """Return True if the visitor's role includes `role`: `read`, `operate` or `admin`."""
        return self.visitor.may(Role[role.upper()])

    def conceals(self, *values: object) -> bool:
        """Return True if a value has a secret that the visitor has not given."""
        return any(
            isinstance(value, str)
            and mask_text(value) != value
            and value != self.here
            and not any(value in given for given in self.arguments.values())
            for value in values
        )

    def link(self, path: str, query: Mapping[str, object]) -> str:
        """Return the address of one of our paths, for a link. A query with a secret leads to `CONCEALED` instead."""
        values = [value for name, value in query.items() if name != "after"]
        return self.public.url(CONCEALED) if self.conceals(*values) else self.public.url(path, query)

    @property
    def here(self) -> str:
        """Path and query of this page, without `part`; a form may lead back to it."""
        given = {name: values for name, values in self.arguments.items() if name != "part"}
        return PublicAddress().url(self.path, given)


def visit_of(services: Services, request: HttpRequest, request_id: str) -> Visit:
    """Return the visit of a visitor who is not identified yet."""
    public = services.settings.public
    return Visit(
        services=services,
        operator=Operator("", request_id),
        arguments=dict(request.args.lists()),
        headers=request.headers,
        visitor=Visitor("", Role.READ, signed_in=False),
        preferences=Preferences.of(request.cookies.get(cookie_name("look", request.headers))),
        public=public,
        path=request.path,
        address=request.address,
        part=request.args.get("part"),
        https=public.is_https or request.scheme == "https",
        session=request.cookies.get(cookie_name("session", request.headers)),
    )
