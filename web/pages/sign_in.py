"""Sign-in and sign-out, display preferences, and the pages' own files."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import attrs
from msgspec import Meta, Struct

from dataloader.web.client_address import FORWARDED
from dataloader.web.pages.addresses import HOME, own_path
from dataloader.web.pages.assets import CACHED, find_asset
from dataloader.web.pages.flashes import session_cookie
from dataloader.web.pages.page_answers import Cookie, Download, HtmlPage, PageAnswer, Redirect
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.page_server import SIGN_IN
from dataloader.web.pages.preferences import LASTS_S, Preferences, Theme, zones
from dataloader.web.pages.visit import Visit
from dataloader.web.problems import FieldError, unprocessable

pages: Final = PageRoutes()


class SignInQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Page to go to after the sign-in."""

    to: str = HOME


class SignInForm(SignInQuery, kw_only=True):
    """API token."""

    token: Annotated[str, Meta(max_length=4_096)] = ""


class LookForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """Display preferences. `to`: the page to return to."""

    zone: str = "UTC"
    theme: Theme = "system"
    shortcuts: Literal["on", "off"] = "off"
    to: str = HOME


class ThemeForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """Colors."""

    theme: Theme


@pages.show("/sign-in", role=None, query=SignInQuery)
async def show_sign_in(visit: Visit, query: SignInQuery) -> PageAnswer:
    """Show the form for an API token."""
    if visit.visitor.name:
        return Redirect(own_path(query.to))
    return HtmlPage("sign_in.html", "Sign in", {"to": own_path(query.to), "wrong": False})


@pages.act("/sign-in", role=None, form=SignInForm)
async def sign_in(visit: Visit, form: SignInForm) -> PageAnswer:
    """Check a token and sign in; its text is not kept."""
    to = own_path(form.to)
    token = visit.services.token_check.find(form.token, visit.address, forwarded=FORWARDED in visit.headers)
    if token is None:
        return HtmlPage("sign_in.html", "Sign in", {"to": to, "wrong": True}, status=HTTPStatus.UNPROCESSABLE_ENTITY)
    return Redirect(to, cookies=[session_cookie(await visit.services.sessions.sign_in(token))])


@pages.act("/sign-out", role=None)
async def sign_out(visit: Visit) -> PageAnswer:
    """End the sign-in of this browser, also for copies of its cookie."""
    await visit.services.sessions.sign_out(visit.session)
    return Redirect(SIGN_IN, cookies=[session_cookie("")])


@pages.show("/look", role=None, query=SignInQuery)
async def show_look(_visit: Visit, query: SignInQuery) -> PageAnswer:
    """Show the form for time zone, colors and shortcuts."""
    return HtmlPage("look.html", "Display", {"zones": list(zones()), "to": own_path(query.to)})


@pages.act("/look", role=None, form=LookForm)
async def set_look(_visit: Visit, form: LookForm) -> PageAnswer:
    """Store the display preferences."""
    if form.zone not in zones():
        raise unprocessable([FieldError("zone", f"must be a time zone such as Europe/Berlin, not {form.zone[:60]!r}")])
    chosen = Preferences(form.zone, form.theme, form.shortcuts == "on")
    return Redirect(own_path(form.to), cookies=[Cookie("look", chosen.cookie, LASTS_S)])


@pages.act("/theme", role=None, form=ThemeForm)
async def set_theme(visit: Visit, form: ThemeForm) -> PageAnswer:
    """Change only the colors, and return to the page of the button."""
    page = urlsplit(visit.headers.get("Referer", ""))
    path = visit.public.without_base(page.path)
    chosen = attrs.evolve(visit.preferences, theme=form.theme)
    to = own_path(f"{path}?{page.query}" if page.query else path)
    return Redirect(to, cookies=[Cookie("look", chosen.cookie, LASTS_S)])


@pages.show("/static/<version>/<name>", role=None)
async def show_asset(visit: Visit, version: str, name: str) -> PageAnswer:
    """Return a file of the pages."""
    asset, is_current = find_asset(version, name)
    zipped = "gzip" in visit.headers.get("Accept-Encoding", "")
    return Download(
        data=asset.zipped if zipped else asset.data,
        media_type=asset.media_type,
        cached=CACHED if is_current else None,
        encoding="gzip" if zipped else None,
    )
