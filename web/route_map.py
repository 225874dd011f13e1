"""Addresses of the app, compiled folder by folder at the first request for an address of a folder.

Werkzeug takes 0.2 ms for each route, 40 ms for all of them. That would delay the first claim of a process, and most
processes never serve the admin pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, Final

from quart.routing import QuartMap
from quart.wrappers.base import BaseRequestWebsocket
from werkzeug.routing import MapAdapter, Rule, RuleFactory

_DEPTHS: Final = MappingProxyType({"api": 3, "ui": 2})
"""Number of segments of a folder's address, by its first segment; one for all others."""


class RouteMap(QuartMap):
    """Quart's map of addresses; a route is added to it at the first request for its folder.

    The folder of an address is its first segments: `/api/v1/jobs`, `/ui/jobs`, `/health`. These segments must be fixed
    in each route, so that all routes that can match an address are in its folder.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Create an empty map; the arguments are those of Quart's map."""
        self._later: dict[str, list[RuleFactory]] = {}
        super().__init__(*args, **options)

    def add(self, rulefactory: RuleFactory) -> None:
        """Keep a route until the first request for its folder.

        Raises `ValueError` for a route with a variable in the address of its folder.
        """
        if not isinstance(rulefactory, Rule) or "<" in (folder := _folder(rulefactory.rule)):
            raise ValueError(f"{rulefactory}: the segments of a folder must not be variable")
        self._later.setdefault(folder, []).append(rulefactory)

    def bind_to_request(
        self, request: BaseRequestWebsocket, subdomain: str | None, server_name: str | None
    ) -> MapAdapter:
        """Add the routes of the request's folder, then bind the map as Quart does."""
        self._add_folder(_folder(request.path))
        return super().bind_to_request(request, subdomain, server_name)

    def iter_rules(self, endpoint: Any = None) -> Iterator[Rule]:
        """Iterate over all routes."""
        for folder in list(self._later):
            self._add_folder(folder)
        return super().iter_rules(endpoint)

    def _add_folder(self, folder: str) -> None:
        for rule in self._later.pop(folder, ()):
            super().add(rule)


def _folder(path: str) -> str:
    """Return the address of the folder that `path` is in."""
    segments = path.strip("/").split("/")
    return "/".join(segments[: _DEPTHS.get(segments[0], 1)])
