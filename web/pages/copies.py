"""Texts that a page offers to copy: its link, and the equivalent API call and command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import attrs

from dataloader.jobs.secrets.masking import mask_text
from dataloader.web.pages.visit import Visit


@attrs.frozen
class Copy:
    """Text to copy, and its label."""

    label: str
    text: str


def copies(visit: Visit, api: str, query: Mapping[str, Any], command: Sequence[str]) -> tuple[Copy, ...]:
    """Return the page's link, the address `api` as curl, and a `dataloader` command, without secrets."""
    origin = visit.public.origin or f"{'https' if visit.https else 'http'}://{visit.headers.get('Host', '')}"
    given = f"?{urlencode(query, quote_via=quote)}" if query else ""
    url = f"{origin}{visit.public.base}{api}{given}"
    token = ' -H "Authorization: Bearer $DL_TOKEN"' if visit.services.settings.tokens else ""
    return (
        Copy("Link", mask_text(f"{origin}{visit.public.base}{visit.here}")),
        Copy("curl", mask_text(f"curl{token} {shlex.quote(url)}")),
        Copy("Command", mask_text(shlex.join(["dataloader", *command]))),
    )
