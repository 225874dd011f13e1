"""A visit of a page: the request, the visitor, and how links are made for it."""

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
from dataloader.web.server.asgi import Request
from dataloader.web.services import Services


@attrs.frozen(kw_only=True)
class Visit(Call):
    """A view's argument: a `Call`, the visitor and its address, how it wants to see the page, and which part."""

    visitor: Visitor
    preferences: Preferences
    public: PublicAddress
    path: str
    address: str
    part: str | None = None
    https: bool = False
    session: str | None = attrs.field(default=None, repr=False)

    def may(self, role: str) -> bool:
        """Tell whether the visitor's role is enough: `read`, `operate` or `admin`."""
        return self.visitor.may(Role[role.upper()])

    def conceals(self, *values: object) -> bool:
        """Tell whether a value has a secret that stands nowhere in the page: the visitor has not given it."""
        return any(
            isinstance(value, str)
            and mask_text(value) != value
            and value != self.here
            and not any(value in given for given in self.arguments.values())
            for value in values
        )

    def link(self, path: str, query: Mapping[str, object]) -> str:
        """The address of one of our paths, for a link: by a name with a secret in it nothing is linked."""
        values = [value for name, value in query.items() if name != "after"]
        return self.public.url(CONCEALED) if self.conceals(*values) else self.public.url(path, query)

    @property
    def here(self) -> str:
        """The path and query of this page, without `part`: where a form may lead back to."""
        given = {name: values for name, values in self.arguments.items() if name != "part"}
        return PublicAddress().url(self.path, given)


def visit_of(services: Services, request: Request, request_id: str) -> Visit:
    """Return the visit of a visitor who is not known yet."""
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
