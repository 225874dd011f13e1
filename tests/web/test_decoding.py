"""Bodies are decoded by decoders that exist before the first request."""

from __future__ import annotations

import pytest

from dataloader.web import decoding
from dataloader.web.app import ROUTES


@pytest.mark.requirement("Q5")
async def test_decoders_of_bodies_are_made_before_requests_are_served(open_web):
    """Two threads that create the same decoder crash the process: msgspec has no lock."""
    decoding._decoder.cache_clear()
    async with open_web():
        made = decoding._decoder.cache_info().misses
        for kind in {route.body for route in ROUTES if route.body is not None}:
            decoding._decoder(kind)
        assert decoding._decoder.cache_info().misses == made > 10
