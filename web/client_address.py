"""Address of the client of a request, also behind a proxy.

A connection has the address of its other end, which may be a proxy. A proxy appends the address of its own client to
the header `X-Forwarded-For`. Everything to the left of that comes from the client, which may have written anything. So
the header is read from the right, and only as far as each address is a proxy that `DL_TRUSTED_PROXIES` names.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from werkzeug.datastructures import Headers

FORWARDED: Final = "X-Forwarded-For"
_HOME_BITS: Final = 64
"""Prefix length of the network of one IPv6 client, which may use any address in it."""

Network = IPv4Network | IPv6Network


def client_of(peer: str, headers: Headers, trusted: Sequence[Network]) -> str:
    """Return the address of the client, or its network for IPv6.

    Args:
        peer: the address of the connection's other end.
        headers: the headers of the request.
        trusted: the proxies whose `X-Forwarded-For` is trusted.
    """
    client = _address(peer)
    hops = ",".join(headers.getlist(FORWARDED)).split(",") if trusted else []
    while client is not None and hops and any(client in network for network in trusted):
        before = _address(hops.pop())
        if before is None:
            break  # the proxy gives no address, so all its clients count as one
        client = before
    if client is None:
        return peer
    return str(client if client.version == 4 else ip_network((int(client), _HOME_BITS), strict=False))


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Return the address in a text such as `192.0.2.1`, `192.0.2.1:4711` or `[2001:db8::1]:4711`."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address
