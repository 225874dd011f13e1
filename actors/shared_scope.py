"""Cancel scope of handlers that run one after another in one task, until one of them waits.

Entering and leaving a scope takes a quarter of the time of a short run. A handler that does not wait cannot be stopped,
so such handlers share a scope. The first that waits keeps it, and the scope gets the deadline of that run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final

import attrs
import trio

from dataloader.actors.job_runs import Run
from dataloader.jobs.logger import get_logger

log = get_logger(__name__)

_LEFT_OPEN: Final = "a handler left a cancel scope open"


@attrs.define(eq=False)
class SharedScope:
    """Scope of one task; `of` returns the block of a handler.

    Between the blocks the scope stays open. Until a handler waits, the scope has the deadline of the run that opened
    it, which is not later than that of the current run. It is shielded meanwhile, so its deadline is the effective one.
    Another effective deadline means that a handler has left its own scope open, and its job fails. An open scope
    without a deadline is noticed when the shared scope ends: it is logged, and fails no other job.
    """

    _scope: trio.CancelScope | None = attrs.field(default=None, init=False)
    _deadline: float = attrs.field(default=0.0, init=False)
    _safe_until: float = attrs.field(default=0.0, init=False)
    _has_shared: bool = attrs.field(default=False, init=False)
    """True if a handler has ended in the open scope."""
    _run: Run = attrs.field(init=False)

    def of(self, run: Run) -> AbstractContextManager[Any]:
        """Return the block of `run`: in the shared scope, or in a separate one if more than its lease bounds it."""
        may_share = run.may_share
        if not may_share or run.lease.safe_until < self._safe_until:
            self.close()
        if not may_share:
            return run.open_scope()
        self._run = run
        return self

    def __enter__(self) -> None:
        """Open the scope, if it is not open."""
        if self._scope is None:
            self._safe_until, self._deadline = self._run.lease.safe_until, self._run.deadline
            self._has_shared = False
            self._scope = trio.CancelScope(deadline=self._deadline, shield=True)
            self._scope.__enter__()

    def keep(self) -> None:
        """Leave the scope to the run, which waits, unless its handler has ended."""
        scope = self._scope
        if scope is None or self._run.body_ended:
            self.close()
        else:
            self._scope = None
            scope.shield = False
            self._run.waits_in(scope)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Leave the scope if the handler has waited, or has left its own scope open, which Trio then reports."""
        scope = self._run.scope
        if scope is not None:
            try:
                return bool(scope.__exit__(kind, error, traceback))
            except RuntimeError:
                if not self._has_shared:
                    raise
                log.exception(_LEFT_OPEN)
                return False
        if trio.current_effective_deadline() != self._deadline:
            scope, self._scope = self._scope, None
            return scope is not None and bool(scope.__exit__(kind, error, traceback))
        self._has_shared = True
        return False

    def close(self) -> None:
        """Leave the scope, if it is open."""
        scope, self._scope, self._safe_until = self._scope, None, 0.0
        try:
            if scope is not None:
                scope.__exit__(None, None, None)
        except RuntimeError:
            log.exception(_LEFT_OPEN)
