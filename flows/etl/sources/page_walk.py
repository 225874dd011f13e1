"""What every walk over pages needs: following an address, and noticing that the walk would never end.

Pure functions for pagination.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from typing import Any, Final
from urllib.parse import parse_qsl, urldefrag, urljoin, urlsplit

import attrs
import msgspec

from dataloader.flows.etl.sources.source import Request, Response, SourceError

# Possessive quantifiers, so that no header can make the match slow.
_NAME: Final = r"[\w!#$%&'*+.^`|~-]++"
_LINK: Final = re.compile(
    rf"""\s*+<([^<>]*+)>((?:\s*+;\s*+{_NAME}\s*+(?:=\s*+(?:"(?:[^"\\]|\\.)*+"|[^\s";,]*+))?)*+)\s*+(?:,|$)"""
)
_PARAM: Final = re.compile(rf""";\s*+({_NAME})\s*+(?:=\s*+(?:"((?:[^"\\]|\\.)*+)"|([^\s";,]*+)))?""")


def follow(address: str, response: Response, secrets: Collection[str], max_pages: int) -> Request:
    """The request to an address that an answer names, without the parameters that are `secrets`."""
    try:
        whole = urldefrag(urljoin(response.url, address.strip())).url
    except ValueError as error:
        raise SourceError(f"the address of the next page can't be read: {error}", is_retryable=False) from error
    params: dict[str, Any] = {}
    for name, value in parse_qsl(urlsplit(whole).query, keep_blank_values=True):
        if name in secrets:
            continue
        if name not in params:
            params[name] = value
        elif isinstance(params[name], list):
            params[name].append(value)
        else:
            params[name] = [params[name], value]
    # The first request may have had only a path, with which the address is compared.
    request = attrs.evolve(response.request, endpoint=response.url.partition("?")[0])
    following = attrs.evolve(request, endpoint=whole.partition("?")[0], params=params, page=request.page + 1)
    return check_circle(following, request, max_pages)


def step(following: Request | None, response: Response, count: int, max_pages: int) -> Request:
    """The next request of numbered pages. Raises `SourceError` if a page repeats the one before.

    An interface that does not know the page's parameter would send the first page for ever.
    """
    mark = hashlib.blake2b(response.body, digest_size=8).hexdigest()
    # Two pages of a single record may well be equal.
    if count > 1 and mark == response.request.mark:
        page = response.request.page
        raise SourceError(
            f"page {page} is the same as page {page - 1}; does the interface know the parameters "
            f"{', '.join(response.request.params)}?",
            is_retryable=False,
            ends_walk=True,
        )
    if following is None:
        raise _endless(max_pages)
    return attrs.evolve(following, mark=mark)


def check_circle(following: Request, request: Request, max_pages: int) -> Request:
    """The following request. Raises `SourceError` if the walk has come to the same page before.

    By Brent's algorithm: the mark is that of the page whose number is the last power of two, and each later page is
    compared with it. A circle of any length is noticed within about three times its length, by one mark alone.
    """
    if following.page > max_pages:
        raise _endless(max_pages)
    mark = _mark(request) if request.page.bit_count() == 1 else request.mark
    if _mark(following) in {mark, _mark(request)}:
        raise SourceError(
            f"the walk goes in a circle: page {following.page} would repeat an earlier request", is_retryable=False
        )
    return attrs.evolve(following, mark=mark)


def _mark(request: Request) -> str:
    asked = msgspec.json.encode([request.endpoint, sorted(request.params.items()), request.method])
    return hashlib.blake2b(asked, digest_size=8).hexdigest()


def _endless(max_pages: int) -> SourceError:
    return SourceError(f"max_pages: the walk has not ended after {max_pages:,} pages", is_retryable=False)


def links(header: str) -> list[tuple[str, frozenset[str]]]:
    """The addresses in a `Link` header, each with its relations in lower case; what is malformed ends the list."""
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
