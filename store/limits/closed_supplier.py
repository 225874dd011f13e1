"""Makes handlers and loads wait for a supplier whose limits the database cannot evaluate.

The supplier's row is invalid: manual SQL has changed it, or the server no longer knows its time zone. That is not a
failure of the handler or the load, so they wait, as for a paused supplier, until the row is corrected.
"""

from __future__ import annotations

import attrs

from dataloader.jobs.errors import SchemaError, StoreError, StoreUnavailable
from dataloader.jobs.growing_pauses import Pauses
from dataloader.jobs.logger import get_logger

log = get_logger(__name__)


@attrs.define
class ClosedSupplier:
    """Errors of one supplier that one caller has received."""

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
                "a supplier accepts no requests, because its limits cannot be evaluated",
                supplier=self.supplier,
                error=self._error,
            )
        return self._pauses.next()
