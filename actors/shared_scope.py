"""The cancel scope of handlers that run one after another in one task, until one of them waits.

Entering and leaving a scope takes a quarter of a short run. A handler that does not wait can't be stopped, so such
handlers share one. The first that waits keeps it, and the scope gets the deadline of that run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import attrs
import trio

from dataloader.actors.job_runs import Run
from dataloader.jobs.logger import get_logger

log = get_logger(__name__)


@attrs.define(eq=False)
class SharedScope:
    """The scope of one task; `of` gives the block of a handler.

    Between the blocks the scope stays open. Until a handler waits, the scope has the deadline of the run that opened
    it, which is not later than that of the current run. If another scope is the innermost one when a handler has ended,
    that handler has left it open.
    """

    _scope: trio.CancelScope | None = attrs.field(default=None, init=False)
    _innermost: object = attrs.field(default=None, init=False)
    _safe_until: float = attrs.field(default=0.0, init=False)
    _run: Run = attrs.field(init=False)

    def of(self, run: Run) -> AbstractContextManager[Any]:
        """Return the block of `run`: in the shared scope, or in one of its own if more than its lease bounds it."""
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
            self._safe_until = self._run.lease.safe_until
            self._scope = trio.CancelScope(deadline=self._run.deadline)
            self._scope.__enter__()
            self._innermost = _innermost()

    def keep(self) -> None:
        """The run waits: leave the scope to it, unless its handler has ended."""
        scope = self._scope
        if scope is None or self._run.body_ended:
            self.close()
        else:
            self._scope = None
            self._run.waits_in(scope)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Leave the scope if the handler has waited, or has left a scope of its own open, which Trio then reports."""
        scope = self._run.scope
        if scope is None and _innermost() is not self._innermost:
            scope, self._scope = self._scope, None
        return scope is not None and bool(scope.__exit__(kind, error, traceback))

    def close(self) -> None:
        """Leave the scope, if it is open."""
        scope, self._scope, self._safe_until = self._scope, None, 0.0
        try:
            if scope is not None:
                scope.__exit__(None, None, None)
        except RuntimeError:
            log.exception("a handler has left a cancel scope open", task=self._run.job.task)


def _innermost() -> object:
    """Return what Trio keeps of the innermost cancel scope of this task; None if a later Trio has no such attribute.

    Trio's public functions tell a scope without deadline apart from none only when its surrounding scope is left.
    """
    return getattr(trio.lowlevel.current_task(), "_cancel_status", None)
