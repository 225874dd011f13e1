"""Our addresses as a browser sees them: behind a proxy they may have another origin and begin with a path.

`DL_PUBLIC_URL`, such as `https://tools.example.com/dataloader`, defines both. The proxy may or may not strip that path
from requests: if it is present, it is removed here. IDs are in paths, free names in queries: a name may be `..` or
`a/b`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote, urlencode, urlsplit

import attrs

HOME: Final = "/ui"
CONCEALED: Final = f"{HOME}/concealed"
"""Target of links that would contain a secret."""
_MOST_BACK: Final = 2_000


@attrs.frozen
class PublicAddress:
    """Public address: `origin` (None: the request's `Host`), and the `base` path before all our paths."""

    origin: str | None = None
    base: str = ""

    @classmethod
    def of(cls, url: str | None) -> PublicAddress:
        """Return the address of a URL without query and fragment, which the settings have checked."""
        if url is None:
            return cls()
        parts = urlsplit(url)
        default = {"http": ":80", "https": ":443"}[parts.scheme]
        host = parts.netloc.lower().removesuffix(default)
        return cls(f"{parts.scheme}://{host}", parts.path.rstrip("/"))

    @property
    def is_https(self) -> bool:
        """True if browsers use https."""
        return self.origin is not None and self.origin.startswith("https:")

    def without_base(self, path: str) -> str:
        """Return a request's path as our routes have it."""
        if self.base and (path == self.base or path.startswith(f"{self.base}/")):
            return path[len(self.base) :] or "/"
        return path

    def url(self, path: str, query: Mapping[str, object] | None = None) -> str:
        """Return the address of one of our paths, for a link. Query values that are None or empty are left out.

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
    """Return the path and query that a form gives if they are of our pages, else the first page."""
    if given is None or len(given) > _MOST_BACK or not given.isprintable() or "\\" in given:
        return HOME
    path = given.partition("#")[0].partition("?")[0]
    # A browser resolves `..`, also written as `%2e%2e`, before it sends the request.
    if ".." in unquote(path).split("/"):
        return HOME
    return given if path == HOME or path.startswith(f"{HOME}/") else HOME
