"""Base of the parts of a client, such as `Jobs`: each builds operations, and a performer performs them."""

from __future__ import annotations

from typing import Self

import attrs

from dataloader.jobs.contract import Operator
from dataloader.jobs.operations.performer import Performer


@attrs.frozen
class ClientPart:
    """Part of a client for one subject."""

    performer: Performer = attrs.field(repr=False)

    def signed(self, operator: Operator) -> Self:
        """Return the same with another operator in the audit log. Raises `ConfigError` through a service."""
        return attrs.evolve(self, performer=self.performer.signed(operator))
