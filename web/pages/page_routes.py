"""Declares pages, and serves every request to one of them in the same steps.

A view is a plain async function: it gets a `Visit` and returns a `Page` (a template and its values), a `Redirect`, a
`Download` or a `Stream`; it raises what views of the API raise. The steps: whose cookie → origin → decode query or form
→ run within a deadline → render. Errors become pages too.

**Parts.** A block `part_NAME` of a template can be asked for alone, by `?part=NAME`: the same view, which can leave out
what the part does not show (`visit.part`), and the block's HTML without the frame. So a page stays up to date: its live
part is asked for again and again (static/live.js), with the `ETag` of what the browser has, and answered 304 when
nothing changed. `Refresh-In` says in how many seconds to come again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from time import perf_counter
from typing import Any, Final
from urllib.parse import parse_qsl

import attrs
import msgspec
import trio
from itsdangerous import BadSignature, URLSafeTimedSerializer
from msgspec import Struct
from quart import Response

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import StoreError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.secrets.masking import mask_text
from dataloader.web.auth import Role
from dataloader.web.decoding import decode_query
from dataloader.web.pages.addresses import CONCEALED, HOME, PublicAddress
from dataloader.web.pages.preferences import Preferences
from dataloader.web.pages.sessions import LASTS_S, Visitor, check_origin, cookie_name
from dataloader.web.pages.templates_environment import TEMPLATES, pieces_of_block
from dataloader.web.problems import ProblemError, problem_of, too_busy
from dataloader.web.routes import DEADLINE_S, Call
from dataloader.web.server.asgi import Request
from dataloader.web.server.refusals import Refusal
from dataloader.web.server.streamed import StreamedResponse
from dataloader.web.services import Services

log = get_logger(__name__)

FORM: Final = "application/x-www-form-urlencoded"
HTML: Final = "text/html; charset=utf-8"
MOST_FORM: Final = 64 << 10
"""Bytes that a form may have."""
MOST_FIELDS: Final = 2_000
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dl"
)
"""What a page may load, and from whom: from us alone, and nothing that stands in the page itself (U19)."""
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    # With `no-referrer` a form's Origin would be `null`.
    "Referrer-Policy": "same-origin",
}
_PIECES: Final = 400
"""Pieces of a template after which other tasks get a turn."""
_FLASH_S: Final = 30
_MOST_SAID: Final = 1_000
SIGN_IN: Final = f"{HOME}/sign-in"


@attrs.frozen(kw_only=True)
class Visit(Call):
    """A view's argument: a `Call`, the visitor and its address, how it wants to see the page, and which part."""

    visitor: Visitor
    preferences: Preferences
    public: PublicAddress
    path: str
    address: str
    part: str | None = None
    https: bool = False
    session: str | None = attrs.field(default=None, repr=False)

    def may(self, role: str) -> bool:
        """Tell whether the visitor's role is enough: `read`, `operate` or `admin`."""
        return self.visitor.may(Role[role.upper()])

    def conceals(self, *values: object) -> bool:
        """Tell whether a value has a secret that stands nowhere in the page: the visitor has not given it."""
        return any(
            isinstance(value, str)
            and mask_text(value) != value
            and value != self.here
            and not any(value in given for given in self.arguments.values())
            for value in values
        )

    def link(self, path: str, query: Mapping[str, object]) -> str:
        """The address of one of our paths, for a link: by a name with a secret in it nothing is linked."""
        values = [value for name, value in query.items() if name != "after"]
        return self.public.url(CONCEALED) if self.conceals(*values) else self.public.url(path, query)

    @property
    def here(self) -> str:
        """The path and query of this page, without `part`: where a form may lead back to."""
        given = {name: values for name, values in self.arguments.items() if name != "part"}
        return PublicAddress().url(self.path, given)


@attrs.frozen
class Page:
    """HTML to be rendered: a template of templates/, the page's title, and the values of the template.

    refresh_s: seconds after which the live part should be asked for again, as long as the page is looked at; None: it
        has none, or it changes no more.
    """

    template: str
    title: str
    values: Mapping[str, Any] = attrs.field(factory=dict)
    refresh_s: float | None = None
    status: int = 200
    cookies: Sequence[Cookie] = ()


@attrs.frozen
class Cookie:
    """A cookie to be set; without a value it is taken away."""

    kind: str
    value: str
    max_age_s: int


@attrs.frozen
class Undo:
    """A form that takes an act back: one of our own addresses for POST, and its fields."""

    path: str
    fields: Mapping[str, str]


@attrs.frozen
class Redirect:
    """After an act: the page to go to (a path of ours, with its query), and what it shall say has been done."""

    to: str
    said: str | None = None
    undo: Undo | None = None
    cookies: Sequence[Cookie] = ()


@attrs.frozen(kw_only=True)
class Download:
    """Bytes as they are, such as a file of the pages or a text. `cached`: the Cache-Control."""

    data: bytes
    media_type: str
    file_name: str | None = None
    cached: str | None = None


@attrs.frozen
class Stream:
    """A file that is sent while it is made; what fails in its pieces ends the connection."""

    pieces: AsyncGenerator[bytes]
    media_type: str
    file_name: str


PageAnswer = Page | Redirect | Download | Stream
View = Callable[..., Awaitable[PageAnswer]]


@attrs.frozen(kw_only=True)
class PageRoute:
    """One method of one address of the pages, and its view.

    role: the role that a visitor needs; None: open to all.
    query, form: their types; the view gets them as `query` and `form`. A form's fields come as text.
    deadline_s: the seconds in which it must answer.
    """

    method: str
    path: str
    view: View
    role: Role | None
    query: type[Struct] | None = None
    form: type[Struct] | None = None
    deadline_s: float = DEADLINE_S


class Pages(list[PageRoute]):
    """The routes of one file of pages/, in the order of their declaration."""

    def show(
        self, path: str, *, role: Role | None = Role.READ, query: type[Struct] | None = None, **more: Any
    ) -> Callable[[View], View]:
        """Declare the decorated function as the view of a page."""
        return self._declare("GET", path, role=role, query=query, **more)

    def act(
        self, path: str, *, role: Role | None, form: type[Struct] | None = None, **more: Any
    ) -> Callable[[View], View]:
        """Declare the decorated function as what a form does when it is sent."""
        return self._declare("POST", path, role=role, form=form, **more)

    def _declare(self, method: str, path: str, **more: Any) -> Callable[[View], View]:
        def declare(view: View) -> View:
            self.append(PageRoute(method=method, path=f"{HOME}{path}", view=view, **more))
            return view

        return declare


class SignInNeededError(ProblemError):
    """Nobody whom we know has sent the request."""

    def __init__(self) -> None:
        super().__init__(HTTPStatus.UNAUTHORIZED, "Sign in to see this page.")


async def serve_page(
    route: PageRoute, services: Services, request: Request, request_id: str, parts: Mapping[str, Any]
) -> Response:
    """Answer a request to a page, whatever happens. Only `Cancelled` leaves here."""
    visit = _visit(services, request, request_id)
    try:
        check_origin(request.method, request.headers, visit.public, tokens=bool(services.settings.tokens))
        visitor = await _visitor(visit, needed=route.role is not None)
        if visitor is not None:
            visit = attrs.evolve(visit, visitor=visitor, operator=Operator(visitor.name, request_id))
        if route.role is not None:
            if visitor is None:
                raise SignInNeededError  # noqa: TRY301 - as the errors of the view
            _check_role(visitor, route.role)
        return await _in_turn(route, visit, request, dict(parts))
    except SignInNeededError as error:
        if request.method == "GET" and visit.part is None:
            to = visit.public.url(SIGN_IN, {"to": visit.here})
            return Response(b"", HTTPStatus.SEE_OTHER, {"Location": to, **HEADERS})
        return await error_page(error, visit)
    except Exception as error:  # noqa: BLE001 - the edge: what nobody expected is logged and becomes a 500
        return await error_page(error, visit)


async def refuse_page(error: Exception, services: Services, request: Request, request_id: str) -> Response:
    """The page for a request that fits no page."""
    visit = _visit(services, request, request_id)
    visitor = await _visitor(visit, needed=False)
    problem = problem_of(error)
    if problem is not None and problem.status is HTTPStatus.NOT_FOUND:
        error = ProblemError(HTTPStatus.NOT_FOUND, "No page has this address.")
    return await error_page(error, visit if visitor is None else attrs.evolve(visit, visitor=visitor))


def _visit(services: Services, request: Request, request_id: str) -> Visit:
    """The visit of somebody whom we do not know yet."""
    public = services.settings.public
    return Visit(
        services=services,
        operator=Operator("", request_id),
        arguments=dict(request.args.lists()),
        headers=request.headers,
        visitor=Visitor("", Role.READ, signed_in=False),
        preferences=Preferences.of(request.cookies.get(cookie_name("look", request.headers))),
        public=public,
        path=request.path,
        address=request.address,
        part=request.args.get("part"),
        https=public.is_https or request.scheme == "https",
        session=request.cookies.get(cookie_name("session", request.headers)),
    )


async def _visitor(visit: Visit, *, needed: bool) -> Visitor | None:
    """Return the visitor, or None. Where none is `needed`, it is None also if the database does not answer."""
    try:
        return await visit.services.sessions.visitor(visit.session)
    except StoreError:
        if needed:
            raise
        return None


def _check_role(visitor: Visitor, needed: Role) -> None:
    if not visitor.may(needed):
        has, needs = visitor.role.name.lower(), needed.name.lower()
        raise ProblemError(HTTPStatus.FORBIDDEN, f"The token {visitor.name!r} has the role {has}; this needs {needs}.")


async def _in_turn(route: PageRoute, visit: Visit, request: Request, parts: dict[str, Any]) -> Response:
    services = visit.services
    if route.query is not None:
        asked = {name: values for name, values in visit.arguments.items() if name != "part" and values != [""]}
        parts["query"] = decode_query(asked, route.query)
    if route.method == "POST":
        fields = await _fields(request)
        if route.form is not None:
            parts["form"] = decode_query(fields, route.form)
    if not services.at_work.take(1):
        services.refusals.count(Refusal.BUSY)
        raise too_busy("The server handles too many requests now; try again.")
    try:
        with trio.fail_after(route.deadline_s):
            if visit.part is None:
                return await _answer(await route.view(visit, **parts), visit, request)
            async with services.pace.turn.place_of(visit.operator.name):
                return await _answer(await route.view(visit, **parts), visit, request)
    finally:
        services.at_work.give(1)


async def _fields(request: Request) -> dict[str, list[str]]:
    if not (request.content_length or "Transfer-Encoding" in request.headers):
        return {}
    if request.mimetype != FORM:
        raise ProblemError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"A form is sent as `{FORM}`.")
    data = await request.received.read(MOST_FORM)
    try:
        pairs = parse_qsl(data.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict")
    except ValueError as error:
        raise ProblemError(HTTPStatus.BAD_REQUEST, f"The form can't be read: {error}.") from error
    fields: dict[str, list[str]] = {}
    for name, value in pairs:
        if value:  # an empty field is one that is not given
            fields.setdefault(name, []).append(value)
    return fields


async def _answer(answer: PageAnswer, visit: Visit, request: Request) -> Response:
    match answer:
        case Page():
            return await _rendered(answer, visit, request)
        case Redirect():
            response = Response(b"", HTTPStatus.SEE_OTHER, {"Location": visit.public.base + answer.to, **HEADERS})
            _set_cookies(response, [*answer.cookies, *_cookie_of_flash(answer, visit)], visit)
            return response
        case Stream():
            named = {"Content-Disposition": f'attachment; filename="{answer.file_name}"'}
            return StreamedResponse.of(answer.pieces, {**HEADERS, **named}, answer.media_type)
        case Download():
            headers = {**HEADERS, **({"Cache-Control": answer.cached} if answer.cached else {})}
            if answer.file_name is not None:
                headers["Content-Disposition"] = f'attachment; filename="{answer.file_name}"'
            return Response(answer.data, 200, headers, content_type=answer.media_type)


async def _rendered(page: Page, visit: Visit, request: Request) -> Response:
    flash = _flash(visit, request) if visit.part is None else None
    context = _context(page, visit, flash)
    template = TEMPLATES.get_template(page.template)
    if visit.part is None:
        data, _ = await _rendering(template.generate(context))
        response = Response(data, page.status, dict(HEADERS), content_type=HTML)
        if flash is not None:
            _set_cookies(response, [Cookie("said", "", 0)], visit)
        _set_cookies(response, page.cookies, visit)
        return response
    pieces = pieces_of_block(template, f"part_{visit.part}", context)
    if pieces is None:
        raise ProblemError(HTTPStatus.NOT_FOUND, f"This page has no part {visit.part[:60]!r}.")
    data, took_s = await _rendering(pieces)
    tag = f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'
    headers = {**HEADERS, "ETag": tag}
    if page.refresh_s is not None:
        headers["Refresh-In"] = f"{visit.services.pace.next_in(page.refresh_s, took_s):.2f}"
    if request.headers.get("If-None-Match") == tag:
        return Response(b"", HTTPStatus.NOT_MODIFIED, headers)
    return Response(data, page.status, headers, content_type=HTML)


def _context(page: Page, visit: Visit, flash: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a template sees. `ui` has the macros: a block that is rendered alone knows nothing of its file's imports."""
    context = {
        **page.values,
        "visit": visit,
        "title": page.title,
        "refresh_s": page.refresh_s,
        "flash": flash,
        "server_time": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
    return context | {"ui": TEMPLATES.get_template("macros.html").make_module(context)}


async def _rendering(pieces: Iterator[str]) -> tuple[bytes, float]:
    """What a template says, and the seconds that it took; other tasks get their turns meanwhile."""
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
    """The page for an error; for a part of a page, its text alone."""
    problem = problem_of(error, starting=visit.services.state().starting)
    if problem is None:
        log.error("a page failed", path=visit.path, exc_info=error)
        problem = ProblemError(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            f"This should not happen. The log has it under {visit.operator.request_id}.",
        )
    shown = problem.problem(visit.operator.request_id or "", visit.path)
    if visit.part is not None:
        lines = [shown.detail, *(f"{fault.path}: {fault.message}" for fault in shown.errors)]
        text = "\n".join(lines).encode()
        return Response(text, problem.status, {**HEADERS, **problem.headers}, content_type="text/plain; charset=utf-8")
    page = Page("error.html", shown.title, {"problem": shown})
    data, _ = await _rendering(TEMPLATES.get_template(page.template).generate(_context(page, visit, None)))
    return Response(data, problem.status, {**HEADERS, **problem.headers}, content_type=HTML)


def _set_cookies(response: Response, cookies: Sequence[Cookie], visit: Visit) -> None:
    for cookie in cookies:
        response.set_cookie(
            cookie_name(cookie.kind, visit.headers),
            cookie.value,
            max_age=cookie.max_age_s,
            path=f"{visit.public.base}{HOME}",
            secure=visit.https,
            httponly=True,
            samesite="Lax",
        )


def session_cookie(value: str) -> Cookie:
    """The cookie of a sign-in; "" ends it."""
    return Cookie("session", value, LASTS_S if value else 0)


def _flashes(visit: Visit) -> URLSafeTimedSerializer:
    return URLSafeTimedSerializer(visit.services.sessions.own_key, serializer=json)


def _cookie_of_flash(answer: Redirect, visit: Visit) -> list[Cookie]:
    if answer.said is None:
        return []
    undo = None if answer.undo is None else attrs.asdict(answer.undo)
    signed = _flashes(visit).dumps({"said": answer.said[:_MOST_SAID], "undo": undo})
    return [Cookie("said", signed if isinstance(signed, str) else signed.decode(), _FLASH_S)]


def _flash(visit: Visit, request: Request) -> dict[str, Any] | None:
    """What the act before this page has done, for once. Signed by this process: nobody else makes us say a thing."""
    cookie = request.cookies.get(cookie_name("said", visit.headers))
    if not cookie:
        return None
    try:
        return msgspec.convert(_flashes(visit).loads(cookie, max_age=_FLASH_S), dict[str, Any])
    except (BadSignature, msgspec.ValidationError):
        return {}
