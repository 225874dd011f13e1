"""Units of a supplier's rate limits for a handler that sends several requests in one run."""

from __future__ import annotations

from typing import Final

import trio

from dataloader.jobs.errors import BadRequest, LimitReached, StoreError
from dataloader.jobs.growing_pauses import jittered
from dataloader.jobs.model import MAX_INT, MAX_NAME, check_between, check_name
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.fetching import aio_fetchrow
from dataloader.store.limits.closed_supplier import ClosedSupplier

LOOK_S: Final = 10.0
"""Maximum seconds between two checks: limits and periods may be changed, and requests of other jobs be canceled."""
SHARE: Final = 0.8
"""Part of the supplier's margin within which the answer must arrive. The rest is for the request's transfer."""

_TAKE: Final = "SELECT wait_s, why, most, margin_s FROM dl_supplier_take($1, $2)"


async def take_units(database: Database, supplier: str, units: int, max_wait_s: float) -> None:
    """Wait until the supplier's rate limits have `units` free and its period is open, and take them (Trio).

    Raises:
        LimitReached: they will not be free within `max_wait_s` seconds.
        BadRequest: no supplier has this name, or one of its rate limits is below `units`.
        StoreUnavailable: the database cannot be reached; the units may have been taken.
    """
    check_name("supplier", supplier, MAX_NAME)
    check_between("n", units, 1, MAX_INT)
    until, closed = trio.current_time() + max_wait_s, ClosedSupplier(supplier)
    while True:
        asked_at = trio.current_time()
        try:
            answer = await database.write(aio_fetchrow, _TAKE, supplier, units)
        except StoreError as error:
            answer = {"wait_s": closed.wait_s(error), "why": "error", "most": None, "margin_s": 0.0}
        if answer["wait_s"] is None:
            raise BadRequest("supplier", f"must be a declared supplier (tasks.supplier()), not {supplier!r}")
        if answer["most"] is not None and units > answer["most"]:
            raise BadRequest(
                "n", f"must be at most {answer['most']}, the smallest rate limit of {supplier!r}, not {units}"
            )
        if answer["wait_s"] <= 0:
            if trio.current_time() - asked_at <= SHARE * answer["margin_s"]:
                return
            # The answer was so late that the request would be sent outside the time in which it was counted.
            await trio.sleep(jittered(answer["margin_s"]))
            continue
        if trio.current_time() + answer["wait_s"] > until:
            raise LimitReached(supplier, answer["why"], answer["wait_s"])
        await trio.sleep(min(jittered(answer["wait_s"]), LOOK_S))
