"""Addresses of Dask schedulers that a task may name: any with TLS, only this machine's without it."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from dataloader.jobs.loopback import is_loopback

ALLOWED: Final = "the address of a Dask scheduler, for example tls://scheduler:8786"


def refusal_of(address: str) -> str | None:
    """Return the description of allowed addresses if this one is refused, and None if it is allowed."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        return ALLOWED
    if not host or port is None or parts.scheme not in {"tcp", "tls"} or parts.path or parts.query or "@" in address:
        return ALLOWED
    if parts.scheme == "tcp" and not is_loopback(host):
        return "a tls:// address: without TLS only a loopback address is allowed, such as tcp://127.0.0.1:8786"
    return None
