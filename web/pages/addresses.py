"""Our own addresses as a browser sees them: behind a proxy they may have another origin and begin with a path (U20).

`DL_PUBLIC_URL`, such as `https://tools.example.com/dataloader`, says both. The proxy may strip that path from requests
or not: it is taken off where it stands. Ids stand in paths, free names in queries: a name may be `..` or `a/b`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote, urlencode, urlsplit

import attrs

HOME: Final = "/ui"
CONCEALED: Final = f"{HOME}/concealed"
"""Where links lead that would have a secret in them."""
_MOST_BACK: Final = 2_000


@attrs.frozen
class PublicAddress:
    """Where browsers find us: `origin` (None: what the request's `Host` says), and the `base` path before all ours."""

    origin: str | None = None
    base: str = ""

    @classmethod
    def of(cls, url: str | None) -> PublicAddress:
        """That of a URL without query and fragment, which settings have checked."""
        if url is None:
            return cls()
        parts = urlsplit(url)
        default = {"http": ":80", "https": ":443"}[parts.scheme]
        host = parts.netloc.lower().removesuffix(default)
        return cls(f"{parts.scheme}://{host}", parts.path.rstrip("/"))

    @property
    def is_https(self) -> bool:
        """Whether browsers come by https."""
        return self.origin is not None and self.origin.startswith("https:")

    def without_base(self, path: str) -> str:
        """A request's path as our routes have it."""
        if self.base and (path == self.base or path.startswith(f"{self.base}/")):
            return path[len(self.base) :] or "/"
        return path

    def url(self, path: str, query: Mapping[str, object] | None = None) -> str:
        """The address of one of our paths, for a link; what is None or empty in the query is left out.

        A list is repeated. The path is one of our own, with its parts quoted by `quoted`.
        """
        pairs = [(name, str(one)) for name, value in (query or {}).items() for one in _many(value)]
        text = urlencode(pairs, quote_via=quote)
        return f"{self.base}{path}" + (f"?{text}" if text else "")


def _many(value: object) -> list[object]:
    if value is None or value == "":
        return []
    return sorted(value, key=str) if isinstance(value, list | tuple | set | frozenset) else [value]


def own_path(given: str | None) -> str:
    """Where to go back to: the path and query that a form gives if they are of our pages, else the first page."""
    if given is None or len(given) > _MOST_BACK or not given.isprintable() or "\\" in given:
        return HOME
    path = given.partition("#")[0].partition("?")[0]
    # A browser follows `..`, also written as `%2e%2e`, before it asks.
    if ".." in unquote(path).split("/"):
        return HOME
    return given if path == HOME or path.startswith(f"{HOME}/") else HOME
