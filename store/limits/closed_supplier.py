"""Makes handlers and loads wait for a supplier whose limits the database cannot evaluate (S4).

The supplier's row is wrong: SQL by hand has changed it, or the server does not know its time zone any more. That is no
failure of the handler or of the load, so they wait, as for a paused supplier, until the row is corrected.
"""

from __future__ import annotations

import attrs

from dataloader.jobs.errors import SchemaError, StoreError, StoreUnavailable
from dataloader.jobs.growing_pauses import Pauses
from dataloader.jobs.logger import get_logger

log = get_logger(__name__)


@attrs.define
class ClosedSupplier:
    """The errors of one supplier, as one caller has seen them."""

    supplier: str
    _pauses: Pauses = attrs.field(factory=lambda: Pauses(1.0, 60.0))
    _error: str = ""

    def wait_s(self, error: StoreError) -> float:
        """Return the seconds until the next try. Raises an error that is not of this supplier, such as an outage."""
        if isinstance(error, StoreUnavailable | SchemaError):
            raise error
        if str(error) != self._error:
            self._error = str(error)
            log.error(
                "a supplier takes no requests: its limits cannot be evaluated",
                supplier=self.supplier,
                error=self._error,
            )
        return self._pauses.next()
