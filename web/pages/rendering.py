"""Makes the response of a view's answer: a template as HTML, a part of one, a file, or a page for an error.

**Parts.** A block `part_NAME` of a template can be requested alone, by `?part=NAME`. This calls the same view, which
can skip values that the part does not show (`visit.part`), and returns the block's HTML without the frame. A page stays
up to date this way: static/live.js requests its live part repeatedly, with the `ETag` of the browser's version, and
gets 304 if nothing has changed. `Refresh-In` is the number of seconds until the next request, `Menu-Numbers` has the
numbers of the menu as JSON.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from time import perf_counter
from typing import Any, Final

import trio
from quart import Response

from dataloader.jobs.logger import get_logger
from dataloader.web.pages.env_color import env_color
from dataloader.web.pages.flashes import cookie_of_flash, flash_of, set_cookies
from dataloader.web.pages.page_answers import Cookie, Download, HtmlPage, PageAnswer, Redirect, Stream
from dataloader.web.pages.templates_environment import TEMPLATES, pieces_of_block
from dataloader.web.pages.visit import Visit
from dataloader.web.problems import ProblemError, problem_of
from dataloader.web.server.asgi import HttpRequest
from dataloader.web.server.streamed import StreamedResponse

log = get_logger(__name__)

HTML: Final = "text/html; charset=utf-8"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dl"
)
"""Allowed sources of a page: only our own files, and no inline scripts or styles."""
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    # With `no-referrer` a form's Origin would be `null`.
    "Referrer-Policy": "same-origin",
}
_MOST_COMPRESSED: Final = 512 << 10
"""Longer pages, in bytes, are sent as they are: compressing one takes too long."""
_PIECES: Final = 400
"""Pieces of a template after which other tasks may run."""


async def response_of(answer: PageAnswer, visit: Visit, request: HttpRequest) -> Response:
    """Return the response of a view's answer."""
    match answer:
        case HtmlPage():
            return await _rendered(answer, visit, request)
        case Redirect():
            response = Response(b"", HTTPStatus.SEE_OTHER, {"Location": visit.public.base + answer.to, **HEADERS})
            set_cookies(response, [*answer.cookies, *cookie_of_flash(answer, visit)], visit)
            return response
        case Stream():
            named = {"Content-Disposition": f'attachment; filename="{answer.file_name}"'}
            return StreamedResponse.of(answer.pieces, {**HEADERS, **named}, answer.media_type)
        case Download():
            headers = {**HEADERS, **({"Cache-Control": answer.cached} if answer.cached else {})}
            if answer.cached:
                headers["Vary"] = "Accept-Encoding"
            if answer.encoding is not None:
                headers["Content-Encoding"] = answer.encoding
            if answer.file_name is not None:
                headers["Content-Disposition"] = f'attachment; filename="{answer.file_name}"'
            return Response(answer.data, 200, headers, content_type=answer.media_type)


async def _rendered(page: HtmlPage, visit: Visit, request: HttpRequest) -> Response:
    flash = flash_of(visit, request) if visit.part is None else None
    context = _context(page, visit, flash, await _menu_numbers(visit))
    template = TEMPLATES.get_template(page.template)
    if visit.part is None:
        data, _ = await _rendering(template.generate(context))
        data, encoding = _compressed(data, visit)
        response = Response(data, page.status, {**HEADERS, **encoding}, content_type=HTML)
        if flash is not None:
            set_cookies(response, [Cookie("said", "", 0)], visit)
        set_cookies(response, page.cookies, visit)
        return response
    pieces = pieces_of_block(template, f"part_{visit.part}", context)
    if pieces is None:
        raise ProblemError(HTTPStatus.NOT_FOUND, f"This page has no part {visit.part[:60]!r}.")
    data, took_s = await _rendering(pieces)
    tag = f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'
    headers = {**HEADERS, "ETag": tag, "Menu-Numbers": json.dumps(context["numbers"])}
    if page.refresh_s is not None:
        headers["Refresh-In"] = f"{visit.services.pace.next_in(page.refresh_s, took_s):.2f}"
    if request.headers.get("If-None-Match") == tag:
        return Response(b"", HTTPStatus.NOT_MODIFIED, headers)
    return Response(data, page.status, headers, content_type=HTML)


def _compressed(data: bytes, visit: Visit) -> tuple[bytes, dict[str, str]]:
    """Return a page as it is sent, and its headers.

    The size of a compressed answer may tell of a secret beside a text that another site has chosen. So a page is only
    compressed for a request that no other site has caused.
    """
    varies = {"Vary": "Accept-Encoding, Sec-Fetch-Site"}
    is_own = visit.headers.get("Sec-Fetch-Site") in {"same-origin", "none"}
    if not is_own or "gzip" not in visit.headers.get("Accept-Encoding", "") or len(data) > _MOST_COMPRESSED:
        return data, varies
    return gzip.compress(data, compresslevel=5, mtime=0), {**varies, "Content-Encoding": "gzip"}


async def _menu_numbers(visit: Visit) -> Mapping[str, str]:
    """Return the numbers of the menu for a visitor who sees the menu."""
    return await visit.services.menu_numbers.latest() if visit.visitor.name else {}


def _context(
    page: HtmlPage, visit: Visit, flash: Mapping[str, Any] | None, numbers: Mapping[str, str]
) -> dict[str, Any]:
    """Return a template's values.

    `ui` has the macros, since a block rendered alone does not have its file's imports.
    """
    context = {
        **page.values,
        "visit": visit,
        "title": page.title,
        "refresh_s": page.refresh_s,
        "flash": flash,
        "numbers": numbers,
        "environment": visit.services.settings.environment,
        "env_color": env_color(visit.services.settings.environment),
        "version": visit.services.state().version,
        "server_time": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
    return context | {"ui": TEMPLATES.get_template("macros.html").make_module(context)}


async def _rendering(pieces: Iterator[str]) -> tuple[bytes, float]:
    """Return the rendered template, and the seconds that it took; other tasks may run meanwhile."""
    texts: list[str] = []
    took_s, since = 0.0, perf_counter()
    for index, piece in enumerate(pieces, 1):
        texts.append(piece)
        if index % _PIECES == 0:
            took_s += perf_counter() - since
            await trio.lowlevel.checkpoint()
            since = perf_counter()
    data = "".join(texts).encode()
    return data, took_s + perf_counter() - since


async def error_page(error: Exception, visit: Visit) -> Response:
    """Return the page for an error; for a part of a page, only its text."""
    problem = problem_of(error, starting=visit.services.state().starting)
    if problem is None:
        log.error("a page failed", path=visit.path, exc_info=error)
        problem = ProblemError(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            f"This is a bug. The log has the details under {visit.operator.request_id}.",
        )
    shown = problem.problem(visit.operator.request_id or "", visit.path)
    if visit.part is not None:
        lines = [shown.detail, *(f"{fault.path}: {fault.message}" for fault in shown.errors)]
        text = "\n".join(lines).encode()
        return Response(text, problem.status, {**HEADERS, **problem.headers}, content_type="text/plain; charset=utf-8")
    page = HtmlPage("error.html", shown.title, {"problem": shown})
    async with visit.services.turns.error_pages:
        data, _ = await _rendering(
            TEMPLATES.get_template(page.template).generate(
                _context(page, visit, None, visit.services.menu_numbers.last if visit.visitor.name else {})
            )
        )
    return Response(data, problem.status, {**HEADERS, **problem.headers}, content_type=HTML)
