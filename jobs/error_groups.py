"""Errors within exception groups: Trio's nurseries wrap errors in groups, and groups in groups.

Also determines whether an error is only an outage of the database, which is not an error of the handler or the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from dataloader.jobs.errors import AccessDenied, StoreUnavailable


def single_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of a group and its nested groups, in order. Any other error is yielded itself."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from single_errors(member)
    else:
        yield error


def first_error(error: Exception) -> Exception:
    """Return the first error that is not a group."""
    return cast("Exception", next(single_errors(error)))  # an ExceptionGroup has only such errors


def only_error(error: BaseException) -> BaseException:
    """Return the one error of a group, or the group itself if it has several."""
    first, *others = single_errors(error)
    return error if others else first


def is_outage(error: BaseException) -> bool:
    """Return True if an error means only that the database cannot be used now.

    This is true for `StoreUnavailable`, an error raised `from` it, and a group of such errors only. It is not true for
    an error that occurred while one was handled, without `from`.
    """
    return _is_from(StoreUnavailable, error)


def is_denied(error: BaseException) -> bool:
    """Return True if an error means only that a database or service refuses the address or the password."""
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
