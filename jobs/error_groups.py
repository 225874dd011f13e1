"""The single errors within exception groups: Trio's nurseries wrap what is raised in them, in groups of groups.

Also tells whether they are an outage of the database, which is not an error of the handler or the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from dataloader.jobs.errors import AccessDenied, StoreUnavailable


def single_errors(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group and of the groups within it, in their order; an error that is no group is the only one."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from single_errors(member)
    else:
        yield error


def first_error(error: Exception) -> Exception:
    """The first error that is no group."""
    return cast("Exception", next(single_errors(error)))  # a group that is an Exception has no others


def only_error(error: BaseException) -> BaseException:
    """The one error of a group; the group itself if it has several."""
    first, *others = single_errors(error)
    return error if others else first


def is_outage(error: BaseException) -> bool:
    """Return whether an error says no more than that the database cannot be used now.

    So does `StoreUnavailable`, an error that was raised `from` one, and a group of nothing else. An error that only
    occurred while one was handled, without `from`, is another error.
    """
    return _is_from(StoreUnavailable, error)


def is_denied(error: BaseException) -> bool:
    """Return whether an error says no more than that a database or service refuses the address or the password."""
    return _is_from(AccessDenied, error)


def _is_from(kind: type[Exception], error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return True
        if isinstance(error, BaseExceptionGroup):
            return all(_is_from(kind, one) for one in single_errors(error))
        seen.add(id(error))
        error = error.__cause__
    return False
