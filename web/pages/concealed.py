"""Target of links that would need a name with a secret in it: no page shows one, nor does the API."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from dataloader.web.pages.addresses import CONCEALED, HOME
from dataloader.web.pages.page_answers import PageAnswer
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit
from dataloader.web.problems import ProblemError

pages: Final = PageRoutes()


@pages.show(CONCEALED.removeprefix(HOME))
async def show_concealed(_visit: Visit) -> PageAnswer:
    """Explain why there is no link."""
    raise ProblemError(
        HTTPStatus.NOT_FOUND,
        "This name contains a secret, so no page shows or links to it. If you know the name, type it into a filter.",
    )
