"""HTTP APIs as sources: an address, parameters by window, pages, a format.

A request gets its complete response, within its deadline and its maximum bytes, or it has failed. This module sends no
request twice: the pipeline retries, pauses and follows redirects. Redirects and links to the next page may lead only to
the declared host, or to `allowed_hosts`. http_client.py sends the requests.
"""

from __future__ import annotations

import io
import ssl
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import Any, Final, Literal

import attrs
import httpx2

from dataloader.flows.etl.declare import option_checks
from dataloader.flows.etl.formats.content import Format
from dataloader.flows.etl.formats.json_format import Json
from dataloader.flows.etl.formats.packed_format import Compressed
from dataloader.flows.etl.sources import retry_after
from dataloader.flows.etl.sources.credentials import Auth
from dataloader.flows.etl.sources.http_body import is_compressed
from dataloader.flows.etl.sources.http_client import (
    NO_CONTENT,
    Hop,
    HttpConnection,
    charset_of,
    is_redirect,
    is_same_place,
    open_connection,
)
from dataloader.flows.etl.sources.pagination import Pages
from dataloader.flows.etl.sources.routing import Routing
from dataloader.flows.etl.sources.source import SAMPLE, Page, Request, Response, Source, SourceError, Window

MIB: Final = 2**20

Meaning = Literal["empty", "retry", "fail"]
"""Meaning of a response's status: "empty" for no records, "retry" to send it again, "fail" for a final failure."""
_MEANINGS: Final = ("empty", "retry", "fail")


def _check_url(_instance: Any, attribute: attrs.Attribute[str], value: str) -> None:
    allowed = "an address such as https://api.example.org/v1, without user, query and fragment"
    try:
        url = httpx2.URL(value)
    except (httpx2.InvalidURL, TypeError):
        raise option_checks.refuse(attribute.name, value, allowed) from None
    if url.scheme not in {"http", "https"} or not url.host or url.query or url.fragment:
        raise option_checks.refuse(attribute.name, value, allowed)
    if url.userinfo:
        raise option_checks.refuse(
            attribute.name, value, f"{allowed} (the user belongs in auth=Auth.basic(user, password))"
        )


def _as_hosts(value: str | Iterable[str]) -> frozenset[str]:
    return frozenset((value,) if isinstance(value, str) else value)


def _check_headers(_instance: Any, attribute: attrs.Attribute[Any], value: Mapping[str, str]) -> None:
    for name in value:
        if name.lower() in {"authorization", "proxy-authorization", "cookie"}:
            raise option_checks.refuse(attribute.name, name, "headers without secrets, which belong in auth=")


def _check_statuses(_instance: Any, attribute: attrs.Attribute[Any], value: Mapping[int, Meaning]) -> None:
    for status, meaning in value.items():
        if type(status) is not int or not 201 <= status <= 599 or meaning not in _MEANINGS:
            allowed = 'statuses from 201 to 599 that mean "empty", "retry" or "fail"'
            raise option_checks.refuse(attribute.name, {status: meaning}, allowed)


@attrs.frozen
class Http(Source):
    """HTTP API.

    Args:
        url: address that all endpoints begin with.
        endpoint: path after the address, or a `Routing` of windows to two paths.
        params: the parameters, or a function that takes a window and returns them; None leaves a parameter out. They
            are stored with failed requests, so they must not have secrets. With POST they are the
            body, a JSON object.
        pages: pagination strategy; None if one response has all records.
        format: format of a response.
        headers: headers of each request.
        auth: credentials; see `Auth`.
        name: name of the supplier, for pauses and rate limits; by default the host.
        method: GET or POST.
        statuses: service-specific meanings of statuses, such as `{404: "empty"}` for a service that reports no records
            by a 404. "retry" sends the request again, as after a 503; "fail" does not, as after a 400.
        timeout_s: seconds for a whole response, from the connection to the last byte, if less than the pipeline's
            `request_timeout`.
        max_body_bytes: maximum unpacked bytes of a response; more are an error.
        allowed_hosts: other hosts to which redirects and links to the next page may lead. They receive neither `auth`
            nor `headers`.
        ends_with_connection: accepts a response without a length, even if its format (unlike JSON, XML or an archive)
            does not show whether a part is missing. Otherwise such a response is a retryable error.
        tls: certificate authorities to trust, such as a private one; by default those of the system.

    A proxy is used if the environment names one (HTTPS_PROXY, NO_PROXY).
    """

    url: str = attrs.field(validator=_check_url)
    endpoint: str | Routing = attrs.field(default="", kw_only=True)
    params: Mapping[str, Any] | Callable[[Window], Mapping[str, Any]] = attrs.field(factory=dict, kw_only=True)
    pages: Pages | None = attrs.field(default=None, kw_only=True)
    format: Format = attrs.field(factory=Json, kw_only=True)
    headers: Mapping[str, str] = attrs.field(
        factory=dict, kw_only=True, repr=lambda headers: str(list(headers)), validator=_check_headers
    )
    auth: Auth = attrs.field(factory=Auth, kw_only=True)
    name: str = attrs.field(kw_only=True, validator=option_checks.nonempty_text)
    method: str = attrs.field(default="GET", kw_only=True, validator=attrs.validators.in_(("GET", "POST")))
    statuses: Mapping[int, Meaning] = attrs.field(factory=dict, kw_only=True, validator=_check_statuses)
    timeout_s: float | None = attrs.field(
        default=None, kw_only=True, validator=attrs.validators.optional(option_checks.positive_seconds)
    )
    max_body_bytes: int = attrs.field(default=256 * MIB, kw_only=True, validator=option_checks.whole_from(1))
    allowed_hosts: frozenset[str] = attrs.field(default=frozenset(), converter=_as_hosts, kw_only=True)
    ends_with_connection: bool = attrs.field(default=False, kw_only=True)
    tls: ssl.SSLContext | None = attrs.field(default=None, kw_only=True, repr=False)

    @name.default
    def _host(self) -> str:
        return httpx2.URL(self.url).host

    @property
    def needs_answer(self) -> bool:
        """Return True with pages, or if a response can report a failure."""
        return self.pages is not None or self.format.reports_errors

    def open(self) -> AbstractAsyncContextManager[HttpConnection]:
        """Open a client with its connections, for the duration of a block."""
        return open_connection(self)

    async def requests(self, window: Window) -> AsyncGenerator[Request, None]:
        """Yield the first request of the window's walk, or of both walks if the window crosses a routing's boundary."""
        for endpoint, part in self._walks(window):
            params = dict(self.params(part) if callable(self.params) else self.params)
            request = Request(
                endpoint=endpoint, params=params if self.method == "POST" else _query(params), method=self.method
            )
            yield request if self.pages is None else self.pages.first(request)

    def redirected(self, response: Response) -> Request | None:
        """Return the request for a redirect's target. Raises `SourceError` for another host, and for a POST."""
        request = response.request
        if response.status in self.statuses or not is_redirect(response.status, response.headers):
            return None
        if request.method != "GET":
            raise self.error(
                request, f"status {response.status}: redirects of a POST are not supported", is_retryable=False
            )
        try:
            leads_to = httpx2.URL(response.url).join(response.headers["location"])
        except httpx2.InvalidURL as error:
            raise self.error(request, f"invalid URL: {error}", is_retryable=False) from error
        whole = self.resolve(str(leads_to))
        endpoint = whole.copy_with(userinfo=b"", query=None, fragment=None)
        return Hop(endpoint=str(endpoint), key=request.key, page=request.page, mark=request.mark, whole=whole)

    def hide(self, text: str) -> str:
        """Return a text without the credentials."""
        return self.auth.hide(text)

    def error(self, request: Request, what: str, **fields: Any) -> SourceError:
        """Return a `SourceError` of a request, without secrets."""
        asked = f"{request.method} {request.endpoint or self.url}"
        if request.params:
            asked += f"?{httpx2.QueryParams(request.params)}"
        return SourceError(self.auth.hide(f"{asked}: {what}"), **fields)

    def read(self, response: Response) -> Page:
        """Return the records and the request for the next page. Raises `SourceError`."""
        if response.status in NO_CONTENT or self.statuses.get(response.status) == "empty":
            return Page(records=[])
        format_ = self.format
        if isinstance(format_, Compressed) and is_compressed(response.headers.get("content-encoding", "")):
            format_ = format_.for_unpacked(response.body)
        content = format_.parse(io.BytesIO(response.body), charset_of(response.headers.get("content-type", "")))
        if self.pages is None:
            return Page(records=content.all(), broken=content.broken)
        following = self.pages.following(response, content.whole(), self.auth.params)
        if following is not None:
            # Refuse an address that is not allowed now, not after a pause.
            self.resolve(following.endpoint)
        return Page(records=content.records, broken=content.broken, following=following)

    def for_reading(self) -> Http:
        """Return the source without its parameters, which may be a function, and its certificate authorities."""
        return attrs.evolve(self, params={}, tls=None)

    def after_failure(self, request: Request) -> Request | None:
        """Return the next request of the walk, if pages are counted and their number is known."""
        return None if self.pages is None else self.pages.after_failure(request)

    def hint_s(self, response: Response) -> float:
        """Return the seconds, at most a day, until a quota that the response reports as exhausted is available."""
        return retry_after.rest_s(response.headers, now=datetime.now(UTC))

    def resolve(self, endpoint: str) -> httpx2.URL:
        """Return the URL of an endpoint or of a link in a response. Raises `SourceError` if it may not be requested."""
        own = httpx2.URL(self.url)
        try:
            url = httpx2.URL(endpoint)
        except httpx2.InvalidURL as error:
            raise SourceError(
                f"{self.auth.hide(endpoint)[:SAMPLE]!r} is not a URL: {error}", is_retryable=False
            ) from error
        if not url.scheme and not url.host:
            # Joined as text, so that escaped characters in a path, such as %2F, stay escaped.
            return httpx2.URL(f"{self.url.rstrip('/')}/{endpoint.lstrip('/')}") if endpoint else own
        if url.host == own.host and own.scheme == "https" and url.scheme == "http" and url.port is None:
            # Services behind a proxy often do not know that their clients use TLS.
            url = url.copy_with(scheme="https", port=own.port)
        may_be_asked = url.host in self.allowed_hosts and url.scheme in {"https", own.scheme}
        if not is_same_place(url, own) and not may_be_asked:
            raise SourceError(
                f"the request would go to {url.scheme}://{url.netloc.decode('ascii', 'replace').rpartition('@')[2]}, "
                f"which is neither {own.scheme}://{own.netloc.decode('ascii')} nor in allowed_hosts",
                is_retryable=False,
            )
        return url

    def _walks(self, window: Window) -> list[tuple[str, Window]]:
        return [(self.endpoint, window)] if isinstance(self.endpoint, str) else self.endpoint.walks(window)


def _query(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters for a query, without those that are None. Raises `ValueError` for other types of values."""
    for name, value in params.items():
        several = value if isinstance(value, (list, tuple)) else [value]
        if not all(part is None or isinstance(part, (str, int, float)) for part in several):
            raise option_checks.refuse(
                f"params.{name}", value, "a string, a number, a boolean, a list of these, or None"
            )
    return {name: value for name, value in params.items() if value is not None}
