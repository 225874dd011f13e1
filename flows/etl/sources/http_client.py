"""Client of an HTTP source: its connections and credentials, and single requests with complete responses.

Secrets are added in the transport, below all code that stores or logs a request, so that no log or error has them.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime
from email.message import Message
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.request import getproxies, proxy_bypass

import attrs
import httpx2
import msgspec
import trio

from dataloader.flows.etl.declare import option_checks
from dataloader.flows.etl.formats.content import Format
from dataloader.flows.etl.sources import retry_after
from dataloader.flows.etl.sources.credentials import Auth
from dataloader.flows.etl.sources.http_body import HttpBody
from dataloader.flows.etl.sources.page_walk import without
from dataloader.flows.etl.sources.source import SAMPLE, Request, Response, SourceError

CONNECTIONS: Final = 4
"""Maximum open connections to one source. One request is in progress; other connections may still be closing."""
KEPT_S: Final = 60.0
"""Seconds that an idle connection stays open, longer than the usual pause between requests."""
_PASSING: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_WHOLE_RANGE: Final = re.compile(r"bytes\s+0-(?P<last>[0-9]{1,18})/(?P<length>[0-9]{1,18})")
_WHOLE: Final = "dataloader.whole"
"""Extension of a request with its complete address. The request's own address lacks the secret parts."""
NO_CONTENT: Final = frozenset({HTTPStatus.NO_CONTENT, HTTPStatus.RESET_CONTENT})


@attrs.frozen(kw_only=True)
class Hop(Request):
    """Request for a redirect's target.

    `whole` is that address unchanged, with a signature that it may have. It is never stored or logged.
    """

    whole: httpx2.URL = attrs.field(repr=False)


class HttpDeclaration(Protocol):
    """Fields of an HTTP source that its client needs. `Http` describes them."""

    @property
    def url(self) -> str:
        """Address that all endpoints begin with."""

    @property
    def auth(self) -> Auth:
        """Credentials."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of each request."""

    @property
    def format(self) -> Format:
        """Format of a response."""

    @property
    def statuses(self) -> Mapping[int, str]:
        """Meaning of statuses to this service."""

    @property
    def timeout_s(self) -> float | None:
        """Seconds for a complete response."""

    @property
    def max_body_bytes(self) -> int:
        """Maximum bytes of a response, unpacked."""

    @property
    def ends_with_connection(self) -> bool:
        """Return whether a response may end without a length."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """Certificate authorities; None for those of the system."""

    def resolve(self, endpoint: str) -> httpx2.URL:
        """Return the URL of an endpoint. Raises `SourceError` if it may not be requested."""

    def error(self, request: Request, what: str, **fields: Any) -> SourceError:
        """Return the error of a request, without secrets."""


@asynccontextmanager
async def open_connection(source: HttpDeclaration) -> AsyncIterator[HttpConnection]:
    """Open a client with its connections, for the duration of a block."""
    limits = httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=1, keepalive_expiry=KEPT_S)
    tls = source.tls
    if tls is None:
        # Reading the system's authorities takes a tenth of a second.
        tls = await trio.to_thread.run_sync(httpx2.create_ssl_context)
    plain = httpx2.AsyncHTTPTransport(verify=tls, limits=limits, proxy=_proxy(httpx2.URL(source.url)))
    transport = _Signing(plain, source)
    headers = {"Accept-Encoding": "gzip", "User-Agent": "dataloader"}
    # No timeouts in the client: each request has one deadline.
    async with httpx2.AsyncClient(transport=transport, headers=headers, timeout=None) as client:
        yield HttpConnection(source, client)


@attrs.frozen
class HttpConnection:
    """Open client of a source."""

    source: HttpDeclaration
    client: httpx2.AsyncClient

    async def fetch(self, request: Request, *, timeout_s: float) -> Response:
        """Send a request once and return the whole response, which may be a redirect.

        Raises:
            SourceError: there is no complete response in time, it has more bytes than allowed, it is truncated, or its
                status is not a success. Retryable: errors of the network or of a busy service, and 408, 425, 429 and
                5xx, unless `statuses` has another meaning.
        """
        limit_s = timeout_s if self.source.timeout_s is None else min(timeout_s, self.source.timeout_s)
        body = HttpBody()
        began_at = trio.current_time()
        try:
            with trio.move_on_after(limit_s):
                answer = await self._ask(request, body)
                return Response(
                    request=request,
                    url=str(answer.url),
                    status=answer.status_code,
                    headers=dict(answer.headers),
                    body=body.value(),
                    took_s=trio.current_time() - began_at,
                )
        except httpx2.InvalidURL as error:
            raise self.source.error(request, f"invalid URL: {error}", is_retryable=False) from error
        except httpx2.RequestError as error:
            raise self.source.error(
                request, _text_or_cause_with_name(error), is_retryable=not _is_distrust(error)
            ) from error
        came = f"received {len(body):,} bytes" if len(body) else "received nothing"
        raise self.source.error(request, f"no complete answer within {limit_s:g} s; {came}", is_retryable=True)

    async def _ask(self, request: Request, body: HttpBody) -> httpx2.Response:
        """Send the request and fill the body of the response."""
        url, params = self.source.resolve(request.endpoint), request.params
        options: dict[str, Any] = {}
        if request.body is not None or request.method == "POST":
            sent, params = (params, {}) if request.body is None else (request.body, params)
            options = {"content": msgspec.json.encode(sent), "headers": {"Content-Type": "application/json"}}
        url = with_params(url, params)
        if isinstance(request, Hop):
            options["extensions"] = {_WHOLE: request.whole}
            if request.whole.userinfo:
                options["auth"] = request.whole.username, request.whole.password
        async with self.client.stream(request.method, url, **options) as answer:
            await self._take(request, answer, body)
            return answer

    async def _take(self, request: Request, answer: httpx2.Response, body: HttpBody) -> None:
        """Fill the body of a response. Raises `SourceError` if it is not a success, too large, or damaged."""
        meaning = self.source.statuses.get(answer.status_code)
        limit = self.source.max_body_bytes if meaning is None and answer.is_success else SAMPLE
        body.begin(answer.headers.get("content-encoding", ""), limit)
        async with aclosing(answer.aiter_raw()) as pieces:
            async for piece in pieces:
                if not await body.add(piece):
                    # Read to the end after closing: otherwise the client's generators would wait for the garbage
                    # collector. A closed connection returns only the data that has already arrived.
                    await answer.aclose()
                    with suppress(httpx2.RequestError):
                        async for _ in pieces:
                            pass
        body.end()
        if meaning == "empty" or (meaning is None and is_redirect(answer.status_code, answer.headers)):
            return
        if meaning is not None or not answer.is_success:
            raise self._refused(request, answer, body.value())
        if body.is_full:
            raise self.source.error(
                request, f"the answer has more than the limit of {limit:,} bytes", is_retryable=False
            )
        if answer.status_code == HTTPStatus.PARTIAL_CONTENT and self._is_part(answer.headers):
            told = answer.headers.get("content-range", "no Content-Range")
            what = f"status 206: the server sent only a part of the answer ({told}), although all of it was requested"
            raise self.source.error(request, what, is_retryable=True)
        if body.damage:
            raise self.source.error(request, f"the answer is damaged: {body.damage}", is_retryable=True)
        is_framed = not {"content-length", "transfer-encoding"}.isdisjoint(answer.headers) or body.has_end
        has_end = is_framed or self.source.format.has_end or answer.status_code in NO_CONTENT
        if not has_end and not self.source.ends_with_connection:
            what = (
                "the answer has no length and ends with its connection, so a part may be missing; "
                "set ends_with_connection=True to accept it"
            )
            raise self.source.error(request, what, is_retryable=True)

    def _is_part(self, headers: Mapping[str, str]) -> bool:
        """Return whether a response with status 206 is incomplete, unless the source's own headers request a range.

        Some services, such as PostgREST, use it for a range of records, whose unit is not bytes.
        """
        if any(name.lower() == "range" for name in self.source.headers):
            return False
        said = headers.get("content-range", "").strip().lower()
        if said and not said.startswith("bytes"):
            return False
        whole = _WHOLE_RANGE.fullmatch(said)
        return whole is None or int(whole["last"]) + 1 != int(whole["length"])

    def _refused(self, request: Request, answer: httpx2.Response, body: bytes) -> SourceError:
        status = answer.status_code
        sample = body.decode(charset_of(answer.headers.get("content-type", "")) or "utf-8", "replace")[:SAMPLE]
        rest_s = retry_after.rest_s(dict(answer.headers), now=datetime.now(UTC)) or None
        # Some services, such as GitHub, use this status for an exhausted quota.
        is_quota = status == HTTPStatus.FORBIDDEN and rest_s is not None
        is_retryable = status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR or is_quota
        if meaning := self.source.statuses.get(status):
            is_retryable = meaning == "retry"
        return self.source.error(
            request,
            f"status {status}{f': {sample}' if sample else ''}",
            is_retryable=is_retryable,
            retry_after_s=rest_s,
            status=status,
        )


class _Signing(httpx2.AsyncBaseTransport):
    """Adds the secrets to a request, below all code that logs or stores it."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, source: HttpDeclaration) -> None:
        self._inner = inner
        self._own = httpx2.URL(source.url)
        self._headers = {**source.headers, **source.auth.headers}
        self._params = source.auth.params

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url, headers = request.extensions.get(_WHOLE, request.url), request.headers.copy()
        if is_same_place(url, self._own):
            headers.update(self._headers)
            url = with_params(url, self._params)
        signed = httpx2.Request(
            request.method, url, headers=headers, stream=request.stream, extensions=request.extensions
        )
        return await self._inner.handle_async_request(signed)

    async def aclose(self) -> None:
        await self._inner.aclose()


def with_params(url: httpx2.URL, params: Mapping[str, Any]) -> httpx2.URL:
    """Return the URL with these parameters instead of those of the same names. The rest of its query is unchanged."""
    if not params:
        return url
    kept = without(url.query.decode("ascii"), params)
    added = str(httpx2.QueryParams(params))
    return url.copy_with(query="&".join(part for part in (kept, added) if part).encode("ascii"))


def is_redirect(status: int, headers: Mapping[str, str]) -> bool:
    """Return whether a response is a redirect."""
    return status in _REDIRECTS and "location" in headers


def is_same_place(url: httpx2.URL, other: httpx2.URL) -> bool:
    """Return whether two URLs have the same origin: scheme, host and port."""
    ports = {"http": 80, "https": 443}
    return (url.scheme, url.host, url.port or ports.get(url.scheme)) == (
        other.scheme,
        other.host,
        other.port or ports.get(other.scheme),
    )


def _proxy(url: httpx2.URL) -> str | None:
    """Return the proxy that the environment names for this address."""
    if proxy_bypass(url.host):
        return None
    proxies = getproxies()
    return proxies.get(url.scheme) or proxies.get("all")


def charset_of(content_type: str) -> str | None:
    """Return the encoding that a `Content-Type` names, if it is known."""
    message = Message()
    message["content-type"] = content_type
    charset = message.get_param("charset")
    return charset if isinstance(charset, str) and option_checks.is_charset(charset) else None


def _text_or_cause_with_name(error: BaseException) -> str:
    """Return the error's name and text, or the text of its cause if it has none."""
    said: BaseException | None = error
    while said is not None and not str(said):
        said = said.__cause__ or said.__context__
    return type(error).__name__ if said is None else f"{type(error).__name__}: {said}"


def _is_distrust(error: BaseException) -> bool:
    """Return whether the connection failed because of an untrusted certificate. A retry would not help."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
