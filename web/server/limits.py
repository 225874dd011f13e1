"""Limits of the HTTP server: how long it waits for a client or the database, and how many bytes it holds."""

from __future__ import annotations

from typing import Final

import attrs

from dataloader.web.problems import RETRY_AFTER_S


@attrs.frozen(kw_only=True)
class HttpLimits:
    """Limits in seconds, bytes and numbers. No setting changes them; a test passes smaller ones."""

    header_s: float = 10.0
    """Time in which a request's header must arrive, from the start of the connection or from its own first byte."""
    header_bytes: int = 16 << 10
    header_fields: int = 100
    idle_s: float = 75.0
    """Time for which a connection is kept for the next request."""
    young_connection_s: float = 0.1
    """Time in its phase before which a connection does not give way."""
    body_s: float = 30.0
    """Time in which a body must arrive."""
    young_body_s: float = 1.0
    """Time of arriving before which a body does not give way to others."""
    body_before_route_bytes: int = 128 << 10
    """Limit of a body until the limit of its route is known."""
    received_bytes: int = 32 << 20
    """Bytes that all long bodies hold; at least two batches of the longest kind."""
    sent_bytes: int = 32 << 20
    """Bytes that all long answers hold."""
    taken_s: float = 10.0
    """Time in which a client must take each piece of an answer."""
    end_s: float = 10.0
    """Maximum time for the end of an answer, whatever is cancelled."""
    close_s: float = 1.0
    """Time in which a connection is closed: the client takes the data that was sent last, and stops sending."""
    grace_s: float = 3.0
    """Time that open requests have to finish at the shutdown."""
    no_file_s: float = 0.1
    """Pause after a connection for which the process, or the machine, had no file."""
    late_wait_s: float = 1.0
    """Longest `?wait=` once a drain has begun. It can be answered in time, and clients do not ask continuously."""
    wait_again_s: int = RETRY_AFTER_S
    """Time after which a client may repeat a `?wait=` for which there was no room."""
    database_s: float = 5.0
    """Time for which a scrape waits for counts from the database."""
    ping_s: float = 2.0
    """Time for which a probe, a scrape or `/status` waits for the database."""
    batches_s: float = 8.0
    """Time for which one request of a page continues with jobs or processes, batch by batch."""
    exported_jobs: int = 100_000
    """Maximum number of jobs in one file; with a search of args, of jobs that it reads."""


STANDARD: Final = HttpLimits()
"""Limits of every server outside of tests."""
