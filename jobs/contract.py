"""The operator in the audit, and what is done to many jobs."""

from __future__ import annotations

from typing import Final, Literal

import attrs

MAX_BULK: Final = 10_000
"""The most jobs that one transaction changes: their rows stay locked until it commits."""
BATCH: Final = 1_000
"""Jobs that one transaction changes of a filter without a limit."""


@attrs.frozen
class Operator:
    """The operator in the audit: the API token's or the user's name, and the request's id if there is one."""

    name: str
    request_id: str | None = None


@attrs.frozen(kw_only=True)
class Change:
    """A change of jobs. `force` belongs to `retry`, `priority` to `set_priority`."""

    action: Literal["cancel", "retry", "run_now", "set_priority"]
    force: bool = False
    priority: int = 0
