"""Enters the wrappers of `@tasks.around` around a handler, in the handler's own task, thread or process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from dataloader.jobs.hooks import Around
from dataloader.jobs.job import AnyJob

SWALLOWED: Final = "a wrapper of @tasks.around swallowed the error of another wrapper"


@contextmanager
def inside(around: tuple[Around, ...], job: AnyJob) -> Iterator[None]:
    """Enter the wrappers. If one swallows the handler's error, raise it again: the job would count as succeeded."""
    raised: BaseException = RuntimeError(SWALLOWED)
    with ExitStack() as stack:
        for wrap in around:
            stack.enter_context(wrap(job))
        try:
            yield
        except BaseException as error:
            raised = error
            raise
        return
    raise raised
