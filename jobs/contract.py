"""Operator in the audit log, and changes of jobs."""

from __future__ import annotations

from typing import Final, Literal

import attrs

MAX_BULK: Final = 10_000
"""Maximum number of jobs that one transaction changes: their rows stay locked until it commits."""
BATCH: Final = 1_000
"""Number of jobs that one transaction changes for a filter without a limit."""


@attrs.frozen
class Operator:
    """Operator in the audit log: the API token's or the user's name, and the request's ID if there is one."""

    name: str
    request_id: str | None = None


@attrs.frozen(kw_only=True)
class Change:
    """Change of jobs. `force` is for `retry`, `priority` for `set_priority`."""

    action: Literal["cancel", "retry", "run_now", "set_priority"]
    force: bool = False
    priority: int = 0
