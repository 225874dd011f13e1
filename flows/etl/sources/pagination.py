"""Pagination strategies: how an HTTP API divides its records into pages, and how a walk finds the next page.

A strategy adds its parameters to the first request and finds the following request in a response. It has no state. The
memory of a walk (its page, a mark of an earlier one) is in its requests, so that each can be sent again separately. No
walk runs forever: it ends with an error when it repeats a page, by its request or its records, or has more than
`max_pages`. http.py decides whether another host may be requested.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, Protocol

import attrs

from dataloader.flows.etl.declare import option_checks
from dataloader.flows.etl.formats.content import MISSING, Content, describe_document, look_up
from dataloader.flows.etl.sources.page_walk import check_circle, count_of, follow, links, step
from dataloader.flows.etl.sources.source import Param, Request, Response, SourceError

MAX_PAGES: Final = 100_000


class Pages(Protocol):
    """Pagination strategy."""

    def first(self, request: Request) -> Request:
        """Return the first request of a walk, made from the source's request."""

    def following(self, response: Response, content: Content, secrets: Collection[str] = ()) -> Request | None:
        """Return the request for the page after this response, None at the end.

        `secrets` are names of parameters that are added when a request is sent. A service may repeat them in its links.
        They must not be stored.

        Raises `SourceError`, not retryable, if the response lacks a value that the walk needs, or the walk repeats a
        page.
        """

    def after_failure(self, request: Request) -> Request | None:
        """Return the request for the page after a failed one; None at the end, or if only its response would name it.

        So it is known only in a walk whose earlier responses had the total number of records.
        """


@attrs.frozen(kw_only=True)
class PageNumber:
    """Numbered pages.

    A walk ends at a page with fewer records than `size` or, with `total_path`, after `total` records.

    Args:
        param: parameter with the page's number.
        size_param: parameter with the number of records per page, None if the API has none.
        size: number of records per page.
        first_page: number of the first page, 1 or 0.
        total_path: path of the total number of records in the document. With it, a page before the end that is not full
            is an error: the API returns fewer records than `size`, so the walk would miss some.
        max_pages: maximum pages of a walk; more are an error.
    """

    param: str = attrs.field(default="page", validator=option_checks.nonempty_text)
    size_param: str | None = attrs.field(default="size", validator=option_checks.text_or_none)
    size: int = attrs.field(default=50, validator=option_checks.whole_from(1))
    first_page: int = attrs.field(default=1, validator=option_checks.whole_from(0))
    total_path: str | None = attrs.field(default=None, validator=option_checks.text_or_none)
    max_pages: int = attrs.field(default=MAX_PAGES, validator=option_checks.whole_from(1))

    def first(self, request: Request) -> Request:
        """Return the request for the first page."""
        return _with(request, {self.param: self.first_page} | _size_param(self.size_param, self.size))

    def following(
        self,
        response: Response,
        content: Content,
        secrets: Collection[str] = (),  # noqa: ARG002 - only links have them
    ) -> Request | None:
        """Return the request for the next number, None at the end."""
        count = count_of(content)
        total = _total(self.total_path, content.document)
        done = (response.request.page - 1) * self.size + count
        if done >= total if total is not None else count < self.size:
            return None
        if count < self.size:
            raise SourceError(
                f"page {response.request.page} has {count:,} records, not {self.size:,}, although {self.total_path} is "
                f"{total:,}; check that the API allows {self.size} records per page",
                is_retryable=False,
                ends_walk=count == 0,
            )
        return step(self._next(response.request, total), response, content, self.max_pages)

    def after_failure(self, request: Request) -> Request | None:
        """Return the request for the next number if the total is known and not reached; None after `max_pages`."""
        return self._next(request, request.total) if request.page * self.size < (request.total or 0) else None

    def _next(self, request: Request, total: int | None) -> Request | None:
        if request.page >= self.max_pages:
            return None
        return _with(request, {self.param: self.first_page + request.page}, page=request.page + 1, total=total)


@attrs.frozen(kw_only=True)
class Offset:
    """Pages that begin at a position.

    A walk ends at a page with fewer records than `size` or, with `total_path`, after `total` records. With
    `total_path`, the page after one that is not full begins where that page ended.

    Args:
        param: parameter with the position, counted from 0.
        size_param: parameter with the number of records per page, None if the API has none.
        size: number of records per page.
        total_path: path of the total number of records in the document.
        max_pages: maximum pages of a walk; more are an error.
    """

    param: str = attrs.field(default="offset", validator=option_checks.nonempty_text)
    size_param: str | None = attrs.field(default="limit", validator=option_checks.text_or_none)
    size: int = attrs.field(default=50, validator=option_checks.whole_from(1))
    total_path: str | None = attrs.field(default=None, validator=option_checks.text_or_none)
    max_pages: int = attrs.field(default=MAX_PAGES, validator=option_checks.whole_from(1))

    def first(self, request: Request) -> Request:
        """Return the request for position 0."""
        return _with(request, {self.param: 0} | _size_param(self.size_param, self.size))

    def following(
        self,
        response: Response,
        content: Content,
        secrets: Collection[str] = (),  # noqa: ARG002 - only links have them
    ) -> Request | None:
        """Return the request for the position after this page, None at the end."""
        count = count_of(content)
        total = _total(self.total_path, content.document)
        # A page with more than `size` records may have pieces of records among them. Do not skip records because of
        # these.
        done = self._offset(response.request) + max(count - content.unsure, min(count, self.size))
        if done >= total if total is not None else count < self.size:
            return None
        if count == 0:
            told = f"no records at {done:,}, although {self.total_path} is {total:,}"
            raise SourceError(told, is_retryable=False, ends_walk=True)
        return step(self._from(response.request, done, total), response, content, self.max_pages)

    def after_failure(self, request: Request) -> Request | None:
        """Return the request `size` records later if the total is known and not reached; None after `max_pages`."""
        following = self._offset(request) + self.size
        return self._from(request, following, request.total) if following < (request.total or 0) else None

    def _offset(self, request: Request) -> int:
        offset = request.params.get(self.param, 0)
        return offset if isinstance(offset, int) else 0

    def _from(self, request: Request, offset: int, total: int | None) -> Request | None:
        if request.page >= self.max_pages:
            return None
        return _with(request, {self.param: offset}, page=request.page + 1, total=total)


@attrs.frozen(kw_only=True)
class Cursor:
    """Pages that name the next one by a text or number, which the next request sends back. The last page names none.

    Args:
        param: parameter with the cursor.
        path: path of the next cursor in the document; missing, null or empty at the end.
        size_param: parameter with the number of records per page, None if the API has none.
        size: number of records per page.
        max_pages: maximum pages of a walk; more are an error.
    """

    param: str = attrs.field(default="cursor", validator=option_checks.nonempty_text)
    path: str = attrs.field(validator=option_checks.nonempty_text)
    size_param: str | None = attrs.field(default=None, validator=option_checks.text_or_none)
    size: int = attrs.field(default=50, validator=option_checks.whole_from(1))
    max_pages: int = attrs.field(default=MAX_PAGES, validator=option_checks.whole_from(1))

    def first(self, request: Request) -> Request:
        """Return the request without a cursor."""
        return _with(request, _size_param(self.size_param, self.size))

    def following(
        self,
        response: Response,
        content: Content,
        secrets: Collection[str] = (),  # noqa: ARG002 - only links have them
    ) -> Request | None:
        """Return the request with the cursor in the document."""
        cursor = look_up(content.document, self.path)
        if cursor is MISSING or cursor is None or cursor == "":
            return None
        if isinstance(cursor, bool) or not isinstance(cursor, (str, int)):
            raise SourceError(f"path: {self.path} is {describe_document(cursor)}, not a cursor", is_retryable=False)
        following = _with(response.request, {self.param: cursor}, page=response.request.page + 1)
        return check_circle(following, response.request, content, self.max_pages)

    def after_failure(self, request: Request) -> Request | None:  # noqa: ARG002 - as the others
        """Return None: only the failed response would name the next page."""
        return None


@attrs.frozen(kw_only=True)
class LinkHeader:
    """Pages whose header `Link` has the address of the next one, with `rel="next"` (RFC 8288).

    Args:
        max_pages: maximum pages of a walk; more are an error.
    """

    max_pages: int = attrs.field(default=MAX_PAGES, validator=option_checks.whole_from(1))

    def first(self, request: Request) -> Request:
        """Return the request unchanged."""
        return request

    def following(
        self,
        response: Response,
        content: Content,
        secrets: Collection[str] = (),
    ) -> Request | None:
        """Return the request for the address in the header."""
        for address, relations in links(response.headers.get("link", "")):
            if "next" in relations:
                return follow(address, response, content, secrets, self.max_pages)
        return None

    def after_failure(self, request: Request) -> Request | None:  # noqa: ARG002 - as the others
        """Return None: only the failed response would name the next page."""
        return None


@attrs.frozen(kw_only=True)
class NextUrl:
    """Pages whose document has the address of the next one, absolute or relative.

    Args:
        path: path of the address in the document; missing, null or empty at the end.
        max_pages: maximum pages of a walk; more are an error.
    """

    path: str = attrs.field(validator=option_checks.nonempty_text)
    max_pages: int = attrs.field(default=MAX_PAGES, validator=option_checks.whole_from(1))

    def first(self, request: Request) -> Request:
        """Return the request unchanged."""
        return request

    def following(self, response: Response, content: Content, secrets: Collection[str] = ()) -> Request | None:
        """Return the request for the address in the document."""
        address = look_up(content.document, self.path)
        if address is MISSING or address is None or address == "":
            return None
        if not isinstance(address, str):
            raise SourceError(f"path: {self.path} is {describe_document(address)}, not an address", is_retryable=False)
        return follow(address, response, content, secrets, self.max_pages)

    def after_failure(self, request: Request) -> Request | None:  # noqa: ARG002 - as the others
        """Return None: only the failed response would name the next page."""
        return None


def _with(request: Request, params: Mapping[str, Param], **changes: Any) -> Request:
    return attrs.evolve(request, params={**request.params, **params}, **changes)


def _size_param(name: str | None, size: int) -> dict[str, Param]:
    return {} if name is None else {name: size}


def _total(path: str | None, document: Any) -> int | None:
    if path is None:
        return None
    total = look_up(document, path)
    if isinstance(total, bool) or not isinstance(total, int) or total < 0:
        found = "nothing" if total is MISSING else describe_document(total)
        raise SourceError(f"total_path: {path} is {found}, not a number of records", is_retryable=False)
    return total
