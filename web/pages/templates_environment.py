"""Jinja's environment for the pages: all values are escaped, undefined ones raise, filters are in formats.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template, pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from dataloader.web.pages import formats
from dataloader.web.pages.assets import asset_path
from dataloader.web.pages.badges import badge, color, sign, state_of_job
from dataloader.web.pages.icons import SPRITE, icon
from dataloader.web.pages.json_tree import json_tree
from dataloader.web.pages.svg import CHARTS


@pass_context
def _url(context: Context, path: str, **query: object) -> str:
    """Return the address of one of our paths: `url("/ui/jobs", queue=name)`."""
    url: str = context["visit"].link(path, query)
    return url


@pass_context
def _with_query(context: Context, **changes: object) -> str:
    """Return the current page's address with a changed query: `with_query(after=next)`; None removes a value."""
    visit = context["visit"]
    given = {name: values for name, values in visit.arguments.items() if name != "part"}
    url: str = visit.link(visit.path, given | changes)
    return url


@pass_context
def _asset(context: Context, name: str) -> str:
    """Return the address of a file of static/."""
    url: str = context["visit"].public.url(asset_path(name))
    return url


@pass_context
def _instant_filter(context: Context, value: Any, **options: Any) -> str | Markup:
    return formats.instant(value, context["visit"].preferences.tz, **options)


@pass_context
def _clock_filter(context: Context, value: Any, **options: Any) -> str | Markup:
    return formats.clock(value, context["visit"].preferences.tz, **options)


@pass_context
def _ago(context: Context, value: Any) -> str | Markup:
    return formats.ago(value, context["visit"].preferences.tz)


@pass_context
def _due(context: Context, value: Any) -> str | Markup:
    return formats.ago(value, context["visit"].preferences.tz, kind="due")


@pass_context
def _sentence(context: Context, text: str) -> Markup:
    """Return one of our sentences: its timestamps in the reader's zone, job IDs as links."""
    visit = context["visit"]
    return formats.sentence(text, visit.preferences.tz, lambda job_id: visit.public.url(f"/ui/jobs/{job_id}"))


class _Unindented(FileSystemLoader):
    """Templates without the spaces at the beginning of lines. They would be a sixth of a long list."""

    def get_source(self, environment: Environment, template: str) -> tuple[str, str, Any]:
        """Load a template as Jinja does. Line breaks and spaces within values are kept."""
        source, path, is_current = super().get_source(environment, template)
        return _INDENT.sub("", source), path, is_current


_INDENT: Final = re.compile(r"^[ ]+(?=<|\{)", re.MULTILINE)


def _environment() -> Environment:
    environment = Environment(
        loader=_Unindented(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=formats.inert,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(formats.FILTERS)
    environment.filters.update(
        {
            "instant": _instant_filter,
            "clock": _clock_filter,
            "ago": _ago,
            "due": _due,
            "sentence": _sentence,
            "json_tree": json_tree,
        }
    )
    environment.globals.update(CHARTS)
    environment.globals.update(
        {"badge": badge, "color": color, "icon": icon, "sign": sign, "sprite": SPRITE, "state_of_job": state_of_job}
    )
    environment.globals.update({"url": _url, "with_query": _with_query, "asset": _asset})
    return environment


TEMPLATES: Final = _environment()


def pieces_of_block(template: Template, name: str, context: Mapping[str, Any]) -> Iterator[str] | None:
    """Return one block of a template, piece by piece, or None if it has no such block."""
    block = template.blocks.get(name)
    return None if block is None else block(template.new_context(dict(context)))
