"""Common functions of walks over pages: following an address, and detecting that a walk never ends.

Pure functions for pagination.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from typing import Final
from urllib.parse import unquote_plus, urldefrag, urljoin

import attrs
import msgspec

from dataloader.flows.etl.formats.content import Content
from dataloader.flows.etl.sources.source import Request, Response, SourceError

# Possessive quantifiers, so that no header can make the match slow.
_NAME: Final = r"[\w!#$%&'*+.^`|~-]++"
_LINK: Final = re.compile(
    rf"""\s*+<([^<>]*+)>((?:\s*+;\s*+{_NAME}\s*+(?:=\s*+(?:"(?:[^"\\]|\\.)*+"|[^\s";,]*+))?)*+)\s*+(?:,|$)"""
)
_PARAM: Final = re.compile(rf""";\s*+({_NAME})\s*+(?:=\s*+(?:"((?:[^"\\]|\\.)*+)"|([^\s";,]*+)))?""")


EQUAL_PAGES: Final = 5
"""Number of consecutive pages with the same records that ends a walk whose pages may be equal by chance."""
_encode: Final = msgspec.json.Encoder(enc_hook=repr).encode


def follow(address: str, response: Response, content: Content, secrets: Collection[str], max_pages: int) -> Request:
    """Return the request for an address in a response, without the parameters that are `secrets`.

    Only the service knows the encoding of its addresses, so no other part is decoded and encoded again.
    """
    try:
        whole = urldefrag(urljoin(response.url, address.strip())).url
    except ValueError as error:
        raise SourceError(f"the address of the next page cannot be read: {error}", is_retryable=False) from error
    endpoint, mark, query = whole.partition("?")
    query = without(query, secrets)
    request = response.request
    # The parameters of a POST are its body, which is sent for each page.
    params = request.params if request.method == "POST" else {}
    if request.page == 1:
        # The first request may have only a path and parameters, which cannot be compared with an address.
        request = attrs.evolve(request, endpoint=response.url, params=params)
    following = attrs.evolve(
        request, endpoint=f"{endpoint}{mark if query else ''}{query}", params=params, page=request.page + 1
    )
    return check_circle(following, request, content, max_pages)


def without(query: str, names: Collection[str]) -> str:
    """Return a query without the parameters of these names. The others are unchanged."""
    parts = re.split("([&;])", query)
    kept = [
        (separator, part)
        for separator, part in zip(["", *parts[1::2]], parts[::2], strict=True)
        if unquote_plus(part.partition("=")[0]) not in names
    ]
    return "".join((separator if place else "") + part for place, (separator, part) in enumerate(kept))


def step(following: Request | None, response: Response, content: Content, max_pages: int) -> Request:
    """Return the next request of numbered pages. Raises `SourceError` if pages repeat the same records.

    An API that does not know the page's parameter would send the first page forever. Pages of a single record may be
    equal by chance, but not `EQUAL_PAGES` of them.
    """
    seen = _remembered(response.request, content, most=2 if count_of(content) > 1 else EQUAL_PAGES)
    if following is None:
        raise _endless(max_pages)
    return attrs.evolve(following, mark=str(seen))


def check_circle(following: Request, request: Request, content: Content, max_pages: int) -> Request:
    """Return the following request. Raises `SourceError` if the walk repeats a page.

    Uses Brent's algorithm: the mark is that of the page whose number is the last power of two, and each later page is
    compared with it. So one mark is enough to detect a cycle of any length within about three times its length. If the
    requests always differ, `EQUAL_PAGES` pages with the same records are a cycle as well.
    """
    if following.page > max_pages:
        raise _endless(max_pages)
    seen = _remembered(request, content, most=EQUAL_PAGES)
    mark = _mark_of_request(request) if request.page.bit_count() == 1 else _WalkMemory.of(request).request
    if _mark_of_request(following) in {mark, _mark_of_request(request)}:
        raise SourceError(
            f"the pages form a cycle: page {following.page} would repeat an earlier request", is_retryable=False
        )
    return attrs.evolve(following, mark=str(attrs.evolve(seen, request=mark)))


@attrs.frozen
class _WalkMemory:
    """State of a walk: the mark of an earlier request, and how many consecutive pages had the same `records`."""

    request: str = ""
    records: str = ""
    times: int = 0

    @classmethod
    def of(cls, request: Request) -> _WalkMemory:
        """Read the memory from a request. A request that an earlier release has stored has only a mark."""
        mark, _, rest = request.mark.partition(".")
        records, _, times = rest.partition(".")
        return cls(mark, records, int(times) if times.isdecimal() else 0)

    def __str__(self) -> str:
        return f"{self.request}.{self.records}.{self.times}"


def _remembered(request: Request, content: Content, *, most: int) -> _WalkMemory:
    """Return the memory of the walk after this page. Raises `SourceError` if `most` consecutive pages had its records.

    Bodies may differ by a request number or a time, so they are not compared. Pages without records are not counted:
    some APIs search a part of their data for each page and find nothing there.
    """
    before = _WalkMemory.of(request)
    if not count_of(content):
        return _WalkMemory(before.request)
    records = _mark_of_records(content)
    times = before.times + 1 if records == before.records else 1
    if times >= most:
        first, page = request.page - times + 1, request.page
        which = f"page {page} has" if times == 2 else f"pages {first} to {page} have"
        asked = ", ".join(request.params)
        about = f"supports the parameters {asked}" if asked else "links each page to the next one"
        raise SourceError(
            f"{which} the same records{f' as page {first}' if times == 2 else ''}; check that the API {about}",
            is_retryable=False,
            ends_walk=True,
        )
    return _WalkMemory(before.request, records, times)


def count_of(content: Content) -> int:
    """Return the number of received records, including broken ones."""
    return len(content.records) + len(content.broken)


def _mark_of_records(content: Content) -> str:
    told = [content.records, [[one.key, one.error, one.sample] for one in content.broken]]
    try:
        text = _encode(told)
    except (TypeError, ValueError, RecursionError):  # a user's format may return any value
        text = repr(told).encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _mark_of_request(request: Request) -> str:
    asked = msgspec.json.encode([request.endpoint, sorted(request.params.items()), request.method])
    return hashlib.blake2b(asked, digest_size=8).hexdigest()


def _endless(max_pages: int) -> SourceError:
    return SourceError(f"max_pages: there are more than {max_pages:,} pages", is_retryable=False)


def links(header: str) -> list[tuple[str, frozenset[str]]]:
    """Return the addresses in a `Link` header, each with its relations in lower case. Malformed text ends the list."""
    found: list[tuple[str, frozenset[str]]] = []
    position = 0
    while position < len(header) and (link := _LINK.match(header, position)):
        position = link.end()
        relations = ""
        for name, quoted, bare in _PARAM.findall(link[2]):
            if name.lower() == "rel" and not relations:
                relations = quoted or bare
        found.append((link[1], frozenset(relations.lower().split())))
    return found
